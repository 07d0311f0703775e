"""The stack of another thread is read, and nothing of it is kept alive."""

import os
import sys
import threading
import weakref

from megatron_merak.parallel.stacks import Call, Stacks, calls

PRINTED = """Thread 0x00000000000000ff (most recent call first):
  File "/home/j\\xf6rg/a.py", line 3 in inner
  File "/home/b.py", line ??? in outer

Current thread 0x0000000000000001 [main] (most recent call first):
  File "<frozen runpy>", line 88 in _run_code
"""


class Held:
    """Something that a weak reference can watch."""


def test_the_calls_of_a_thread_are_read_innermost_first():
    assert calls(PRINTED, 255) == (Call("/home/jörg/a.py", 3, "inner"), Call("/home/b.py", 0, "outer"))
    assert calls(PRINTED, 1) == (Call("<frozen runpy>", 88, "_run_code"),)
    assert calls(PRINTED, 2) == ()


def test_a_look_at_a_function_does_not_keep_its_variables_alive(tmp_path):
    """As tracing needs: with the frames of `sys._current_frames` at hand, they would live on."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    watched = []

    def work():
        held = Held()
        watched.append(weakref.ref(held))
        begun.set()
        go_on.wait()

    def run():
        work()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    file = os.open(tmp_path / "look", os.O_RDWR | os.O_CREAT)
    found = Stacks(file).of(thread.ident)
    again = Stacks(file).of(thread.ident)
    go_on.set()
    ended.wait()
    assert watched[0]() is None
    thread.join()
    os.close(file)
    assert found == again and ("work", __file__) in [(call.function, call.file) for call in found]
    place = [call.function for call in found].index("work")
    assert str(found[place]).endswith(f", line {found[place].line}, in work\n    go_on.wait()")


def test_the_watchdog_uses_no_frames():
    from megatron_merak.parallel import watchdog

    with open(watchdog.__file__) as file:
        assert "_current_frames" not in file.read() and "megatron_merak.parallel.stacks" in sys.modules
