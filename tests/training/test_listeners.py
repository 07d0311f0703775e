"""Whole jobs listen on the loopback interface of their host only, and garbage at their ports
changes no bit.
"""

import json
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.listeners import listeners
from tests.parameter_server.launched import ROOT, environment, launcher

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1 --eval-iters 0 --train-iters 40
    --distributed-timeout-minutes 2"""
PRETRAIN = str(ROOT / "pretrain_gpt.py")
PIPELINE = [
    sys.executable,
    PRETRAIN,
    "--nproc-per-node",
    "2",
    "--pipeline-model-parallel-size",
    "2",
]
SERVED = ["--data-parallel-strategy", "ps-sync", "--num-parameter-servers", "1"]


def losses(
    command: list[str], metrics: Path, thrown: bool
) -> tuple[list[float], set[tuple[str, int]]]:
    """Run a job; return its losses and what it listened on. ``thrown``: whether garbage is thrown
    at that.
    """
    heard: set[tuple[str, int]] = set()
    log = metrics.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *SMALL.split(), "--metrics", str(metrics)],
            stdout=output,
            stderr=output,
            env={
                name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"
            },
        )
    ends = []
    deadline = time.monotonic() + 550
    try:
        while process.poll() is None and time.monotonic() < deadline:
            heard |= listeners(process.pid)
            for address, port in sorted(heard) if thrown and len(ends) < 300 else ():
                try:
                    ends.append(socket.create_connection((address, port), timeout=1))
                    ends[-1].sendall(secrets.token_bytes(64))
                except OSError:
                    pass  # that one has been closed
            time.sleep(0.1)
        assert process.poll() == 0, log.read_text()
    finally:
        process.kill()
        for end in ends:
            end.close()
    assert not thrown or len(ends) > 5
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()], heard


@pytest.mark.parametrize("command", [PIPELINE, None], ids=["pipeline", "parameter server"])
def test_garbage_at_every_port_changes_no_bit(command, tmp_path):
    first, second = (command or [*launcher(3), PRETRAIN, *SERVED] for _ in range(2))
    wanted, _ = losses(first, tmp_path / "one", False)
    found, heard = losses(second, tmp_path / "other", True)
    assert {address for address, _ in heard} == {"127.0.0.1"}, heard
    assert len(heard) >= 3 and len(wanted) == 40 and found == wanted
