"""Signals are noted, agreed on by all ranks behind the same step, and the second one ends at once."""

import os
import signal
import threading
import time

import pytest

from megatron_merak.parallel import interruption as module
from megatron_merak.parallel.interruption import SIGNALS, Interrupted, Interruption
from tests.ranks import run_ranks


def _stopped(rank, world_size, sender):
    """The step behind which this rank stops, and for which signal; ``sender`` gets one in its third."""
    import torch.distributed as dist

    with Interruption(dist.group.WORLD, os._exit) as interruption:
        for step in range(1, 20):
            interruption.before_step()
            if rank == sender and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if number := interruption.after_step():
                return step, number
    return None


@pytest.mark.parametrize("sender", [0, 2])
def test_all_ranks_stop_behind_the_same_step(sender):
    assert run_ranks(_stopped, 3, sender) == [(4, signal.SIGTERM)] * 3


def test_a_process_alone_stops_behind_the_step_that_is_under_way():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interruption(None, pytest.fail) as interruption:
        interruption.before_step()
        assert interruption.after_step() == 0
        signal.raise_signal(signal.SIGINT)
        assert interruption.after_step() == signal.SIGINT
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert Interrupted(signal.SIGTERM).status == 143


def test_the_second_signal_ends_and_one_that_comes_twice_at_once_is_one(monkeypatch):
    monkeypatch.setattr(module, "GRACE", 0.2)
    ended = threading.Event()
    with Interruption(None, lambda number: ended.set()) as interruption:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert not ended.wait(0.3)
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(5)
        assert interruption.after_step() == signal.SIGINT


def test_a_signal_that_comes_too_late_is_not_lost():
    with pytest.raises(KeyboardInterrupt):
        with Interruption(None, pytest.fail):
            signal.raise_signal(signal.SIGINT)


def test_a_run_that_cannot_save_is_left_alone():
    with pytest.raises(KeyboardInterrupt):
        with Interruption(None, pytest.fail, active=False) as interruption:
            interruption.before_step()
            signal.raise_signal(signal.SIGINT)
            time.sleep(1)


def test_in_a_thread_no_signal_is_noted():
    found = []

    def body():
        with Interruption(None, pytest.fail) as interruption:
            found.append(interruption.after_step())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [0]
