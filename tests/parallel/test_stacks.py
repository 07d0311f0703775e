"""The stack of another thread is read without keeping its variables alive."""

import inspect
import os
import threading
import traceback
import weakref
from pathlib import Path

import pytest

import megatron_merak
from megatron_merak.parallel.stacks import calls_of, shown


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "stacks", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


class Tensor:
    pass


def test_what_a_function_had_is_gone_when_it_returns(file):
    main = threading.get_ident()
    looks = threading.Semaphore(0)
    done = threading.Event()

    def look():
        while not done.is_set():
            calls = calls_of(main, file)
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


def test_a_stack_is_that_of_a_traceback(file):
    calls = calls_of(threading.get_ident(), file)
    here = inspect.currentframe()
    summary = traceback.extract_stack(here)
    assert [call.function for call in calls[:4]] == [
        "calls_of",
        *(each.name for each in reversed(summary[-3:])),
    ]
    assert {call.file for call in calls} >= {__file__, summary[0].filename}
    assert "calls = calls_of(threading.get_ident(), file)" in shown(calls, 2)
    assert shown(calls, 2).count("File") == 2


def test_a_thread_that_does_not_exist_has_no_calls(file):
    assert calls_of(1, file) == ()


def test_names_outside_of_ascii_are_as_they_were(file, tmp_path):
    path = tmp_path / "módel 模型.py"
    path.write_text("def größe(look):\n    return look()\n")
    found = {}
    exec(compile(path.read_text(), str(path), "exec"), found)
    calls = found["größe"](lambda: calls_of(threading.get_ident(), file))
    call = next(call for call in calls if call.function == "größe")
    assert call.file == str(path)
    assert call.text() == "return look()"


def test_nothing_else_makes_objects_of_frames():
    root = Path(megatron_merak.__file__).parent
    users = [
        path
        for path in root.rglob("*.py")
        if "_current_frames(" in path.read_text(encoding="utf-8")
    ]
    assert users == []
