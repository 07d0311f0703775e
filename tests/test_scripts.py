"""Scripts on forked ranks: what they say and how they end, and that none is left behind."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.scripts import run_script


def script(directory: Path, text: str) -> str:
    path = directory / "script.py"
    path.write_text(f"import os, sys, time\n{text}\n")
    return str(path)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_texts_of_all_ranks_come_back(tmp_path):
    path = script(tmp_path, "print(sys.argv[1], os.environ['RANK'], os.environ['WORLD_SIZE'])")
    done = run_script(path, ["word"], 2)
    assert done.returncode == 0 and done.stdout == "word 0 2\nword 1 2\n" and not done.stderr


def test_one_process_has_the_environment_of_the_test_and_no_launcher(tmp_path, monkeypatch):
    path = script(tmp_path, "print(os.environ.get('OF_A_TEST'), os.environ.get('RANK'))")
    monkeypatch.setenv("OF_A_TEST", "given")
    assert run_script(path, []).stdout == "given None\n"
    monkeypatch.delenv("OF_A_TEST")
    assert run_script(path, []).stdout == "None None\n"


def test_a_rank_that_fails_ends_the_others(tmp_path):
    path = script(tmp_path, "os.environ['RANK'] == '1' and sys.exit('no')\ntime.sleep(600)")
    started = time.monotonic()
    done = run_script(path, [], 2)
    assert done.returncode == 1 and done.stderr == "no\n"
    assert time.monotonic() - started < 60


@pytest.mark.long
def test_none_outlives_its_time(tmp_path):
    path = script(tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
                            "time.sleep(600)")  # fmt: skip
    with pytest.raises(subprocess.TimeoutExpired):
        run_script(path, [], timeout=20)
    assert not is_running(int((tmp_path / "pid").read_text()))
