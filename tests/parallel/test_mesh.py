"""The mesh: each rank's coordinates and groups are those of the rank grid."""

import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel.mesh import Mesh, build_mesh, new_groups
from megatron_merak.plan import Grid
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def test_a_single_rank_has_no_groups():
    mesh = build_mesh(Grid(), 0, CPU)
    assert (mesh.tp, mesh.dp, mesh.pp, mesh.model, mesh.control) == (None,) * 5
    assert (mesh.tp_rank, mesh.dp_rank, mesh.pp_rank, mesh.peer(0)) == (0, 0, 0, 0)


def test_peers_keep_tensor_and_data_place():
    grid = Grid(tp=2, dp=3, pp=4)
    for rank in range(grid.size):
        mesh = Mesh(grid, rank, CPU)
        assert (mesh.tp_rank, mesh.dp_rank, mesh.pp_rank) == (rank % 2, rank // 2 % 3, rank // 6)
        assert [mesh.peer(pp) for pp in range(4)] == [rank % 6 + 6 * pp for pp in range(4)]


GRIDS = [Grid(tp=2, pp=2), Grid(tp=2, dp=2), Grid(dp=2, pp=2), Grid(tp=4), Grid(dp=4), Grid(pp=4)]


def members(rank, world_size):
    """For each grid the ranks of each group, found by communication alone."""
    results = []
    for grid in GRIDS:
        mesh = build_mesh(grid, rank, CPU, datetime.timedelta(seconds=77))
        found = {}
        for axis in ("tp", "dp", "pp", "model", "control"):
            group = getattr(mesh, axis)
            if group is not None:
                mine = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
                dist.all_gather(mine, torch.tensor([rank]), group=group)
                found[axis] = [int(other) for other in mine]
        timeouts = {
            getattr(mesh, axis)._get_backend(CPU).options._timeout
            for axis in found
            if axis != "control"
        }
        results.append((found, timeouts))
    return results


def test_groups_are_the_grids():
    axes = {"tp": "tp", "dp": "dp", "pp": "pp", "model": "tp-pp"}
    for rank, results in enumerate(run_ranks(members, 4)):
        for grid, (found, timeouts) in zip(GRIDS, results, strict=True):
            expected = {"control": [0, 1, 2, 3]}
            for axis, name in axes.items():
                (group,) = (group for group in grid.groups(name) if rank in group)
                if len(group) > 1:
                    expected[axis] = group
            assert found == expected
            assert timeouts == {datetime.timedelta(seconds=77)}, (
                "a group does not have the job's timeout"
            )


def members_of_instances(rank, world_size):
    """The ranks of `shard_group` and `replicate_group`, found by communication alone, and this
    rank's shard's index.
    """
    found = []
    for grid, instances in ((Grid(tp=2, dp=4), 2), (Grid(dp=8), 4), (Grid(dp=8), 1)):
        mesh = build_mesh(grid, rank, CPU, instances=instances)
        ranks = []
        for group in filter(None, (mesh.shard_group, mesh.replicate_group)):
            mine = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(mine, torch.tensor([rank]), group=group)
            ranks.append([int(other) for other in mine])
        found.append((ranks, mesh.shard_rank, mesh.shard_ranks))
        assert (mesh.shard_group is mesh.dp) == (instances == 1)
    return found


def test_instances_are_neighbouring_replicas_and_twins_are_at_the_same_place():
    found = run_ranks(members_of_instances, 8)
    assert found[0] == [
        ([[0, 2], [0, 4]], 0, 2),
        ([[0, 1], [0, 2, 4, 6]], 0, 2),
        ([[*range(8)]], 0, 8),
    ]
    assert found[7] == [
        ([[5, 7], [3, 7]], 1, 2),
        ([[6, 7], [1, 3, 5, 7]], 1, 2),
        ([[*range(8)]], 7, 8),
    ]
    assert found[5][0] == ([[5, 7], [1, 5]], 0, 2)


def overlapping(rank, world_size):
    groups = [
        new_groups(rank, lists, None, "tp") for lists in ([[0, 1], [2]], [[1, 2]], [[0], [1], [2]])
    ]
    return [None if group is None else group.size() for group in groups]


def test_groups_of_one_are_none_and_need_no_communicator():
    assert run_ranks(overlapping, 3) == [[2, None, None], [2, 2, None], [None, 2, None]]


class Told:
    """Stands for ``ProcessGroupNCCL.Options``, which a torch without CUDA lacks."""

    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config, self._timeout = SimpleNamespace(max_ctas=None), None


@pytest.mark.parametrize("bound", [None, torch.device("cuda", 0)])
def test_nccl_is_told_what_a_group_is_for(bound, monkeypatch):
    """Streams and blocks by use; one split makes all groups of an axis where communicators can be
    split.
    """
    made, seconds = [], datetime.timedelta(seconds=77)

    def new_group(ranks, timeout, backend, pg_options):
        made.append(([ranks], timeout, pg_options))

    def split_group(split_ranks, timeout, pg_options):
        made.append((split_ranks, timeout, pg_options))

    if not hasattr(dist, "ProcessGroupNCCL"):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Told), raising=False)
    monkeypatch.setattr(
        dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound))
    )
    for name, instead in {"get_backend": lambda: "nccl", "is_nccl_available": lambda: True}.items():
        monkeypatch.setattr(dist, name, instead)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    expected = {"tp": (True, None), "pp": (True, None), "dp": (False, None), "tp-pp": (False, None)}
    for use, told in (expected | {"tied": (False, None), "channel": (True, 4)}).items():
        made.clear()
        new_groups(0, [[1, 0], [2], [3, 4]], seconds, use)
        lists = [[[0, 1], [3, 4]]] if bound else [[[0, 1]], [[3, 4]]]
        assert [(ranks, timeout) for ranks, timeout, _ in made] == [
            (each, seconds) for each in lists
        ]
        every = [options for *_, options in made]
        assert len(set(map(id, every))) == len(every), (
            "torch writes a group's name into its options"
        )
        unset = type(every[0])().config.max_ctas
        for options in every:
            assert (options.is_high_priority_stream, options._timeout) == (told[0], seconds)
            assert options.config.max_ctas == (told[1] or unset)


def test_a_mesh_cannot_be_changed():
    with pytest.raises(AttributeError):
        build_mesh(Grid(), 0, CPU).rank = 1
