"""Hosts as launchers tell of them, and what is said of groups that reach over them."""

import os
from dataclasses import replace

import pytest
import torch

from megatron_merak.cluster import CLUSTERS
from megatron_merak.parallel.launch import World, launch, leave
from megatron_merak.parallel.nodes import Nodes, find_nodes, located, nodes_of, notices
from megatron_merak.plan import Grid
from tests.parallel.test_launch import VARIABLES, free_port
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def told(*sizes: int) -> list[tuple[int, int]]:
    return [(size, place) for size in sizes for place in range(size)]


@pytest.mark.parametrize(
    ("ranks", "sizes", "doubt"),
    [
        (told(4, 4), (4, 4), ""),
        (told(4, 2, 1), (4, 2, 1), ""),
        ([(3, -1)] * 6, (3, 3), ""),
        ([(0, -1)] * 4, (), ""),
        (
            [(2, 0), (2, 1), (0, -1)],
            (),
            "rank 2 was not told how many ranks its host has, and others were",
        ),
        (
            told(4, 4)[:6],
            (),
            "rank 4 was told that its host has 4 ranks, and the job ends with rank 5",
        ),
        (
            [(2, 0), (4, 1), (2, 0), (2, 1)],
            (),
            "rank 1 should be rank 1 of 2 on its host, and was started as 1 of 4",
        ),
        (
            [(2, 0), (2, 0), (2, 1), (2, 1)],
            (),
            "rank 1 should be rank 1 of 2 on its host, and was started as 0 of 2",
        ),
        (
            [(2, -1), (3, -1)],
            (),
            "rank 1 should be rank 1 of 2 on its host, and was started among 3",
        ),
    ],
)
def test_hosts_follow_from_what_ranks_were_told(ranks, sizes, doubt):
    nodes = nodes_of(ranks)
    assert (nodes.sizes, nodes.doubt) == (sizes, doubt)
    assert len(nodes.of) in (0, len(ranks))
    said = notices(Grid(tp=len(ranks)), nodes)
    assert (
        any(doubt in line for line in said)
        if doubt
        else len(said) == (len(sizes) > 1) + (sizes == (4, 2, 1))
    )


@pytest.mark.parametrize(
    ("grid", "sizes", "hint"),
    [
        (Grid(tp=4, dp=4), (8, 8), None),
        (Grid(tp=8, dp=2), (4, 4, 4, 4), "hosts of 4: collectives of every layer go through the network. "
         "A --tensor-model-parallel-size that divides 4 keeps them inside."),
        (Grid(tp=8, dp=2), (12, 4), "hosts of 12 and 4: collectives of every layer go through the network. "
         "A --tensor-model-parallel-size that divides 4 keeps them inside."),
        (Grid(tp=2, dp=4, order="dp-tp-pp"), (4, 4), "--rank-order tp-dp-pp keeps them inside."),
        (Grid(tp=2, dp=2, pp=2, order="pp-dp-tp"), (4, 4), "--rank-order tp-pp-dp keeps them inside."),
        (Grid(tp=8, dp=2, order="dp-tp-pp"), (4, 4, 4, 4), "A --tensor-model-parallel-size that divides 4 keeps them "
         "inside, with --rank-order tp-dp-pp."),
        (Grid(tp=2, dp=4, order="dp-tp-pp"), (8,), None),
    ],
)  # fmt: skip
def test_tensor_parallel_groups_that_leave_their_host_are_told_and_how_to_keep_them(
    grid, sizes, hint
):
    said = "\n".join(notices(grid, Nodes(sizes)))
    assert said.startswith(f"Tensor-parallel groups of {grid.tp} ranks reach over ") == (
        hint is not None
    )
    assert hint is None or hint in said
    if hint and sizes == (4, 4):
        better = replace(grid, order=hint.partition("--rank-order ")[2].partition(" ")[0])
        assert notices(better, Nodes(sizes)) == ()


def test_hosts_that_differ_are_told():
    assert notices(Grid(dp=12), Nodes((4, 8))) == (
        "Hosts have 4 and 8 ranks: step times are predicted as if all had as many.",
    )
    assert notices(Grid(dp=12), Nodes((8, 4))) == ()
    assert notices(Grid(tp=8), Nodes((4, 4)), str)[0].endswith(
        "A tensor_model_parallel_size that divides 4 keeps them inside."
    )


def test_plans_are_priced_for_the_hosts_of_the_job():
    dgx = CLUSTERS["dgx-a100"]
    assert [located(dgx, Nodes(sizes)).ranks_per_node for sizes in ((4, 4), (4, 4, 1))] == [4, 4]
    for nodes in (Nodes(), Nodes((4,)), Nodes((4, 8)), Nodes(doubt="odd")):
        assert located(dgx, nodes) is dgx


def test_an_emulated_job_has_the_nodes_of_its_cluster():
    cluster = replace(CLUSTERS["dgx-a100"], ranks_per_node=3)
    assert find_nodes(World(0, 8, CPU, cluster), None) == Nodes((3, 3, 2))
    assert find_nodes(World(0, 1, CPU), None) == Nodes()


def _find(rank, world_size, port):
    """As two hosts of torchrun would start them."""
    torch.distributed.destroy_process_group()
    values = (rank, world_size, rank % 2, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    world = launch("gloo")
    found = find_nodes(world, torch.distributed.group.WORLD)
    leave(world)
    return found.sizes, world.local_rank


def test_ranks_of_two_hosts_find_them():
    assert run_ranks(_find, 4, free_port()) == [((2, 2), rank % 2) for rank in range(4)]
