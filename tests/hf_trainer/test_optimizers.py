"""Every optimizer through transformers.Trainer and MerakTrainer, under every layout, resumed under another one."""

import pytest
import torch
from safetensors.torch import load_file

from megatron_merak.hf_trainer.arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.optimizer_cases import CASES, expected, moved, run
from tests.ranks import run_ranks


def ours(name, directory, changes, resume=None):
    trainer, logs = run(MerakTrainer, MerakArguments, name, directory, changes, resume)
    return trainer, logs


def weights(directory):
    return load_file(f"{directory}/last/model.safetensors")


def check(name, found, wanted, directory, reference):
    """Losses and norms to what sums in another order leave; the same way through the weights. Muon's iteration rounds
    to bf16, and where a gradient differs in its last bit some of these roundings go the other way."""
    assert len(found) == len(wanted) == 6
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and mine[2] == pytest.approx(theirs[2], rel=1e-12)
        assert mine[1] == pytest.approx(theirs[1], rel=1e-3)
    way, other = moved(weights(reference)), moved(weights(directory))
    assert way.any() and (other - way).norm() < (5e-3 if name == "muon" else 1e-3) * way.norm(), name


ALWAYS = ("momentum", "adagrad", "rmsprop", "adafactor", "lion", "muon", "own groups", "some")


def cases(names, chosen):
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases(CASES, ALWAYS))
def test_on_one_rank_it_is_the_same_optimizer(tmp_path, name):
    wanted = expected(name, tmp_path / "theirs")
    found = ours(name, tmp_path / "ours", {"per_device_train_batch_size": 4})[1]
    check(name, found, wanted, tmp_path / "ours", tmp_path / "theirs")
    resumed = ours(name, tmp_path / "resumed", {"per_device_train_batch_size": 4}, f"{tmp_path}/ours/checkpoint-3")[1]
    assert resumed == found
    assert all(map(torch.equal, weights(tmp_path / "resumed").values(), weights(tmp_path / "ours").values()))


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "per_device_train_batch_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "optim": {"use_distributed_optimizer": True, "per_device_train_batch_size": 2},
    "full": {"fsdp": "full_shard", "per_device_train_batch_size": 2},
}
FEW = {"tp2": ("adafactor", "muon"), "full": ("momentum", "muon", "signs")}
ALL = ("momentum", "adafactor", "muon", "signs", "lengths", "adam", "adafactor with momentum", "own adamw")


def divided(rank, world_size, directory, layout, names):
    """Runs, resumed ones, and those that resume a run of one rank."""
    found = {}
    for name in names:
        place, settings = f"{directory}/{name}", LAYOUTS[layout]
        runs = ("whole", None), ("again", f"{place}/whole/checkpoint-3"), ("moved", f"{place}/one/checkpoint-3")
        found[name] = [ours(name, f"{place}/{run}", settings, resume)[1] for run, resume in runs]
    return found


@pytest.mark.parametrize(
    ("layout", "names"),
    [*FEW.items(), *(pytest.param(layout, ALL, marks=pytest.mark.slow) for layout in LAYOUTS)],
    ids=lambda part: part if isinstance(part, str) else "all" if part is ALL else "few",
)
def test_under_every_layout_it_is_the_same_optimizer(tmp_path, layout, names):
    one, wanted = {"per_device_train_batch_size": 4}, {}
    for name in names:
        wanted[name] = expected(name, tmp_path / name / "theirs")
        ours(name, tmp_path / name / "one", one)
    ranks = run_ranks(divided, 2, str(tmp_path), layout, names, timeout=280)
    assert ranks[0] == ranks[1]
    for name, (whole, again, moved_here) in ranks[0].items():
        here = tmp_path / name
        check(name, whole, wanted[name], here / "whole", here / "theirs")
        check(name, moved_here, wanted[name], here / "moved", here / "theirs")
        assert again == whole
        assert all(map(torch.equal, weights(here / "again").values(), weights(here / "whole").values()))
        back = ours(name, here / "back", one, f"{here}/whole/checkpoint-3")[1]
        check(name, back, wanted[name], here / "back", here / "theirs")
