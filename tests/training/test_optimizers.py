"""pretrain_gpt.py --optimizer sgd and lion: torch's arithmetic, the same under every layout,
resumed under another.
"""

import dataclasses
import json

import pytest
import torch
from torch import nn

from megatron_merak import arguments
from megatron_merak.config import Config, OptimizerConfig
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.optimizer.lion import Lion
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid, held_parameters
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.stages.optimizer_state import optimizer_of_run, recipe_of_run
from tests.engines import gpt_trainer
from tests.ranks import run_ranks
from tests.training.jobs import RUN, SHAPE, job

FLAGS = {
    "sgd": "--optimizer sgd --sgd-momentum 0.8 --weight-decay 0.1",
    "lion": "--optimizer lion --lion-beta2 0.9 --lr 1e-3 --min-lr 1e-4 --decoupled-lr 2e-3",
}
TORCH = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.8),
    "lion": lambda groups: Lion(groups, lr=0.0, betas=(0.95, 0.9)),
}

PLACES = {"position_ids": torch.arange(16).expand(2, 16)}


def config_of(flags):
    argv = [
        *SHAPE.split(),
        *RUN.split(),
        "--mock-data",
        *"--train-iters 4 --clip-grad 0.5".split(),
        *flags.split(),
    ]
    return arguments.read(arguments.build_parser(config=Config), argv, Config)[0]


def test_every_choice_is_an_optimizer_whose_state_plans_count():
    (row,) = (row for row in dataclasses.fields(OptimizerConfig) if row.name == "optimizer")
    assert {*row.metadata["choices"]} == {"adam", *FLAGS}, "a row of FLAGS and of TORCH"
    for name, flags in FLAGS.items():
        config = config_of(flags).optimizer
        assert config.own and all(each.startswith(name) for each in config.own)
        made = recipe_of_run(config)
        theirs = TORCH[name]([nn.Parameter(torch.ones(2))])
        assert made.name == type(theirs).__name__
        kept = made.state_of("0 2", (1000, 1000))  # but for counters of steps
        assert kept == pytest.approx(config.state_bytes, abs=1e-3)


@pytest.mark.parametrize("name", FLAGS)
def test_steps_are_those_of_torch(name):
    config = config_of(FLAGS[name])
    made = make_plan(config, 1)
    (kept,), (adam,) = made.predicted_bytes, make_plan(config_of(""), 1).predicted_bytes
    less = 8 - config.optimizer.state_bytes
    assert less and adam - kept == less * held_parameters(made.units)
    mesh = build_mesh(Grid(), 0, torch.device("cpu"))
    trainer = gpt_trainer(config, made, mesh, optimizer_of_run(config.optimizer))
    buffer, drawn = trainer.model.buffer, torch.Generator().manual_seed(0)
    named = {key: nn.Parameter(buffer.parameter(key).clone()) for key in buffer.slots}
    numbers = {slot.group for slot in buffer.slots.values()}
    groups = [
        {"params": [named[key] for key, slot in buffer.slots.items() if slot.group == n]}
        for n in range(4)
    ]
    theirs = TORCH[name](groups)
    assert len(numbers) == (3 if config.optimizer.decoupled_lr else 2)
    for _ in range(3):
        tokens = torch.randint(60, (2, 2, 17), generator=drawn)
        batches = [
            {
                "tokens": rows[:, :-1],
                "labels": rows[:, 1:],
                "loss_mask": torch.ones(2, 16),
                **PLACES,
            }
            for rows in tokens
        ]
        for group, rates in zip(theirs.param_groups, trainer.rates(), strict=True):
            group["lr"], group["weight_decay"] = rates
        assert trainer.step(batches).grad_norm > 0.5  # what is left in main_grad is clipped
        for key, parameter in named.items():
            parameter.grad = buffer.grad(key).clone()
        theirs.step()
        for key, parameter in named.items():
            assert torch.equal(buffer.parameter(key), parameter), key


def _jobs(rank, world, runs, kind):
    told = []
    for flags in runs:
        try:
            told.append(job(rank, world, flags, kind))
        except (CheckpointError, ConfigError) as error:
            told.append(str(error))
    return told


def losses(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.long
def test_layouts_agree_and_resume_one_another(tmp_path):
    for name, flags in FLAGS.items():
        base, place = f"--train-iters 4 {flags} --metrics {tmp_path}/{name}", f"{tmp_path}/{name}-c"
        shared = "--use-distributed-optimizer"
        first = [f"{base}-one --save {place} --save-interval 2"]
        runs = [
            f"{base}-tp --tensor-model-parallel-size 2",
            f"{base}-dp {shared}",
            f"{base}-moved {shared} --load {place}",
        ]
        runs[-1] += " --ckpt-step 2"
        told = run_ranks(_jobs, 1, [*first, f"--train-iters 6 --load {place}"], Config)[0]
        named = type(TORCH[name]([nn.Parameter(torch.ones(1))])).__name__
        assert f"optimizer AdamW: the checkpoint's run had {named}" in told[1]
        run_ranks(_jobs, 2, runs, Config)
        wanted = losses(tmp_path / f"{name}-one")
        assert len(wanted) == 4
        for run in ("tp", "dp"):
            assert losses(tmp_path / f"{name}-{run}") == pytest.approx(wanted, abs=1e-5)
        assert losses(tmp_path / f"{name}-moved") == pytest.approx(wanted[2:], abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--sgd-momentum 0.5", "--sgd-momentum 0.5: has no effect with --optimizer adam"),
        (
            "--optimizer sgd --adam-beta2 0.99",
            "--adam-beta2 0.99: has no effect with --optimizer sgd",
        ),
        (
            "--optimizer lion --data-parallel-strategy ps-sync --num-parameter-servers 1",
            "--optimizer lion: parameter servers",
        ),
    ],
)
def test_what_has_no_effect_is_named(flags, told):
    with pytest.raises(ConfigError, match=told):
        config_of(flags).validate(2)
