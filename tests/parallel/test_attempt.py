"""What all ranks try leaves nothing behind, and ends on all of them where it fails on one."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_merak.errors import DataError, LaunchError
from megatron_merak.parallel import shared_memory
from megatron_merak.parallel.attempt import attempt, check_attempts
from megatron_merak.parallel.launch import World
from megatron_merak.parallel.ranks import meet
from megatron_merak.plan import Grid
from tests.ranks import run_ranks


def exchange(ranks, fails):
    """All-reduce over two pairs and pass on the sum; one rank fails while its peers wait for it."""
    mesh = ranks.mesh(Grid(tp=2, dp=1, pp=2))
    values = torch.full((1000,), float(ranks.rank))
    work = dist.all_reduce(values, group=mesh.tp, async_op=True)
    if ranks.rank == fails:
        raise MemoryError("no memory is left")
    work.wait()
    if mesh.pp_rank == 0:
        dist.send(values, mesh.peer(1), group=mesh.pp)
    else:
        dist.recv(values, mesh.peer(0), group=mesh.pp)
    return values[0].item()


def tries(rank, world, collectives):
    if collectives:
        shared_memory.register()
    ranks = meet(
        World(rank, world, torch.device("cpu"), collectives=collectives), timedelta(seconds=60)
    )
    found = []
    for fails in (None, 3, None, 0):
        found.append(attempt(ranks, lambda inside, fails=fails: exchange(inside, fails)))
        assert len(dist.distributed_c10d._world.pg_map) == 1
    later = ranks.mesh(Grid(tp=4, dp=1, pp=1))  # groups of the job are made as before
    total = torch.ones(1)
    dist.all_reduce(total, group=later.tp)
    return found, total.item()


@pytest.mark.parametrize("collectives", [None, "merak_shm"])
def test_all_ranks_hear_what_became_of_an_attempt(collectives):
    if collectives and not shared_memory.compiled():
        pytest.skip("the compiled part is missing")
    found = run_ranks(tries, 4, collectives, timeout=300)
    assert all(each == found[0] for each in found)
    outcomes, total = found[0]
    assert total == 4
    for outcome in outcomes[::2]:
        assert outcome.values == (1, 1, 1, 1) and not outcome.failure
    failures = [outcome.failure for outcome in outcomes[1::2]]
    assert failures == [f"on rank {rank}, MemoryError: no memory is left" for rank in (3, 0)]
    assert not any(outcome.values for outcome in outcomes[1::2])


def alone():
    return meet(World(0, 1, torch.device("cpu")), timedelta(seconds=1))


def test_one_rank_tries_without_groups():
    assert attempt(alone(), lambda inside: [0.5]).values == ([0.5],)

    def refuses(inside):
        raise DataError("--split", 1, "it is odd", "Give 2")

    assert attempt(alone(), refuses).failure == "--split 1: it is odd. Give 2."


def test_steps_that_were_tried_are_none_of_the_run():
    pulse = World(0, 1, torch.device("cpu")).pulse
    with pulse.in_step(4, completes=True):
        pass
    before = (pulse.step, pulse.steps, pulse.longest)
    with pulse.trying(), pulse.in_step(1, completes=True):
        pass
    assert (pulse.step, pulse.steps, pulse.longest) == before


def test_backends_whose_ranks_wait_on_are_refused():
    check_attempts(alone())
    ranks = meet(World(0, 1, torch.device("cpu"), collectives="merak_peer"), timedelta(seconds=1))
    with pytest.raises(LaunchError, match="merak_peer: its ranks cannot stop waiting"):
        check_attempts(ranks)
