"""Every optimizer through transformers.Trainer and MerakTrainer, under every layout, resumed under
another one.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Adafactor, Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.captured_once import Captures
from tests.hf_trainer.optimizer_cases import CASES, RUN, expected, moved, run
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = Captures()


def ours(name, directory, changes, resume=None):
    with CAPTURES.shared():
        trainer, logs = run(
            MerakTrainer, MerakArguments, name, directory, changes=changes, resume=resume
        )
    return trainer, logs


def weights(directory):
    return load_file(f"{directory}/last/model.safetensors")


def check(name, found, wanted, directory, reference):
    """Losses and norms to what sums in another order leave; the same way through the weights.
    Muon's iteration rounds to bf16, and where a gradient differs in its last bit some of these
    roundings go the other way."""
    assert len(found) == len(wanted) == 6
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and mine[2] == pytest.approx(
            theirs[2], rel=1e-12
        )
        assert mine[1] == pytest.approx(theirs[1], rel=1e-3)
    way, other = moved(weights(reference)), moved(weights(directory))
    assert way.any() and (other - way).norm() < (5e-3 if name == "muon" else 1e-3) * way.norm(), (
        name
    )


def kept_bytes(trainer):
    """Of the optimizer's state, for an element of the parameters that it trains."""
    optimizer, slots = trainer.engine.optimizer, trainer.engine.buffer.slots
    if optimizer.name == "AdamW":
        return 8
    tensors = [tensor for state in optimizer.state().values() for tensor in state.parts.values()]
    tensors += [tensor for kind in optimizer.other_state().values() for tensor in kind.values()]
    return sum(tensor.nbytes for tensor in tensors) / sum(
        slot.stop - slot.start for slot in slots.values()
    )


ALWAYS = ("momentum", "adagrad", "rmsprop", "adafactor", "lion", "muon", "own groups", "some")


def cases(names, chosen):
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases(CASES, ALWAYS))
def test_on_one_rank_it_is_the_same_optimizer(tmp_path, name):
    wanted = expected(name, tmp_path / "theirs")
    trainer, found = ours(name, tmp_path / "ours", {"per_device_train_batch_size": 4})
    check(name, found, wanted, tmp_path / "ours", tmp_path / "theirs")
    resumed = ours(
        name,
        tmp_path / "resumed",
        {"per_device_train_batch_size": 4},
        f"{tmp_path}/ours/checkpoint-3",
    )[1]
    assert resumed == found
    assert kept_bytes(trainer) == pytest.approx(trainer.engine.plan.state_bytes, rel=0.05)
    assert all(
        map(
            torch.equal, weights(tmp_path / "resumed").values(), weights(tmp_path / "ours").values()
        )
    )


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "per_device_train_batch_size": 4},
    "pp2": {
        "pipeline_model_parallel_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
    },
    "optim": {"use_distributed_optimizer": True, "per_device_train_batch_size": 2},
    "full": {"fsdp": "full_shard", "per_device_train_batch_size": 2},
    "tp2 full": {
        "tensor_model_parallel_size": 2,
        "fsdp": "full_shard",
        "per_device_train_batch_size": 2,
    },
}
FEW = ("muon",)
ALL = (
    "momentum",
    "adafactor",
    "muon",
    "signs",
    "lengths",
    "adam",
    "adafactor with momentum",
    "own adamw",
)


def divided(rank, world_size, directory, layout, names):
    """Runs, resumed ones, and those that resume a run of one rank."""
    found = {}
    for name in names:
        place, settings = f"{directory}/{name}", LAYOUTS[layout]
        runs = (
            ("whole", None),
            ("again", f"{place}/whole/checkpoint-3"),
            ("moved", f"{place}/one/checkpoint-3"),
        )
        found[name] = [ours(name, f"{place}/{run}", settings, resume)[1] for run, resume in runs]
    return found


@pytest.mark.parametrize(
    ("layout", "names"),
    [("tp2 full", FEW), *(pytest.param(layout, ALL, marks=pytest.mark.slow) for layout in LAYOUTS)],
    ids=lambda part: part if isinstance(part, str) else "all" if part is ALL else "few",
)
@pytest.mark.long
def test_under_every_layout_it_is_the_same_optimizer(tmp_path, layout, names):
    one, wanted = {"per_device_train_batch_size": 4}, {}
    for name in names:
        wanted[name] = expected(name, tmp_path / name / "theirs")
        ours(name, tmp_path / name / "one", one)
    ranks = run_ranks(
        divided, 4 if layout == "tp2 full" else 2, str(tmp_path), layout, names, timeout=280
    )
    assert all(found == ranks[0] for found in ranks)
    for name, (whole, again, moved_here) in ranks[0].items():
        here = tmp_path / name
        check(name, whole, wanted[name], here / "whole", here / "theirs")
        check(name, moved_here, wanted[name], here / "moved", here / "theirs")
        assert again == whole
        assert all(
            map(torch.equal, weights(here / "again").values(), weights(here / "whole").values())
        )
        back = ours(name, here / "back", one, f"{here}/whole/checkpoint-3")[1]
        check(name, back, wanted[name], here / "back", here / "theirs")


class Creates:
    """Methods of a script, for either trainer."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            super().create_optimizer()
            self.optimizer.param_groups[1]["lr"] = 5e-3
        return self.optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args, model=None):
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {**options, "momentum": 0.5}


class Rates(TrainerCallback):
    """A third of the second group's rate in the fourth step."""

    def on_step_begin(self, args, state, control, optimizer=None, **more):
        if state.global_step == 3:
            optimizer.param_groups[1]["lr"] /= 3


def test_a_script_may_make_it(tmp_path):
    def play(kind, arguments):
        args = arguments(str(tmp_path), optim="sgd", per_device_train_batch_size=4, **RUN)
        data = samples(24, ragged=False)
        trainer = kind(tiny_llama(), args, collate, data, callbacks=[Rates()])
        trainer.train()
        assert [group["momentum"] for group in trainer.optimizer.param_groups] == [0.5, 0.5]
        return [
            entry[key]
            for entry in trainer.state.log_history
            for key in ("loss", "grad_norm")
            if "loss" in entry
        ]

    theirs = play(type("Theirs", (Creates, Trainer), {}), TrainingArguments)
    assert play(type("Mine", (Creates, MerakTrainer), {}), MerakArguments) == pytest.approx(
        theirs, rel=1e-5
    )


def test_what_cannot_be_taken_is_named(tmp_path):
    def made(optimizer, **more):
        args = MerakArguments(str(tmp_path), per_device_train_batch_size=4, **{**RUN, **more})
        trainer = MerakTrainer(
            model, args, collate, samples(24, ragged=False), optimizers=(optimizer, None)
        )
        trainer.train()
        return trainer

    model, other = tiny_llama(), tiny_llama()
    with pytest.raises(ConfigError, match="SGD: a parameter of shape .* is none of the model's"):
        made(torch.optim.SGD(other.parameters()))
    with pytest.raises(ConfigError, match="LBFGS: a step of it fails"):
        made(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match=r"Adafactor: .* no learning rate.* relative_step=False"):
        made(Adafactor(model.parameters()))
    trainer = made(torch.optim.SGD(model.parameters(), lr=0.1), max_steps=1)
    with pytest.raises(ConfigError, match="MerakTrainer.optimizer"):
        trainer.optimizer = torch.optim.SGD(model.parameters())
    args = MerakArguments(str(tmp_path), optim="rmsprop", per_device_train_batch_size=4, **RUN)
    resuming = MerakTrainer(tiny_llama(), args, collate, samples(24, ragged=False))
    with pytest.raises(CheckpointError, match="optimizer RMSprop: the checkpoint's run had SGD"):
        resuming.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_tells_what_it_says_and_does_so_on_two_ranks(tmp_path):
    def told(ranks, *changes):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "examples/muon.py",
        ]
        more = ["--output_dir", str(tmp_path), "--disable_tqdm", "true", *changes]
        done = subprocess.run(
            [*command, *more], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [
            float(loss) for loss in re.findall(r"(?:adamw_torch|muon) += +([\d.]+)", done.stdout)
        ]

    page = (ROOT / "examples" / "muon.py").read_text()
    assert told(1) == pytest.approx(
        [float(loss) for loss in re.findall(r"= (\d\.\d{4})", page)], abs=0.05
    )
    few = told(1, "--max_steps", "8")
    assert told(2, "--max_steps", "8", "--tensor_model_parallel_size", "2") == pytest.approx(
        few, abs=2e-3
    )
