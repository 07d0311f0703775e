"""Jobs whose AdamW stores its moments in bf16: the same bits under every sharding, in checkpoints,
and after a resumption under another one.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron_merak import arguments
from megatron_merak.checkpoint.directory import directory_of, read_manifest
from megatron_merak.checkpoint.stored import read_stored
from megatron_merak.config import Config
from megatron_merak.errors import ConfigError
from megatron_merak.formats.merak import read_merak
from megatron_merak.formats.native import native_name
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid, held_parameters
from megatron_merak.plan.hardware import hardware_of
from megatron_merak.planner.host import update_time
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.training.job import Job
from tests.engines import gpt_trainer
from tests.ranks import run_ranks
from tests.training.jobs import RUN, SHAPE, job

AWARE = "--use-precision-aware-optimizer"
BF16 = f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
FLAGS = "--train-iters 4 --save-interval 2 --lr-decay-style constant --clip-grad 0.5 --bf16"
SHARDING = "--data-parallel-sharding-strategy"
MOMENTS = ("exp_avg", "exp_avg_sq")


def config_of(flags):
    argv = [*SHAPE.split(), *RUN.split(), "--mock-data", "--train-iters", "4", *flags.split()]
    return arguments.read(arguments.build_parser(config=Config), argv, Config)[0]


def state_of(place: Path, iteration: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, as they are stored."""
    directory = directory_of(place, iteration)
    manifest = read_manifest(directory)[1]
    return {
        f"{kind}/{name}": read_stored(directory, manifest, kind, name)
        for kind, names in manifest.tensors.items()
        for name in names
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    same = one.keys() == other.keys()
    return same and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items()
    )


def losses(path: Path) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def _jobs(rank: int, world: int, runs: list[str]) -> list[str]:
    return [job(rank, world, flags) for flags in runs]


def _loaded(rank: int, world: int, runs: list[tuple[str, Path]]) -> list[str]:
    """Jobs that load a checkpoint and do nothing but write that state to another place."""
    told = []
    for flags, place in runs:
        Job._train = lambda self, interruption, place=place: self.trainer.save(place)
        told.append(job(rank, world, flags))
    return told


def check_shardings(tmp_path: Path, others: list[str]) -> None:
    """Of two replicas: each of ``others`` computes what replicas without sharding compute, and goes
    on from their checkpoint.
    """
    base = f"{FLAGS} {BF16}"
    runs = [f"{base} --save {tmp_path}/plain"]
    for number, flags in enumerate(others):
        runs.append(f"{base} {flags} --save {tmp_path}/{number}")
        start = f"--load {tmp_path}/plain --ckpt-step 2"
        runs.append(f"{base} {flags} {start} --save {tmp_path}/{number}-on")
    run_ranks(_jobs, 2, runs)
    wanted = {iteration: state_of(tmp_path / "plain", iteration) for iteration in (2, 4)}
    for name, value in wanted[4].items():
        kind = name.split("/")[0]
        assert (value.dtype == torch.bfloat16) == (kind in (*MOMENTS, "model")), name
        assert value.count_nonzero(), name
    for number, flags in enumerate(others):
        for iteration, state in wanted.items():
            assert equal(state_of(tmp_path / str(number), iteration), state), (flags, iteration)
        assert equal(state_of(tmp_path / f"{number}-on", 4), wanted[4]), flags


@pytest.mark.long
def test_replicas_that_shard_compute_and_save_the_same_bits(tmp_path):
    check_shardings(tmp_path, [f"{SHARDING} optim", f"{SHARDING} optim_grads_params"])


@pytest.mark.long
def test_replicas_that_shard_compute_and_save_the_same_bits_in_other_ways(tmp_path):
    offload = f"{SHARDING} optim_grads_params --offload-model-states"
    check_shardings(tmp_path, [f"{SHARDING} optim_grads", offload])


def test_one_rank_reads_what_two_saved_and_trains_alike(tmp_path):
    base = f"{FLAGS} {BF16}"
    run = f"{base} {SHARDING} optim --save {tmp_path}/two --metrics {tmp_path}/two.jsonl"
    run_ranks(job, 2, run)
    alone = f"{base} --save {tmp_path}/one --metrics {tmp_path}/one.jsonl"
    run_ranks(job, 1, alone)
    assert losses(tmp_path / "two.jsonl") == pytest.approx(losses(tmp_path / "one.jsonl"), abs=1e-3)
    load = f"{base} --load {tmp_path}/two --save {tmp_path}/other"
    (told,) = run_ranks(_loaded, 1, [(load, tmp_path / "read")])[0]
    assert "Changed since" not in told
    saved = state_of(tmp_path / "two", 4)
    assert equal(state_of(tmp_path / "read", 4), saved)
    portable, _ = read_merak(tmp_path / "two", None, True, print)
    for kind in MOMENTS:  # as other programs have them
        for name in portable.kinds[kind].names():
            value = portable.kinds[kind].read(name)
            assert torch.equal(value, saved[f"{kind}/{native_name(name, 'gpt2')}"].float())


def test_moments_of_another_type_are_converted_and_that_is_told(tmp_path):
    place = f"--save {tmp_path}/other"
    runs = [
        f"{FLAGS} {BF16} --save {tmp_path}/halves --train-iters 2",
        f"{FLAGS} --save {tmp_path}/plain --train-iters 2",
    ]
    run_ranks(_jobs, 2, runs)
    told = run_ranks(
        _loaded,
        2,
        [
            (f"{FLAGS} --load {tmp_path}/halves {place}", tmp_path / "wide"),
            (
                f"{FLAGS} {BF16} {SHARDING} optim --load {tmp_path}/plain {place}",
                tmp_path / "narrow",
            ),
        ],
    )[-1]
    for text, now, before in ((told[0], "fp32", "bf16"), (told[1], "bf16", "fp32")):
        (line,) = [each for each in text.splitlines() if each.startswith("Changed since")]
        assert f"--exp-avg-dtype {now} (it was {before})" in line
        assert f"--exp-avg-sq-dtype {now} (it was {before})" in line
    for source, result, dtype in (
        ("halves", "wide", torch.float32),
        ("plain", "narrow", torch.bfloat16),
    ):
        saved = state_of(tmp_path / source, 2)
        converted = {
            name: value.to(dtype) if name.split("/")[0] in MOMENTS else value
            for name, value in saved.items()
        }
        assert equal(state_of(tmp_path / result, 2), converted)


@pytest.mark.parametrize(
    ("flags", "saved"), [(BF16, 4), (f"{AWARE} --exp-avg-dtype bf16", 2), (AWARE, 0)]
)
def test_a_plan_counts_what_a_rank_allocates(flags, saved):
    config = config_of(flags)
    made = make_plan(config, 1)
    plain = make_plan(config_of(""), 1)
    parameters = held_parameters(made.units)
    assert made.state_bytes == 8 - saved
    assert plain.predicted_bytes[0] - made.predicted_bytes[0] == saved * parameters
    (hardware,) = hardware_of(made.cluster, made.grid)
    assert (update_time(made, hardware) < update_time(plain, hardware)) == (saved > 0)
    trainer = gpt_trainer(config, made, build_mesh(Grid(), 0, torch.device("cpu")))
    optimizer = trainer.optimizer
    kept = optimizer.exp_avg.nbytes + optimizer.exp_avg_sq.nbytes
    assert kept == made.state_bytes * trainer.model.buffer.size


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--exp-avg-dtype bf16",
            "--exp-avg-dtype bf16: has no effect without --use-precision-aware-optimizer",
        ),
        (f"{AWARE} --exp-avg-sq-dtype fp8", "--exp-avg-sq-dtype fp8: is a choice of Megatron-LM"),
        (
            f"{AWARE} --optimizer lion",
            "--use-precision-aware-optimizer True: has no effect with --optimizer lion",
        ),
        (
            f"{BF16} --optimizer sgd",
            "--use-precision-aware-optimizer True: has no effect with --optimizer sgd",
        ),
        (
            f"{BF16} --data-parallel-strategy ps-sync --num-parameter-servers 1",
            "--use-precision-aware-optimizer True: servers store the moments, in fp32",
        ),
        (f"{AWARE} --main-grads-dtype bf16", "--main-grads-dtype: .* or use fp32"),
        (f"{AWARE} --main-params-dtype fp16", "--main-params-dtype: .* or use fp32"),
    ],
)
def test_what_is_not_there_is_named(flags, told):
    for training in (True, False):
        with pytest.raises(ConfigError, match=told):
            config_of(flags).validate(2, training=training)


def test_megatrons_command_is_taken_as_it_is():
    flags = f"{BF16} --main-grads-dtype fp32 --main-params-dtype fp32 --use-distributed-optimizer"
    config = config_of(flags)
    config.validate(2)
    assert config.optimizer.state_bytes == 4
    assert config_of(f"{AWARE} --exp-avg-dtype fp32").optimizer.state_bytes == 8


def test_a_second_moment_that_cannot_fall_is_told():
    (line,) = config_of(f"{BF16} --adam-beta2 0.999").ignored()
    assert line.startswith("--exp-avg-sq-dtype bf16 with --adam-beta2 0.999: ")
