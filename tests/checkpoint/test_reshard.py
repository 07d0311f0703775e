"""Any number of ranks reads what any other number wrote, and a failure on one rank is
everyone's.
"""

import logging
import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.checkpoint.store import Shard, latest, load, prune, save
from megatron_merak.errors import CheckpointError
from tests.checkpoint.states import same, state
from tests.ranks import run_ranks


def _save_and_load(rank: int, world: int, root: Path, iteration: int, salt: int) -> bool:
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (pickle, "load"),
            (pickle, "loads"),
            (pickle, "Unpickler"),
            (torch, "load"),
        ):
            patch.setattr(owner, name, refuse)
        shards = state(rank, world, None)
        meta = load(root, shards, group, "cpu")
        assert latest(root, group) == meta["iteration"] == iteration
        assert (shards["model"][0].tensor.shape[0] == 0) == (world == 4 and rank == 3), (
            "the last rank holds padding"
        )
        save(root, iteration + 1, shards, {**meta, "by": [rank, world]}, group, "cpu")
    return same(shards, state(rank, world, salt))


def test_tensor_parallel_sizes_read_each_other(tmp_path):
    save(tmp_path, 1, state(0, 1, 5), {"consumed_samples": 7}, None, "cpu")
    for iteration, world in ((1, 2), (2, 4), (3, 2)):
        assert run_ranks(_save_and_load, world, tmp_path, iteration, 5) == [True] * world
    shards = state(0, 1, None)
    meta = load(tmp_path, shards, None, "cpu")
    assert meta == {"consumed_samples": 7, "by": [0, 2], "iteration": 4}
    assert same(shards, state(0, 1, 5))
    files = sorted(path.name for path in (tmp_path / "iter_0000003").iterdir())
    assert files == sorted(
        [f"{kind}-rank-0000{r}.safetensors" for kind in ("model", "exp_avg") for r in range(4)]
        + ["manifest.json"]
    )


def _save_stages(rank: int, world: int, root: Path, salt: int) -> None:
    """Pipeline: rank 0 holds the first two tensors, rank 1 the others and a copy of the first that
    it does not own.
    """
    shards = {}
    for kind, parts in state(0, 1, salt).items():
        tied = Shard(parts[0].name, parts[0].shape, None, (), parts[0].tensor, owner=False)
        shards[kind] = parts[:2] if rank == 0 else [tied, *parts[2:]]
    save(root, 1, shards, {}, dist.group.WORLD, "cpu")


def _load_wrong(rank: int, world: int, root: Path) -> str:
    shards = {kind: parts[:4] for kind, parts in state(rank, world, None).items()}
    try:
        load(root, shards, dist.group.WORLD, "cpu")
    except CheckpointError as error:
        return str(error)
    return ""


def test_pipeline_stages_join_and_a_tensor_that_no_rank_wants_is_named(tmp_path):
    run_ranks(_save_stages, 2, tmp_path, 9)
    shards = state(0, 1, None)
    load(tmp_path, shards, None, "cpu")
    assert same(shards, state(0, 1, 9))
    for message in run_ranks(_load_wrong, 2, tmp_path):
        assert "model tensors that the model does not have: h.0.scale" in message


def _load_narrow(rank: int, world: int, root: Path) -> list[str]:
    """Rank 0 has the first tensor as it was saved, and rank 1 the others in fewer bits."""
    whole = state(0, 1, None, kinds=("model",))["model"][:1]
    narrow = state(0, 1, None, kinds=("model",), dtype=torch.bfloat16)["model"][1:]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("megatron_merak.checkpoint.load")
    logger.addHandler(handler)
    load(root, {"model": narrow if rank else whole}, dist.group.WORLD, "cpu")
    return told


def test_one_rank_tells_that_tensors_of_others_changed_their_dtype(tmp_path):
    save(tmp_path, 1, state(0, 1, 9), {}, group=None, device="cpu")
    first, second = run_ranks(_load_narrow, 2, tmp_path)
    assert not first
    (line,) = second
    assert "4 tensors changed dtype" in line


def test_a_tensor_saved_along_one_dim_loads_along_another(tmp_path):
    full = torch.arange(48.0).reshape(6, 8)
    whole = [Shard("w", (6, 8), 0, ((3, 6), (0, 3)), full[[3, 4, 5, 0, 1, 2]])]
    save(tmp_path, 1, {"model": whole}, {}, None, "cpu")
    columns = Shard("w", (6, 8), 1, ((5, 7), (1, 2)), torch.zeros(6, 3))
    load(tmp_path, {"model": [columns]}, None, "cpu")
    assert torch.equal(columns.tensor, full[:, [5, 6, 1]])


def _fail_on_one_rank(rank: int, world: int, root: Path) -> list[str]:
    group, messages = dist.group.WORLD, []

    def attempt(action) -> None:
        try:
            action()
        except CheckpointError as error:
            messages.append(str(error))

    large = Shard("w", (world, 100_000), 0, ((rank, rank + 1),), torch.ones(1, 100_000))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    attempt(lambda: save(root, 2, {"model": [large]}, {}, group, "cpu"))
    attempt(lambda: save(root, 1, {"model": [large]}, {}, group, "cpu"))
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    shards = state(rank, world, None)
    if rank == 1:
        shards["model"].append(Shard("extra", (1,), None, (), torch.zeros(1)))
    attempt(lambda: load(root, shards, group, "cpu"))
    assert all((part.tensor <= 0).all() for parts in shards.values() for part in parts)
    attempt(lambda: prune(root, 0, group))
    return messages


def test_a_failure_on_one_rank_is_raised_on_all_and_loses_nothing(tmp_path):
    save(tmp_path, 1, state(0, 1, 5), {}, None, "cpu")
    for new, again, wrong, zero in run_ranks(_fail_on_one_rank, 2, tmp_path):
        assert "on rank 1, File too large" in new and "on rank 1, File too large" in again
        assert "on rank 1, tensor model/extra: it is missing" in wrong
        assert "on ranks 0, 1, it is not positive" in zero
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]
    shards = state(0, 1, None)
    load(tmp_path, shards, None, "cpu")
    assert same(shards, state(0, 1, 5))
