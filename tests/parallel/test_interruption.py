"""Signals are noted, agreed on by all ranks behind the same step, and the second one ends
at once.
"""

import faulthandler
import multiprocessing
import os
import pickle
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from megatron_merak.parallel import interruption as module
from megatron_merak.parallel.interruption import NOTICES, SIGNALS, Interrupted, Interruption
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def handlers_stay():
    """What a test installs is not there for the next one."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _stopped(rank, world_size, sender):
    """The step behind which this rank stops, and for which signal; ``sender`` gets one in its
    third.
    """
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


@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_alone_stops_behind_the_step_that_is_under_way(number):
    before = [signal.getsignal(each) for each in SIGNALS]
    with Interruption(None, pytest.fail) as interruption:
        assert interruption.stops() == 0 and interruption.kept == []
        signal.raise_signal(number)
        assert interruption.stops() == number
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_script_that_does_not_catch_it_ends_with_the_status_and_without_a_word():
    code = "from megatron_merak.parallel.interruption import Interrupted; raise Interrupted(15, 'told')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    again = pickle.loads(pickle.dumps(Interrupted(15, "told")))
    assert (again.number, again.text, again.status, again.code) == (15, "told", 143, 143)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Interruption(None, pytest.fail) as interruption:
        signal.raise_signal(number)
        assert interruption.stops() == 0 and interruption.kept == []
    assert signal.getsignal(number) == signal.SIG_IGN


def test_handlers_of_others_stay(tmp_path):
    """Of the script, in Python; of a library, in C, which Python does not know."""
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with open(tmp_path / "stacks", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        with Interruption(None, pytest.fail) as interruption:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            assert interruption.stops() == 0 and interruption.kept == ["SIGTERM", "SIGUSR1"]
        faulthandler.unregister(signal.SIGUSR1)
    assert (
        heard == [signal.SIGTERM]
        and "test_handlers_of_others_stay" in (tmp_path / "stacks").read_text()
    )


def test_a_forked_child_ends_at_sigterm_and_its_signals_are_not_this_process_s(monkeypatch):
    """Else leaving a Pool would wait forever, and a signal to the child would count as the first
    one here.
    """
    monkeypatch.setattr(module, "GRACE", 0.0)
    context = multiprocessing.get_context("fork")
    children = []
    with Interruption(None, pytest.fail) as interruption:
        for _ in range(2):
            theirs, ours = context.Pipe()
            children.append(context.Process(target=_ready_and_asleep, args=(ours,)))
            children[-1].start()
            assert theirs.recv()
        children[0].terminate()
        children[0].join(10)
        assert children[0].exitcode == -signal.SIGTERM
        os.kill(children[1].pid, signal.SIGTERM)
        time.sleep(0.2)
        assert interruption.stops() == 0
        children.append(context.Process(target=time.sleep, args=(60,)))
        children[-1].start()
    children[-1].kill()  # it lived while the context was left


def _ready_and_asleep(pipe):
    pipe.send(True)
    time.sleep(60)


def test_notices_do_not_count_as_a_second_signal(monkeypatch):
    """SIGUSR1 of a time limit that is near, SIGTERM at the limit: what is being saved is saved."""
    monkeypatch.setattr(module, "GRACE", 0.1)
    ended = threading.Event()
    with Interruption(None, lambda number: ended.set()) as interruption:
        for number in (*NOTICES, signal.SIGTERM, *NOTICES):
            signal.raise_signal(number)
            time.sleep(0.15)
        assert interruption.stops() == signal.SIGUSR1 and not ended.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(5)


LOST = """
import os, sys, time
from megatron_merak.parallel.interruption import Interruption
with Interruption(None, os._exit) as interruption:
    print("ready", flush=True)
    while not interruption.stops():
        time.sleep(0.01)
    print("after", flush=True)
    os.write(3, b"saved %d" % interruption.agreed)
"""


def test_a_lost_terminal_does_not_make_an_error_of_the_next_line():
    here, there = pty.openpty()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(there, termios.TIOCSCTTY, 0)
        for number, to in ((there, 0), (there, 1), (there, 2), (writer, 3)):
            os.dup2(number, to)
        os.closerange(4, 256)
        os.execv(sys.executable, [sys.executable, "-c", LOST])
    os.close(there)
    os.close(writer)
    assert b"ready" in os.read(here, 100)
    os.close(here)
    assert os.read(reader, 100) == b"saved 1"
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0


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
