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


def check(found, wanted, directory, reference):
    """Losses and norms to what sums in another order leave; the same way through the weights."""
    assert len(found) == len(wanted) == 6
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and mine[2] == pytest.approx(theirs[2], rel=1e-12)
        assert mine[1] == pytest.approx(theirs[1], rel=1e-3)
    way, other = moved(weights(reference)), moved(weights(directory))
    assert way.any() and (other - way).norm() < 1e-3 * way.norm()


@pytest.mark.parametrize("name", CASES)
def test_on_one_rank_it_is_the_same_optimizer(tmp_path, name):
    wanted = expected(name, tmp_path / "theirs")
    found = ours(name, tmp_path / "ours", {"per_device_train_batch_size": 4})[1]
    check(found, wanted, tmp_path / "ours", tmp_path / "theirs")
    resumed = ours(name, tmp_path / "resumed", {"per_device_train_batch_size": 4}, f"{tmp_path}/ours/checkpoint-3")[1]
    assert resumed == found
    assert all(map(torch.equal, weights(tmp_path / "resumed").values(), weights(tmp_path / "ours").values()))


DIVIDED = ("momentum", "adafactor", "muon", "signs", "lengths", "adam", "adafactor with momentum")
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "per_device_train_batch_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "optim": {"use_distributed_optimizer": True, "per_device_train_batch_size": 2},
    "full": {"fsdp": "full_shard", "per_device_train_batch_size": 2},
}


def divided(rank, world_size, directory, layout):
    found = {}
    for name in DIVIDED:
        place = f"{directory}/{name}"
        _, logs = ours(name, f"{place}/{layout}", LAYOUTS[layout])
        _, again = ours(name, f"{place}/{layout} again", LAYOUTS[layout], f"{place}/{layout}/checkpoint-3")
        _, other = ours(name, f"{place}/{layout} from one", LAYOUTS[layout], f"{place}/ours/checkpoint-3")
        found[name] = logs, again, other
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    directory = tmp_path_factory.mktemp("optimizers")
    found = {name: expected(name, directory / name / "theirs") for name in DIVIDED}
    for name in DIVIDED:
        ours(name, directory / name / "ours", {"per_device_train_batch_size": 4})
    return directory, found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_every_layout_it_is_the_same_optimizer(references, layout):
    directory, wanted = references
    for found in run_ranks(divided, 2, str(directory), layout, timeout=250):
        for name, (logs, again, other) in found.items():
            here = directory / name
            check(logs, wanted[name], here / layout, here / "theirs")
            assert again == logs, name
            check(other, wanted[name], here / f"{layout} from one", here / "theirs")
            back = ours(name, here / f"{layout} back", {"per_device_train_batch_size": 4}, f"{here}/{layout}/checkpoint-3")
            check(back[1], wanted[name], here / f"{layout} back", here / "theirs")
        break
