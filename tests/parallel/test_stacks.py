"""The stack of another thread is read without keeping its variables alive."""

import inspect
import subprocess
import sys
import threading
import traceback
import weakref
from pathlib import Path

import pytest

import megatron_merak
from megatron_merak import _native
from megatron_merak.parallel.stacks import _calls_of_frames, calls_of, shown

COMPILED = pytest.mark.skipif(
    _native.host() is None, reason=f"not compiled: {_native.host_problem()}"
)


class Tensor:
    pass


@COMPILED
def test_what_a_function_had_is_gone_when_it_returns():
    main = threading.get_ident()
    looks = threading.Semaphore(0)
    done = threading.Event()

    def look():
        while not done.is_set():
            calls = calls_of(main)
            looks.release()
            assert calls

    def short():
        tensor = Tensor()
        looks.acquire()
        looks.acquire()  # the last look began after this function did
        return weakref.ref(tensor)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        assert all(short()() is None for _ in range(200))
    finally:
        done.set()
        thread.join()


def test_a_stack_is_that_of_a_traceback():
    calls = calls_of(threading.get_ident())
    here = inspect.currentframe()
    summary = traceback.extract_stack(here)
    functions = [call.function for call in calls]
    assert functions[functions.index("calls_of") + 1 :][:3] == [
        each.name for each in reversed(summary[-3:])
    ]
    assert {call.file for call in calls} >= {__file__, summary[0].filename}
    assert "calls = calls_of(threading.get_ident())" in shown(calls, 3)
    assert shown(calls, 2).count("File") == 2


def test_a_thread_that_does_not_exist_has_no_calls():
    assert calls_of(1) == ()


def test_names_outside_of_ascii_are_as_they_were(tmp_path):
    path = tmp_path / "módel 模型.py"
    path.write_text("def größe(look):\n    return look()\n")
    found = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    calls = found["größe"](lambda: calls_of(threading.get_ident()))
    call = next(call for call in calls if call.function == "größe")
    assert call.file == str(path)
    assert call.text() == "return look()"


MADE_AND_GONE = """
import ctypes, threading, time
from megatron_merak.parallel.stacks import calls_of

libc = ctypes.CDLL(None)
python = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
done = threading.Event()

def make():
    threads = [ctypes.c_void_p() for _ in range(8)]
    while not done.is_set():
        for each in threads:
            libc.pthread_create(ctypes.byref(each), None, python, None)
        for each in threads:
            libc.pthread_join(each, None)

makes = threading.Thread(target=make)
makes.start()
end = time.monotonic() + 2
while time.monotonic() < end:
    assert calls_of(makes.ident)
done.set()
makes.join()
print("unharmed")
"""


def test_threads_that_python_does_not_know_come_and_go():
    """As torch's do, with each tensor that they release; by faulthandler this ends in a second."""
    done = subprocess.run(
        [sys.executable, "-c", MADE_AND_GONE], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "unharmed\n"), done.stderr


@COMPILED
def test_the_compiled_part_reads_what_frames_say():
    thread = threading.get_ident()
    compiled = _native.host().calls(thread)
    assert compiled[1:] == _calls_of_frames(thread)[2:]


def test_nothing_else_makes_objects_of_frames():
    root = Path(megatron_merak.__file__).parent
    users = [
        path
        for path in root.rglob("*.py")
        if "_current_frames(" in path.read_text(encoding="utf-8")
    ]
    assert users == [root / "parallel" / "stacks.py"]
