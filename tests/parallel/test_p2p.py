"""Transfers between stages: matched by tag or by order, posted early, blocking nobody."""

import pytest
import torch

from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.p2p import Pipes
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.ops import RECEIVES, SENDS, Kind, Op, ops_of
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.plan import Grid
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def content(op, step=0):
    """What a transfer carries: its stage, micro-batch, direction and step, told by its
    sending op.
    """
    return torch.tensor([op.stage, op.microbatch, op.kind is Kind.SEND_B, step]).float()


def pipes_of(rank, grid, schedule, by_tag):
    pipes = Pipes(build_mesh(grid, rank, CPU), schedule)
    assert pipes._by_tag
    if not by_tag:  # what backends without tags do
        pipes._by_tag = False
        pipes._make_groups()
    return pipes


def follow(rank, world_size, name, by_tag):
    """Two steps of a schedule's transfers in program order, each receive awaited where its consumer
    stands.
    """
    grid = Grid(dp=world_size // 3, pp=3)
    schedule = add_communication(build_schedule(name, 3, 5))
    pipes = pipes_of(rank, grid, schedule, by_tag)
    consumer = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}
    replica, received = pipes.mesh.dp_rank, 0
    for step in range(2):
        pending = {}
        for op in (op for entry in schedule.ranks[pipes.mesh.pp_rank] for op in ops_of(entry)):
            if op.kind in RECEIVES:
                pending[Op(op.stage, consumer[op.kind], op.microbatch)] = (
                    op,
                    *pipes.receive(op, (4,), torch.float32),
                )
            elif op.kind in SENDS:
                pipes.send(op, content(op, step) + 100 * replica)
            elif op in pending:
                receive, tensor, work = pending.pop(op)
                work.wait()
                assert torch.equal(tensor, content(receive.counterpart(), step) + 100 * replica), (
                    op,
                    tensor,
                )
                received += 1
        assert not pending
        pipes.finish()
        assert not pipes._sent
    return received


def follow_all(rank, world_size):
    return [
        follow(rank, world_size, name, by_tag)
        for name in ("gpipe", "1f1b")
        for by_tag in (True, False)
    ]


@pytest.mark.parametrize("world_size", [3])
def test_every_consumer_gets_its_own_message(world_size):
    assert run_ranks(follow_all, world_size) == [[10] * 4, [20] * 4, [10] * 4]


def replicas(rank, world_size):
    """Two pipelines of three stages side by side: a message never changes the replica."""
    return follow(rank, world_size, "1f1b", False)


def test_replicas_do_not_mix():
    assert run_ranks(replicas, 6) == [10, 10, 20, 20, 10, 10]


def reorder(rank, world_size):
    """By tag: received in the opposite order of sending, all posted before any is awaited, both
    directions at once.
    """
    pipes = pipes_of(
        rank, Grid(pp=2), add_communication(build_schedule("gpipe", 2, 4)), by_tag=True
    )
    mine, theirs = (Kind.SEND_F, Kind.RECV_B) if rank == 0 else (Kind.SEND_B, Kind.RECV_F)
    posted = [
        (m, *pipes.receive(Op(rank, theirs, m), (4,), torch.float32)) for m in reversed(range(4))
    ]
    for m in range(4):
        op = Op(rank, mine, m)
        pipes.send(op, content(op))
    for m, tensor, work in posted:
        work.wait()
        assert torch.equal(tensor, content(Op(rank, theirs, m).counterpart())), m
    pipes.finish()


def strided(rank, world_size):
    """A transposed bfloat16 tensor arrives as the values that it had, and its receiver chooses
    shape and type.
    """
    pipes = pipes_of(
        rank, Grid(pp=2), add_communication(build_schedule("gpipe", 2, 1)), by_tag=True
    )
    value = torch.arange(6).bfloat16().view(2, 3).t()
    if rank == 0:
        pipes.send(Op(0, Kind.SEND_F, 0), value)
        pipes.finish()
        return None
    tensor, work = pipes.receive(Op(1, Kind.RECV_F, 0), (3, 2), torch.bfloat16)
    work.wait()
    assert torch.equal(tensor, value)


def pairs(rank, world_size):
    reorder(rank, world_size)
    strided(rank, world_size)
    return True


def test_tags_match_messages_out_of_order_and_strided():
    assert run_ranks(pairs, 2) == [True, True]


def test_alone_nothing_is_made():
    Pipes(build_mesh(Grid(), 0, CPU), add_communication(build_schedule("1f1b", 1, 2))).finish()
