"""Ranks of one attempt of a job find each other in a store that holds what dead ranks wrote."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_merak.errors import LaunchError
from megatron_merak.parallel.meeting import name_attempt

SOON = timedelta(seconds=20)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def gather(store, size, late=(), timeout=SOON, absent=()):
    """What each rank gets: a name or an error. late: ranks that come half a second after the
    others.
    """
    results = [None] * size

    def come(rank):
        if rank in late:
            time.sleep(0.5)
        try:
            results[rank] = name_attempt(store.clone(), rank, size, timeout, lambda line: None)
        except LaunchError as error:
            results[rank] = error

    ranks = [rank for rank in range(size) if rank not in absent]
    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("late", [(), (0,), (2,), (1, 2, 3)], ids=str)
def test_all_ranks_get_one_name_and_each_attempt_another(store, late):
    first = gather(store, 4, late)
    second = gather(store, 4, late)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


@pytest.mark.parametrize("size", [2, 4])
def test_numbers_of_dead_ranks_are_not_taken_for_living_ones(store, size):
    gather(store, 3, timeout=timedelta(seconds=1), absent=(0,))  # they said hello, and died
    names = gather(store, size, late=(1,))
    assert len(set(names)) == 1 and isinstance(names[0], str)


def test_a_first_rank_that_died_is_not_waited_for(store):
    gather(store, 3, timeout=timedelta(seconds=1), absent=(1,))  # the first rank had greeted rank 2
    names = gather(store, 3)
    assert len(set(names)) == 1 and isinstance(names[0], str)


def test_missing_ranks_are_named(store):
    results = gather(store, 4, timeout=timedelta(seconds=0.5), absent=(1, 3))
    assert "job ranks 1, 3 of 4: they did not come within" in str(results[0])
    assert "the first rank did not gather all ranks" in str(results[2])


def test_nothing_is_left_that_grows_with_the_attempts(store):
    gather(store, 4)
    keys = store.num_keys()
    for _ in range(3):
        gather(store, 4)
    assert store.num_keys() == keys
