"""kill -9 before each call that touches the disk, while a HuggingFace directory is replaced: it
opens, old or new.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from megatron_merak.checkpoint import in_place
from megatron_merak.checkpoint.hf import from_pretrained, save_hf
from tests.checkpoint.hf_models import SIZES, check_equal, shards
from tests.checkpoint.kills import DISK, NAMES, fork, kill_before_call
from tests.ranks import run_ranks

CHANGES = NAMES | {"link", "symlink"}
CASES = {
    "sharded": ("8KB", "8KB"),
    "single": ("8KB", "5GB"),
    "split": ("5GB", "8KB"),
    "one": ("5GB", "5GB"),
}


@pytest.fixture
def root(tmp_path):
    """A directory in memory where there is one: a kill, unlike a power cut, does not care, and
    fsync is slow.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as directory:
        yield Path(directory)


def _model(layers: int):
    """Models of other depths need other configurations, so that neither opens with the other's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(layers)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 32,
        "num_hidden_layers": layers,
    }
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes))


def _opened(directory: Path) -> dict[str, torch.Tensor]:
    """What transformers loads, and this library alike; other files are as they were."""
    from transformers import LlamaForCausalLM

    theirs, told = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        told
    )
    source = from_pretrained(directory).merak_source
    check_equal({name: source.read(name) for name in source.names()}, dict(theirs.state_dict()))
    assert (directory / "notes.txt").read_text() == "mine"
    assert (directory / "checkpoint-5" / "model.safetensors").read_text() == "mine too"
    return dict(theirs.state_dict())


def _is(state: dict[str, torch.Tensor], model: torch.nn.Module) -> bool:
    other = model.state_dict()
    return state.keys() == other.keys() and all(
        torch.equal(state[name], other[name]) for name in state
    )


def _kill_everywhere(
    rank: int, world: int, root: Path, limits: tuple, calls: set[str], stride: int, tidy: bool
) -> tuple[int, int, int]:
    """Kill before every ``stride``-th of these calls. Returns (kills, how often the old and the new
    model opened).

    tidy: whether each save begins with a directory that no kill has touched.
    """
    old, new = _model(2), _model(3)
    place = root / "model"
    save_hf(place, old, shards(old), max_shard_size=limits[0])
    (place / "notes.txt").write_text("mine")
    (place / "checkpoint-5").mkdir()
    (place / "checkpoint-5" / "model.safetensors").write_text("mine too")
    shutil.copytree(place, root / "before")
    held = old  # the model that the directory shows
    kills = 0
    seen = {"before": 0, "after": 0}
    done = False
    while not done:
        saved = old if held is new else new
        limit = limits[0] if saved is old else limits[1]

        def work(report, number=kills * stride, saved=saved, limit=limit):
            kill_before_call(number, calls)
            save_hf(place, saved, shards(saved), max_shard_size=limit)
            report()

        done, reports = fork(work)
        state = _opened(place)
        after = saved if _is(state, saved) else held
        assert _is(state, after), f"torn after {kills * stride} calls"
        assert after is saved or not reports
        seen["after" if after is saved else "before"] += 1
        kills += not done
        held = after
        if tidy:
            shutil.rmtree(place)
            shutil.copytree(root / "before", place)
            held = old
    held = old if held is new else new
    save_hf(place, held, shards(held), max_shard_size="8KB")
    check_equal(_opened(place), dict(held.state_dict()))
    assert not (place / in_place.PLACE).exists()
    assert not any(path.is_symlink() for path in place.rglob("*"))
    return kills, seen["before"], seen["after"]


def _sample(rank: int, world: int, root: Path) -> list[tuple[int, int, int]]:
    results = []
    for case in ("sharded", "split"):
        (root / case).mkdir()
        results.append(_kill_everywhere(rank, world, root / case, CASES[case], CHANGES, 6, True))
    return results


def test_a_kill_leaves_a_directory_that_opens(root, record_property):
    [results] = run_ranks(_sample, 1, root)
    assert all(before and after for _, before, after in results), results
    kills = sum(each for each, _, _ in results)
    record_property("kills", kills)
    assert kills >= 25, results


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_kill_before_any_disk_call_leaves_a_directory_that_opens(
    root, case, tidy, record_property
):
    calls = DISK | CHANGES | {"readlink", "stat", "lstat"}
    [(kills, before, after)] = run_ranks(
        _kill_everywhere, 1, root, CASES[case], calls if tidy else CHANGES, 1, tidy, timeout=2900.0
    )
    record_property("kills", kills)
    assert kills >= 30 and before and after, (kills, before, after)
