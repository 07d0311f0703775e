"""tools/inject_faults.py on small programs: every fault comes where it was ordered, and is told as
it was.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.choice import later
from tools.faults.hook.injected_fault import Order
from tools.faults.watch import names, run, running, small_disk

ROOT = Path(__file__).resolve().parents[2]
WAITS = """
import signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
listener = socket.create_server(("127.0.0.1", 0))
end = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
print("ready", flush=True)
for count in range(100):
    with open(sys.argv[1] + "/file", "w") as file:
        file.write("x" * 8192 * count)
    end.send(b"x")
    assert other.recv(1) == b"x", "rank 3 is cut off"
    time.sleep(0.05)
print("done", flush=True)
"""
TRAINS = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.0)
for step in range(1, 5):
    weight.sum().backward()
    optimizer.step()
    print(step, weight.tolist(), flush=True)
"""


def faulted(program: str, directory: Path, fault: str, limit: float = 60.0, rank: int = 0, **order):
    command = [sys.executable, "-c", program, str(directory)]
    environment = {**os.environ, "RANK": "0", "OMP_NUM_THREADS": "1"}
    return run(command, Order(fault, rank, "", target=str(directory), **order), limit, environment)


STATUS = {
    "SIGKILL": -9,
    "SIGTERM": 7,
    "SIGINT": -2,
    "SIGHUP": -1,
    "OS_ABORT": -6,
    "SEGFAULT": -11,
    "ASYNC_EXC": 1,
    "EXIT_AT_ONCE": 0,
    "CUT_LINK": 1,
    "DIRECTORY_GONE": 1,
}


@pytest.mark.parametrize("fault", STATUS)
def test_a_process_ends_as_the_fault_says(fault, tmp_path):
    outcome = faulted(WAITS, tmp_path, fault, seconds=0.3)
    assert outcome.came and outcome.ended and outcome.status == STATUS[fault], outcome
    assert "ready" in outcome.output and "done" not in outcome.output
    assert outcome.tracebacks == (fault in ("SIGINT", "ASYNC_EXC", "CUT_LINK", "DIRECTORY_GONE"))


@pytest.mark.parametrize("fault", [later("SIGSTOP"), "LOCK_GIL"])
def test_a_process_that_hangs_is_given_up_and_ended(fault, tmp_path):
    outcome = faulted(WAITS, tmp_path, fault, limit=1.0, disk_call=3)
    assert outcome.came and not outcome.ended and outcome.status is None, outcome
    assert "did not end" in str(outcome) and not running(str(tmp_path))


def test_a_script_that_python_starts_alone_is_rank_0(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    order = Order("SIGKILL", 0, "", step=2)
    outcome = run(
        [sys.executable, "-c", TRAINS], order, 60.0, {**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert outcome.came and outcome.status == -9, outcome


@pytest.mark.long
def test_a_stop_that_lasts_is_survived(tmp_path):
    outcome = faulted(WAITS, tmp_path, "SIGSTOP", disk_call=3, lasts=0.3)
    assert outcome.came and outcome.status == 0 and "done" in outcome.output


def test_another_rank_has_no_fault(tmp_path):
    outcome = faulted(WAITS, tmp_path, "SIGKILL", rank=1, seconds=0.3)
    assert not outcome.came and outcome.status == 0 and "never came" in str(outcome)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")
def test_a_disk_is_full_and_not_for_ever(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        outcome = faulted(WAITS, disk, "DISK_FULL", disk_call=2)
        assert outcome.status == 1 and "No space left on device" in outcome.output


def test_faults_of_a_step_come_in_that_step(tmp_path):
    """Several at once, since each has to import torch."""
    orders = {"NAN": {}, "BIT_FLIP": {"bit": 31, "seed": 2}, "WORKLOAD_EXC": {}}
    tool = [
        sys.executable,
        str(ROOT / "tools/inject_faults.py"),
        "--step",
        "3",
        "--rank",
        "0",
        "--json",
    ]
    runs = {}
    for fault, more in orders.items():
        flags = [word for name, value in more.items() for word in (f"--{name}", str(value))]
        command = [*tool, "--fault", fault, *flags, "--", sys.executable, "-c", TRAINS]
        environment = {**os.environ, "RANK": "0", "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        runs[fault] = subprocess.Popen(command, env=environment, text=True, **pipes)
    told = {fault: process.communicate(timeout=120) for fault, process in runs.items()}
    assert {fault: process.returncode for fault, process in runs.items()} == dict.fromkeys(
        orders, 0
    ), told
    facts = {fault: json.loads(out) for fault, (out, _) in told.items()}
    steps = {fault: err.splitlines()[:4] for fault, (_, err) in told.items()}
    assert [facts[fault]["status"] for fault in orders] == [0, 0, 1]
    assert steps["NAN"][1] == "2 [1.0, 1.0, 1.0, 1.0]" and steps["NAN"][2].count("nan") == 1
    assert (
        steps["BIT_FLIP"][1] == "2 [1.0, 1.0, 1.0, 1.0]" and steps["BIT_FLIP"][3].count("-1.0") == 1
    )
    assert (
        steps["WORKLOAD_EXC"][2].startswith("Traceback")
        and "injected fault" in told["WORKLOAD_EXC"][1]
    )


SUMMARY = """====
train.py FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
----
Root Cause (first observed failure):
[0]:
  rank      : {} (local_rank: 1)
====
"""


def test_a_rank_is_named_by_others_or_as_the_root_cause():
    assert names("rank 1 did not arrive", 1)
    assert names("the other ranks 1 and 2", 1)
    assert names(SUMMARY.format(1), 1) and not names(SUMMARY.format(0), 1)
    assert not names("[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:8843", 1)
    assert not names("rank 10 did not arrive", 1)
