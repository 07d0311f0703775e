"""Measures this library on a machine with one GPU and no network, rented for fifteen minutes: one command.

    python benchmarks/gpu_session.py --kit build/gpu-kit --out DIR --budget 600             # part 1, the most valuable
    python benchmarks/gpu_session.py --kit build/gpu-kit --out DIR --budget 180 --part 2    # the rest
    python benchmarks/gpu_session.py --list                                                 # steps, and their seconds

Every step is a process of its own with a limit of its own. At the limit each Python process in it prints its stacks,
then all of it is killed. Whatever becomes of a step, the next one runs, as long as there is time for it. Each prints
one line: what it is, how it ended, its seconds, its figure, the seconds that are left.

DIR/session.tgz has all results and logs so far. It is written aside and renamed, after every step and every few
seconds within one, so what was measured stays when the machine is taken away. benchmarks/gpu_page.py makes a page.

The kit (make gpu-kit) has the compiled extensions; without --kit those that are built here are used. Needs Python with
torch, transformers, accelerate, peft and pytest. Imports none of them itself.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from datetime import UTC, datetime
from pathlib import Path

from gpu_steps import STEPS, Step

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 6.0  # seconds at the end of the budget that no step gets
PATIENCE = 4.0  # seconds in which the processes of a step print their stacks
PACKED_EVERY = 15.0  # seconds, within a step
KEPT_OF_A_LOG = 200_000  # bytes of its end; a tenth of that of its start
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class KitError(Exception):
    """A kit that is not whole."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kit", type=Path, metavar="DIR", help="what make gpu-kit made")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where session.tgz goes")
    parser.add_argument(
        "--budget", type=float, default=600, metavar="SECONDS", help="of all steps together"
    )
    parser.add_argument("--part", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="steps whose name has this, of both parts"
    )
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="of every step, instead of its own"
    )
    parser.add_argument(
        "--through", default="", metavar="MODULE", help="a program that runs those of the steps"
    )
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    return parser.parse_args(argv)


def chosen(given: argparse.Namespace) -> list[Step]:
    if given.only:
        return [step for step in STEPS if re.search(given.only, step.name)]
    return [step for step in STEPS if given.part in step.parts]


def install(kit: Path) -> str:
    """Copy the libraries of a kit to where this tree loads them from; what is in it. Raises
    KitError.
    """
    try:
        manifest = json.loads((kit / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KitError(
            f"--kit {kit}: it has no manifest ({error}). Make one: make gpu-kit."
        ) from None
    missing = [
        name for name, size in manifest["files"].items() if not _has(kit / name, size["bytes"])
    ]
    for path in kit.glob("lib/*.so"):
        shutil.copy2(path, ROOT / "megatron_merak" / path.name)
    told = f"kit for {manifest['for']}"
    return f"{told}; missing or cut short: {', '.join(missing)}" if missing else told


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


class Session:
    """Runs steps one after the other, and keeps what became of them.

    given: the command line.  folder: a new one for logs and results.
    """

    def __init__(self, given: argparse.Namespace, folder: Path):
        self.given = given
        self.folder = folder
        self.began = time.monotonic()
        self.rows: list[dict] = []
        self.process: subprocess.Popen | None = None
        self.without_extensions = False
        for name in ("logs", "files"):
            (folder / name).mkdir(parents=True)
        self.head = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "part": given.part,
            "budget": given.budget,
            "python": platform.python_version(),
            "processors": os.cpu_count(),
        }

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.given.budget - (time.monotonic() - self.began)

    def run(self, step: Step) -> None:
        """Run a step within its limit and what is left, and say what became of it."""
        limit = min(self.given.limit or step.limit, self.left - MARGIN)
        row = {
            "step": step.name,
            "about": step.about,
            "status": "cut",
            "seconds": 0.0,
            "figure": "",
        }
        self.rows.append(row)
        if self.left - MARGIN < min(step.estimate, limit if self.given.limit else step.estimate):
            row |= {"status": "left out", "figure": f"it needs about {step.estimate} s"}
        else:
            self.pack()
            began = time.monotonic()
            status = self._run(step, limit)
            row |= {"seconds": round(time.monotonic() - began, 1)} | self._ended(
                step, status, limit
            )
        if row.get("result", {}).get("extensions") is False:
            self.without_extensions = True
        self.pack()
        seconds = f"{row['seconds']:6.1f} s"
        print(
            f"{step.name:22} {row['status']:13} {seconds}  {row['figure']}  ({self.left:.0f} s left)",
            flush=True,
        )

    def _run(self, step: Step, limit: float) -> int | None:
        """The exit status, None if it ran into its limit."""
        end = time.monotonic() + limit
        with open(self.log(step), "wb") as said:
            self.process = subprocess.Popen(
                self.command(step),
                cwd=ROOT,
                env=self.environment(step),
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=_die_with_parent,
            )
            status = None
            while status is None and time.monotonic() < end:
                try:
                    status = self.process.wait(max(0.01, min(PACKED_EVERY, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    self.pack()
            self.stop(stacks=status is None)
        return status

    def stop(self, stacks: bool) -> None:
        """End all processes of the step that runs. stacks: let those of Python print where they
        are.
        """
        process = self.process
        self.process = None
        if process is None:
            return
        if stacks:  # PYTHONFAULTHANDLER answers SIGABRT, also while a thread waits in CUDA
            _signal(process, signal.SIGABRT)
            end = time.monotonic() + PATIENCE
            while time.monotonic() < end and process.poll() is None:
                time.sleep(0.05)
        _signal(process, signal.SIGKILL)
        process.wait()

    def _ended(self, step: Step, status: int | None, limit: float) -> dict:
        """How a step ended, its figure, and what it wrote."""
        text = self.log(step).read_text(encoding="utf-8", errors="replace")
        try:
            result = json.loads(self.result(step).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            result = {}
        if status is None:
            # what was measured before the limit counts
            known = f"{result['figure']}; " if result.get("figure") else ""
            found = {
                "status": "hung",
                "figure": f"{known}ended after {limit:.0f} s, stacks are in its log",
            }
        elif status == 0:
            found = {
                "status": result.get("status", "ok"),
                "figure": result.get("figure") or _last(text),
            }
        elif "out of memory" in text.lower():
            found = {"status": "out of memory", "figure": _error(text)}
        else:
            found = {
                "status": "failed",
                "figure": result.get("figure") or _error(text),
                "exit": status,
            }
        return found | {"result": result}

    def command(self, step: Step) -> list[str]:
        """Of the process."""
        through = ["-m", self.given.through, step.name] if self.given.through else []
        places = {
            "into": self.result(step),
            "kit": self.given.kit or "",
        }
        return [sys.executable, *through, *(word.format(**places) for word in step.command)]

    def environment(self, step: Step) -> dict[str, str]:
        """Of the process."""
        path = os.environ.get("PYTHONPATH")
        found = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if step.spins:  # a kernel that is loaded while another waits for it never starts
            found["CUDA_MODULE_LOADING"] = "EAGER"
        if self.without_extensions:
            found["MERAK_EXT"] = "0"
        return found

    def log(self, step: Step) -> Path:
        return self.folder / "logs" / f"{step.file}.log"

    def result(self, step: Step) -> Path:
        return self.folder / "files" / f"{step.file}.json"

    def pack(self) -> None:
        """Write session.tgz aside, and rename it."""
        head = self.head | {"seconds": round(time.monotonic() - self.began, 1)}
        lines = [json.dumps(row) + "\n" for row in (head, *self.rows)]
        (self.folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")
        fresh = self.given.out / "session.new"
        with tarfile.open(fresh, "w:gz", compresslevel=6) as archive:
            archive.add(self.folder / "results.jsonl", "results.jsonl")
            for path in sorted(self.folder.glob("files/*")):
                archive.add(path, f"files/{path.name}")
            for path in sorted(self.folder.glob("logs/*.log")):
                short = self.folder / "log"
                short.write_bytes(_shortened(path.read_bytes()))
                archive.add(short, f"logs/{path.name}")
        fresh.replace(self.given.out / "session.tgz")


def _die_with_parent() -> None:
    """In a new process: it ends when the session is killed."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def _signal(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _shortened(content: bytes) -> bytes:
    if len(content) <= KEPT_OF_A_LOG:
        return content
    return content[: KEPT_OF_A_LOG // 10] + b"\n... left out ...\n" + content[-KEPT_OF_A_LOG:]


def _last(text: str) -> str:
    lines = [line.strip(" =") for line in text.splitlines() if line.strip(" =")]
    return lines[-1][:160] if lines else ""


def _error(text: str) -> str:
    """The line of a log that says best what went wrong."""
    lines = [line.strip() for line in text.splitlines()]
    telling = re.compile(r"(E +)?[\w.]*(Error|Exception|Interrupt|Failure|Failed)\b|rank \S+: ")
    found = [line for line in lines if telling.match(line)]
    return found[-1][:300] if found else _last(text) or "it printed nothing"


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    steps = chosen(given)
    if given.list:
        for step in steps:
            print(f"{step.name:22} {step.estimate:4} s, at most {step.limit:4} s: {step.about}")
        print(f"{sum(step.estimate for step in steps)} s")
        return 0
    if not steps or given.out is None:
        what = (
            "--out: it is missing. Name a directory."
            if steps
            else f"--only {given.only}: no step. See --list."
        )
        print(f"gpu_session.py: {what}", file=sys.stderr)
        return 2
    given.out = given.out.resolve()
    given.kit = given.kit.resolve() if given.kit else None
    given.out.mkdir(parents=True, exist_ok=True)
    folder = ROOT / "build" / "gpu-session"
    shutil.rmtree(folder, ignore_errors=True)
    session = Session(given, folder)
    try:
        told = install(given.kit) if given.kit else "no kit: what is built here is used"
    except KitError as error:
        print(f"gpu_session.py: {error}", file=sys.stderr)
        return 2
    print(told, flush=True)
    session.head["kit"] = told
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGABRT would leave cores

    def leave(number, frame):
        session.stop(stacks=True)
        session.pack()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    for step in steps:
        session.run(step)
    wrong = [row["step"] for row in session.rows if row["status"] != "ok"]
    print(
        f"{len(steps) - len(wrong)} of {len(steps)} steps ended well; {given.out / 'session.tgz'}",
        flush=True,
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
