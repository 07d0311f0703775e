"""Jobs that tools/launch.py starts, whose ranks can be killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
    --global-batch-size 6 --lr 1e-2 --mock-data --vocab-size 60 --log-interval 1 --eval-iters 1
    --distributed-timeout-minutes 1 --data-parallel-strategy"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launcher(ranks: int) -> list[str]:
    """The start of a command line, which a script and its flags follow."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        sys.executable,
        str(ROOT / "tools/launch.py"),
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        port,
    ]


class Launched:
    """tools/launch.py at work, its ranks, and what they print."""

    def __init__(
        self,
        ranks: int,
        flags: str,
        directory: Path,
        script: str = "pretrain_gpt.py",
        given: str = SMALL,
    ):
        self.log = directory / "log"
        command = [*launcher(ranks), str(ROOT / script), *given.split(), *flags.split()]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment()
            )
        self.wait_for(lambda: len(self.pids()) == ranks)

    def pids(self) -> dict[int, int]:
        """Of each rank that runs."""
        found = {}
        for pid in (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ):
            if rank := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
                found[int(rank[1])] = int(pid)
        return found

    def wait_for(self, true: Callable[[], object], seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline and self.process.poll() is None, self.told
            time.sleep(0.005)

    @property
    def told(self) -> str:
        return self.log.read_text()

    @property
    def iteration(self) -> int:
        """The newest one that was printed."""
        found = re.findall(r" iteration +(\d+)/", self.told)
        return int(found[-1]) if found else 0

    def after(self, iteration: int) -> "Launched":
        self.wait_for(lambda: self.iteration >= iteration)
        return self

    def kill(self, rank: int) -> None:
        os.kill(self.pids()[rank], signal.SIGKILL)

    def end(self) -> int:
        try:
            return self.process.wait(120)
        finally:
            self.process.kill()
