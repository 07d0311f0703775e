"""The same faults in this program and in others, in one run, into the table of
docs/evidence/reliability.md.

Every program trains a small transformer on two CPU ranks for ten steps and saves after every second
one; a collective that waits longer than --timeout seconds fails, in all of them. In step 5 rank 1
has a fault. What became of the job is seen from outside: seconds, exit status, lines that an
undisturbed run does not print, whether they name the rank. Then the same command is started again.
Rows with DISK_FULL need root, who may mount a file system.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT
from benchmarks.runs import show
from tools.faults.hook.injected_fault import Order
from tools.faults.watch import Outcome, run, unmount

STEPS = 10
SHAPE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1 --eval-iters 0"""
BEGIN, END = "<!-- written by: python -m benchmarks reliability -->", "<!-- end -->"


@dataclass(frozen=True)
class Program:
    """A way to train.

    name:    in the head of the table.
    command: (directory, timeout in seconds) -> command line.
    """

    name: str
    command: Callable[[Path, int], list[str]]


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    text:    what happens.
    order:   of the injection; its target is set to the directory that the program writes to.
    resumes: whether the job is started again afterwards.
    disk:    size of a file system of its own.
    """

    text: str
    order: Order
    resumes: bool = False
    disk: str | None = None


def _torchrun(script: str, *flags: str) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*start, str(ROOT / "benchmarks/faults" / script), *flags]


def _pretrain(directory: Path, timeout: int) -> list[str]:
    start = [sys.executable, "-m", "megatron_merak", "pretrain", "--nproc-per-node", "2"]
    disk = ["--save", str(directory), "--load", str(directory), "--save-interval", "2"]
    more = ["--train-iters", str(STEPS), "--metrics", f"{directory}.metrics"]
    return [
        *start,
        *SHAPE.split(),
        *disk,
        *more,
        "--distributed-timeout-minutes",
        str(timeout // 60),
    ]


def _of_script(script: str, *flags: str) -> Callable[[Path, int], list[str]]:
    return lambda directory, timeout: _torchrun(
        script, str(directory), *flags, "--timeout", str(timeout)
    )


PROGRAMS = (
    Program("merak-pretrain", _pretrain),
    Program("MerakTrainer", _of_script("train_hf.py", "--merak")),
    Program("torchrun + DDP + DCP", _of_script("train_ddp.py")),
    Program("transformers' Trainer", _of_script("train_hf.py")),
)


def _in_step(fault: str, **changes: object) -> Order:
    return Order(**{"fault": fault, "rank": 1, "directory": "", "step": 5, **changes})


FAULTS = (
    Fault("killed (SIGKILL)", _in_step("SIGKILL"), resumes=True),
    Fault("killed while it saves", _in_step("SIGKILL", rank=0, step=6, disk_call=3), resumes=True),
    Fault("SIGTERM to the launcher", _in_step("LAUNCHER_SIGTERM"), resumes=True),
    Fault("launcher killed", _in_step("LAUNCHER_SIGKILL")),
    Fault("segmentation fault", _in_step("SEGFAULT")),
    Fault("exception", _in_step("WORKLOAD_EXC")),
    Fault("`sys.exit(0)` on one rank", _in_step("EXIT")),
    Fault("stopped (SIGSTOP)", _in_step("SIGSTOP")),
    Fault("stopped for 3 s", _in_step("SIGSTOP", lasts=3.0)),
    Fault("Python's lock held", _in_step("LOCK_GIL")),
    Fault("connections cut", _in_step("CUT_LINK")),
    Fault("0.5 s slower each step", _in_step("SLOW", lasts=0.5)),
    Fault("a weight is NaN", _in_step("NAN", seed=1), resumes=True),
    Fault("a bit of a weight flips", _in_step("BIT_FLIP", seed=1)),
    Fault("weights of a rank x 30", _in_step("SPIKE")),
    Fault("disk full", _in_step("DISK_FULL", rank=0), resumes=True, disk="16m"),
    Fault("disk full for 5 s", _in_step("DISK_FULL", rank=0, lasts=5.0), disk="16m"),
    Fault("directory removed", _in_step("DIRECTORY_GONE", rank=0), resumes=True),
)


def losses(output: str, directory: Path) -> list[tuple[int, str]]:
    """Return (step, loss) of the steps that a run has told."""
    metrics = Path(f"{directory}.metrics")
    if metrics.exists():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        metrics.unlink()
        return [
            (row["iteration"], f"{row['loss']:.9f}") for row in rows if row.get("loss") is not None
        ]
    return [
        (int(step), loss)
        for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)
    ]


def _forms(output: str) -> set[str]:
    """The lines of an output, without the numbers in them."""
    return {re.sub(r"[\d.e+-]+|nan|inf", "0", line) for line in output.splitlines()}


@dataclass
class Measured:
    """A program without a fault: (step, loss) of its steps, and the forms of what it prints."""

    steps: list[tuple[int, str]]
    forms: set[str]


class Bench:
    """Runs programs with faults.

    directory: for what they write.
    timeout:   of their collectives, in seconds.
    limit:     seconds from a fault on after which a job counts as hung.
    """

    def __init__(self, directory: Path, timeout: int, limit: float):
        self.directory = directory
        self.timeout = timeout
        self.limit = limit
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def _run(
        self, program: Program, place: Path, order: Order | None, disk: str | None = None
    ) -> Outcome:
        command = program.command(place, self.timeout)
        limit = self.limit if order is not None else 10 * self.limit
        return run(command, order, limit, self.environment, disk_size=disk)

    def undisturbed(self, program: Program) -> Measured:
        """Run a program without a fault. Raises RuntimeError if it fails."""
        place = self.directory / f"{PROGRAMS.index(program)}"
        outcome = self._run(program, place, None)
        steps = losses(outcome.output, place)
        if outcome.status != 0 or len(steps) != STEPS:
            raise RuntimeError(f"{program.name} fails without a fault:\n{outcome.output}")
        return Measured(steps, _forms(outcome.output))

    def cell(self, fault: Fault, program: Program, known: Measured) -> str:
        """Run a program with a fault and again, and say what became of it."""
        place = self.directory / f"{PROGRAMS.index(program)}-{FAULTS.index(fault)}"
        if fault.disk is not None and os.geteuid() != 0:
            return "not measured: needs root"
        order = Order(**{**vars(fault.order), "target": str(place)})
        outcome = self._run(program, place, order, fault.disk)
        (Path(f"{place}.log")).write_text(outcome.output)
        steps = losses(outcome.output, place)
        text = _told(outcome, steps, known)
        if fault.resumes and (
            not outcome.ended or outcome.status != 0 or steps[-1:] != known.steps[-1:]
        ):
            (place / ".filler").unlink(missing_ok=True)
            again = self._run(program, place, None)
            text += "; " + _resumed(again, losses(again.output, place), known)
            (Path(f"{place}.again.log")).write_text(again.output)
        if fault.disk is not None:
            unmount(place)
        return text


def _told(outcome: Outcome, steps: Sequence[tuple[int, str]], known: Measured) -> str:
    if not outcome.came:
        return "**the fault did not come**"
    new = sum(form not in known.forms for form in map(_only_form, outcome.output.splitlines()))
    said = f"{new} line{'s' * (new != 1)}" if new else "no word"
    named = ", rank named" if outcome.named else ""
    if not outcome.ended:
        waits = re.search(r"the run waits for space", outcome.output)
        return f"{'waits for space' if waits else '**hangs**'}, {said}{named}"
    if outcome.status == 0 and steps and steps[-1][0] == STEPS:
        ends = "loss equal" if steps == known.steps else f"last loss {float(steps[-1][1]):.4g}"
        return f"trains on, {ends}, {said}{named}"
    return f"ends in {outcome.seconds:.0f} s, status {outcome.status}, {said}{named}"


def _only_form(line: str) -> str:
    return next(iter(_forms(line)), "")


def _resumed(outcome: Outcome, steps: Sequence[tuple[int, str]], known: Measured) -> str:
    if outcome.status != 0:
        return "**does not resume**"
    if not steps:
        return "nothing is left to do"
    equal = "equal" if list(steps) == known.steps[-len(steps) :] else "**other losses**"
    return f"goes on in step {steps[0][0]}, {equal}"


def table(bench: Bench, programs: Sequence[Program], faults: Sequence[Fault], jobs: int) -> str:
    """Run all and return the table."""
    known = {program.name: bench.undisturbed(program) for program in programs}

    def cell(pair: tuple[Fault, Program]) -> str:
        fault, program = pair
        text = bench.cell(fault, program, known[program.name])
        print(f"{fault.text}, {program.name}: {text}", file=sys.stderr, flush=True)
        return text

    pairs = [(fault, program) for fault in faults for program in programs]
    with ThreadPoolExecutor(jobs) as pool:
        cells = [*pool.map(cell, pairs)]
    head = ["in step 5", *(program.name for program in programs)]
    rows = [head, ["---"] * len(head)]
    for place, fault in enumerate(faults):
        rows.append([fault.text, *cells[place * len(programs) : (place + 1) * len(programs)]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Run the benchmark; 2 for a page without marks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, help="page whose table is replaced")
    parser.add_argument(
        "--timeout", type=int, default=60, help="of collectives: 60, 120, ... s (default: 60)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=150.0,
        help="seconds until a job counts as hung (default: 150)",
    )
    parser.add_argument("--jobs", type=int, default=3, help="jobs at a time (default: 3)")
    parser.add_argument(
        "--faults", default="", help="names of rows to run, such as SIGKILL,NAN (default: all)"
    )
    parser.add_argument(
        "--programs",
        default="",
        help="numbers of columns to run, from 0, such as 0,1 (default: all)",
    )
    parser.add_argument(
        "--keep", type=Path, help="keep what the programs print and write in this directory"
    )
    options = parser.parse_args()
    wanted = (
        options.faults.split(",") if options.faults else [fault.order.fault for fault in FAULTS]
    )
    faults = [fault for fault in FAULTS if fault.order.fault in wanted]
    columns = (
        [int(word) for word in options.programs.split(",")]
        if options.programs
        else range(len(PROGRAMS))
    )
    programs = [PROGRAMS[column] for column in columns]
    with tempfile.TemporaryDirectory(prefix="reliability-") as name:
        directory = options.keep or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        text = table(
            Bench(directory, options.timeout, options.limit), programs, faults, options.jobs
        )
    print(text)
    if options.into is not None:
        return show(text, [options.into], BEGIN, END)
    return 0
