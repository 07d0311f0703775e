"""Whole jobs on 2 and 4 ranks with one fault each, and what has to become of them
(docs/evidence/reliability.md).
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.faults.hook.injected_fault import Order
from tools.faults.watch import Outcome, run

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
TIMEOUT = 60  # seconds, of a collective
DEAD = 15.0  # seconds in which a job ends whose rank has died
# seconds in which a job ends whose rank does not answer: launchers wait 30 s for it again
HUNG = TIMEOUT + 60.0
LAUNCHER = 45.0  # seconds in which a job has saved and ended that is told to
SMALL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1 --eval-iters 0 --train-iters {STEPS}
    --save-interval 2 --distributed-timeout-minutes {TIMEOUT // 60}"""


def gpt(ranks: int, flags: str = "") -> Callable[[Path], list[str]]:
    """A job of merak-pretrain that saves to a directory and goes on from there."""

    def command(directory: Path) -> list[str]:
        start = [sys.executable, "-m", "megatron_merak", "pretrain", "--nproc-per-node", str(ranks)]
        disk = [
            "--save",
            str(directory),
            "--load",
            str(directory),
            "--metrics",
            f"{directory}.metrics",
        ]
        return [*start, *SMALL.split(), *flags.split(), *disk]

    return command


def trainer(ranks: int, arguments: str = "") -> Callable[[Path], list[str]]:
    """A script with MerakTrainer under torchrun."""

    def command(directory: Path) -> list[str]:
        start = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        script = [
            str(ROOT / "benchmarks/faults/train_hf.py"),
            str(directory),
            "--merak",
            "--timeout",
            str(TIMEOUT),
        ]
        return [*start, *script, *arguments.split()]

    return command


DOORS: Mapping[str, Callable[[Path], list[str]]] = {
    "DP2": gpt(2),
    "PP2": gpt(2, "--pipeline-model-parallel-size 2"),
    "TP2 x PP2": gpt(4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "PP2 x DP2": gpt(4, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
    "MerakTrainer TP2": trainer(2, "tensor_model_parallel_size=2"),
    "MerakTrainer PP2 x DP2": trainer(4, "pipeline_model_parallel_size=2"),
}


@dataclass(frozen=True)
class Case:
    """A fault in a job.

    door:     a key of DOORS.
    fault:    a key of FAULTS.
    within:   seconds in which it ends; None: it trains on to its last step, with the losses of an
              undisturbed run.
    named:    whether the rank has to be named.
    rank:     that has the fault.
    more:     of the order.
    disk:     size of a file system of its own.
    resumes:  whether it goes on afterwards, with the losses of an undisturbed run.
    """

    door: str
    fault: str
    within: float | None
    named: bool = True
    rank: int = 1
    more: Mapping[str, float] = field(default_factory=dict)
    disk: str | None = None
    resumes: bool = True

    def __str__(self) -> str:
        more = ", ".join(f"{name} {value}" for name, value in self.more.items())
        return f"{self.fault}{' ' * bool(more)}{more}, {self.door}"


CASES = (
    *(Case(door, "SIGKILL", DEAD, rank=place % 2) for place, door in enumerate(DOORS)),
    Case("DP2", "SIGKILL", DEAD, rank=0, more={"step": 4, "disk_call": 2}),
    Case("PP2", "SIGKILL", DEAD, rank=1, more={"step": 4, "disk_call": 3}),
    Case("TP2 x PP2", "SIGKILL", DEAD, rank=3, more={"step": 4, "disk_call": 1}),
    Case("MerakTrainer TP2", "SIGKILL", DEAD, rank=0, more={"step": 4, "disk_call": 4}),
    *(Case(door, "SEGFAULT", DEAD) for door in ("DP2", "TP2 x PP2", "MerakTrainer TP2")),
    *(Case(door, "OS_ABORT", DEAD) for door in ("PP2", "PP2 x DP2")),
    *(
        Case(door, "WORKLOAD_EXC", DEAD, rank=0)
        for door in ("DP2", "TP2 x PP2", "MerakTrainer PP2 x DP2")
    ),
    *(Case(door, "ASYNC_EXC", DEAD, more={"seconds": 0.01}) for door in ("PP2",)),
    *(Case(door, "EXIT", DEAD) for door in ("DP2", "PP2 x DP2", "MerakTrainer TP2")),
    *(Case(door, "EXIT_AT_ONCE", DEAD) for door in ("PP2", "TP2 x PP2")),
    *(Case(door, "CUT_LINK", DEAD, named=False) for door in ("PP2", "PP2 x DP2")),
    *(Case(door, "SIGSTOP", HUNG) for door in ("PP2", "TP2 x PP2", "MerakTrainer TP2")),
    *(Case(door, "LOCK_GIL", HUNG) for door in ("DP2", "PP2 x DP2")),
    *(Case(door, "SLEEP", HUNG) for door in ("PP2", "MerakTrainer PP2 x DP2")),
    *(
        Case(door, "SIGSTOP", None, named=False, more={"lasts": 2.0})
        for door in ("DP2", "TP2 x PP2")
    ),
    *(
        Case(door, "SLOW", None, named=False, more={"lasts": 0.3})
        for door in ("PP2", "MerakTrainer TP2")
    ),
    *(Case(door, "LAUNCHER_SIGTERM", LAUNCHER, named=False) for door in ("DP2", "TP2 x PP2")),
    *(Case(door, "LAUNCHER_SIGKILL", DEAD, named=False) for door in ("PP2", "MerakTrainer TP2")),
    Case("DP2", "DISK_FULL", None, named=False, rank=0, more={"lasts": 5.0}, disk="16m"),
    Case(
        "MerakTrainer TP2", "DISK_FULL", None, named=False, rank=0, more={"lasts": 5.0}, disk="16m"
    ),
)


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def start(
    case: Case | None, door: str, directory: Path, limit: float
) -> tuple[Outcome, list[tuple[int, str]]]:
    """Run a job, with a fault or without; return what became of it, and (step, loss) of
    its steps.
    """
    order = None
    if case is not None:
        order = Order(
            **{"fault": case.fault, "rank": case.rank, "directory": "", "step": 5, **case.more}
        )  # type: ignore[arg-type]
        order = Order(**{**vars(order), "target": str(directory)})
    disk = case.disk if case is not None else None
    outcome = run(DOORS[door](directory), order, limit, environment(), disk_size=disk)
    return outcome, losses(outcome.output, directory)


def losses(output: str, directory: Path) -> list[tuple[int, str]]:
    """Return (step, loss) of the steps that a run has told."""
    metrics = Path(f"{directory}.metrics")
    if metrics.exists():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        metrics.unlink()
        return [
            (row["iteration"], repr(row["loss"])) for row in rows if row.get("loss") is not None
        ]
    return [
        (int(step), loss)
        for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)
    ]
