"""The test launcher itself: results come back in order, and no failure hangs or hides behind
another rank's.
"""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_merak.errors import ConfigError
from tests.ranks import RankFailure, run_ranks


def _sum_over_groups(rank, world_size, offset):
    everyone = torch.tensor([rank + offset])
    dist.all_reduce(everyone)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
    mine = torch.tensor([rank])
    dist.all_reduce(mine, group=pairs[rank // 2])
    return {"rank": rank, "everyone": everyone, "pair": mine, "large": torch.full((200_000,), rank)}


def _raise_on_one(rank, world_size):
    if rank == 1:
        raise ConfigError("--split", "x", "is not a list of numbers", "Use three numbers")
    dist.barrier()


def _die_on_one(rank, world_size, how):
    if rank == 2:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    dist.barrier()


def _alone(rank, world_size):
    return rank, dist.get_world_size()


def _threads_of_parent(rank, world_size):
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def _frozen(rank, world_size):
    return gc.get_freeze_count()


def _hang_on_one(rank, world_size):
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def test_results_arrive_in_rank_order():
    results = run_ranks(_sum_over_groups, 4, 10)
    assert [result["rank"] for result in results] == [0, 1, 2, 3]
    assert all(result["everyone"].item() == 46 for result in results)
    assert [result["pair"].item() for result in results] == [1, 1, 5, 5]
    assert torch.equal(results[3]["large"], torch.full((200_000,), 3))


def test_ranks_are_forked_from_a_process_without_threads():
    assert run_ranks(_threads_of_parent, 1) == [1]


def test_ranks_do_not_collect_what_was_imported_before_they_were_forked():
    (frozen,) = run_ranks(_frozen, 1)
    assert frozen > 100_000


def test_garbage_of_tests_is_collected_and_what_was_collected_before_them_is_left_alone():
    assert gc.isenabled() and gc.get_freeze_count() > 100_000


def test_the_raising_rank_is_named_and_its_error_is_the_cause():
    with pytest.raises(RankFailure, match="rank 1 of 3 raised(.|\n)*_raise_on_one") as failure:
        run_ranks(_raise_on_one, 3)
    assert failure.value.rank == 1
    assert (
        isinstance(failure.value.__cause__, ConfigError)
        and failure.value.__cause__.what == "--split"
    )


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 7)])
def test_a_dying_rank_is_blamed_rather_than_its_peers(how, code):
    started = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank 2 of 4 died with exit code {code}"):
        run_ranks(_die_on_one, 4, how)
    assert time.monotonic() - started < 10


def test_a_hang_ends_and_shows_where_every_rank_stood():
    started = time.monotonic()
    with pytest.raises(
        RankFailure, match="2 of 2 ranks did not finish within 5 s(.|\n)*_hang_on_one(.|\n)*barrier"
    ):
        run_ranks(_hang_on_one, 2, timeout=5)
    assert time.monotonic() - started < 20


def test_one_rank_needs_no_special_case():
    assert run_ranks(_alone, 1) == [(0, 1)]


def test_many_launches_in_a_row_all_leave_cleanly():
    for _ in range(10):
        assert len(run_ranks(_sum_over_groups, 4, 0)) == 4
