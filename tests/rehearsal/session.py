"""Rehearses benchmarks/gpu_session.py on a machine without a GPU: `make gpu-rehearsal`.

    python -m tests.rehearsal.session --write       everything, and its log into docs/gpu.md
    python -m tests.rehearsal.session --only '^7b' --what steps     renews a part of what the last log said

A copy of this tree and of the kit, as it would travel, runs the very command of the session; each step's command goes
through tests/rehearsal/program.py. Then failures are planted: into every step one that runs out of memory, one that
hangs, and one in which the whole session is killed; and the kit loses the CUDA kernels.
"""

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_session import MARGIN  # noqa: E402
from gpu_steps import STEPS, Step  # noqa: E402
from two_lines_page import write  # noqa: E402

BUDGETS = {1: 600, 2: 180}  # seconds of the two calls
TRAVELS = 64 * 2**20  # bytes of the tree and the kit
COMMAND = "python benchmarks/gpu_session.py --kit build/gpu-kit --out DIR --budget {} --part {}"
COMMAND_LIMIT = 2000  # characters
BEGIN = "<!-- written by make gpu-rehearsal -->"
END = "<!-- end of the rehearsal -->"
PROGRAM = "tests.rehearsal.program"
UNHURRIED = (
    "--limit",
    "5000",
    "--budget",
    "100000",
)  # limits are a GPU's, this machine may be busy
HANG = 8.0  # seconds that a step gets into which a hang is planted


class Different(AssertionError):
    """Something did not end as it should."""


@dataclass(frozen=True)
class Ended:
    """A session. rows: of results.jsonl without its head. logs: by the name of their
    step's files.
    """

    status: int
    said: str
    rows: list[dict]
    logs: dict[str, str]

    def status_of(self, step: str) -> str:
        return next((row["status"] for row in self.rows if row["step"] == step), "missing")


def travelling(into: Path, kit: Path | None) -> int:
    """Copy what a checkout holds beside what git ignores, and the kit; its bytes."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    for path in paths:
        target = into / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    if kit is not None:
        shutil.copytree(kit, into / "build" / "gpu-kit")
    return sum(path.stat().st_size for path in into.rglob("*") if path.is_file())


def read(archive: Path) -> tuple[list[dict], dict[str, str]]:
    """Rows and logs of a session.tgz."""
    with tarfile.open(archive) as packed:
        text = {
            one.name: packed.extractfile(one).read().decode(errors="replace")
            for one in packed
            if one.isfile()
        }
    rows = [json.loads(line) for line in text["results.jsonl"].splitlines()][1:]
    logs = {Path(name).stem: said for name, said in text.items() if name.startswith("logs/")}
    return rows, logs


def started(
    tree: Path, out: Path, arguments: list[str], plant: str = "", **settings: str
) -> subprocess.Popen:
    """The session's command in a tree, whose steps go through the program."""
    kit = ["--kit", "build/gpu-kit"] if (tree / "build" / "gpu-kit").exists() else []
    command = [
        sys.executable,
        "benchmarks/gpu_session.py",
        *kit,
        "--out",
        str(out),
        "--through",
        PROGRAM,
        *arguments,
    ]
    environment = os.environ | {"REHEARSAL_PLANT": plant} | settings
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def session(tree: Path, *arguments: str, plant: str = "", **settings: str) -> Ended:
    """A whole session."""
    with tempfile.TemporaryDirectory() as folder:
        process = started(tree, Path(folder), list(arguments), plant, **settings)
        said, _ = process.communicate()
        rows, logs = read(Path(folder) / "session.tgz")
    return Ended(process.returncode, said, rows, logs)


def only(*steps: Step) -> list[str]:
    names = "|".join(re.escape(step.name) for step in steps)
    return ["--only", f"^({names})$"]


def wanted(ended: Ended, step: Step, status: str) -> None:
    found = ended.status_of(step.name)
    if found != status:
        raise Different(f"{step.name}: {status} was planted, it ended {found}:\n{ended.said}")


def out_of_memory(tree: Path, steps: tuple[Step, ...]) -> str:
    """Every step runs out of memory; all of them run."""
    ended = session(tree, *only(*steps), plant="memory")
    for step in steps:
        wanted(ended, step, "out of memory")
    return f'{len(steps)} of {len(steps)} steps end as "out of memory", and the next one starts'


def hangs(tree: Path, steps: tuple[Step, ...]) -> str:
    """Every step hangs with a process of its own: stacks are in its log, and nothing of it
    is left.
    """
    began = time.monotonic()
    ended = session(tree, *only(*steps), "--limit", str(HANG), plant="hang")
    for step in steps:
        stacks(ended, step)
    left = remaining(tree)
    if left:
        raise Different(f"processes are left: {left}")
    each = (time.monotonic() - began) / len(steps)
    ends = f"{len(steps)} of {len(steps)} steps are ended with their stacks in their logs, nothing of them is left"
    return f"{ends}; {each:.1f} s each at a limit of {HANG:.0f} s"


def stacks(ended: Ended, step: Step) -> None:
    """A step was ended at its limit, and its log says where it stood."""
    wanted(ended, step, "hung")
    log = ended.logs[step.file]
    if "Fatal Python error: Aborted" not in log or "most recent call first" not in log:
        raise Different(f"{step.name}: there are no stacks in its log:\n{log}")


def remaining(tree: Path) -> list[str]:
    """Processes that still run in a tree."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == tree.resolve():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def killed(tree: Path, steps: tuple[Step, ...]) -> str:
    """The session is killed within every step: a step before is there, this one is said to
    be cut.
    """
    first, *others = steps  # the first is short, so that it goes before each of the others
    for before, step in ((None, first), *((first, other) for other in others)):
        # logs of an earlier session
        shutil.rmtree(tree / "build" / "gpu-session", ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            named = only(step) if before is None else only(before, step)
            process = started(tree, Path(folder), named, f"hang:{step.name}")
            log = tree / "build" / "gpu-session" / "logs" / f"{step.file}.log"
            end = time.monotonic() + 300
            while time.monotonic() < end and not (log.exists() and "hanging" in log.read_text()):
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            rows, _ = read(Path(folder) / "session.tgz")
        statuses = {row["step"]: row["status"] for row in rows}
        expected = {step.name: "cut"} if before is None else {before.name: "ok", step.name: "cut"}
        if statuses != expected:
            raise Different(f"killed in {step.name}: {statuses}")
    end = time.monotonic() + 30
    while (left := [one for one in remaining(tree) if PROGRAM in one]) and time.monotonic() < end:
        time.sleep(0.2)
    if left:
        raise Different(f"steps outlive their session: {left}")
    return f"killed in each of {len(steps)} steps: what was before is kept, and the step ends too"


def without_kernels(tree: Path, steps: tuple[Step, ...]) -> str:
    """The kit has no CUDA kernels: one line, and all goes on without extensions."""
    lost = tree / "megatron_merak" / "_ops_cuda.abi3.so"
    aside = tree / "build" / "gpu-kit" / "lib" / lost.name
    lost.unlink(missing_ok=True)
    if aside.exists():
        aside.rename(aside.with_suffix(".lost"))
    ended = session(tree, *only(*steps), *UNHURRIED)
    if aside.with_suffix(".lost").exists():
        aside.with_suffix(".lost").rename(aside)
    first = next(row for row in ended.rows if row["step"] == "start")
    if first["status"] != "ok" or "MERAK_EXT=0" not in first["figure"]:
        raise Different(f"start: {first}")
    told = [row for row in ended.rows if row["status"] != "ok"]
    if told:
        raise Different(f"without kernels: {told}")
    return f'"{first["figure"]}"; {len(ended.rows)} of {len(ended.rows)} steps end well'


def estimates() -> dict[int, int]:
    """Seconds of the two calls by the steps' estimates. Raises Different where they are
    too long.
    """
    found = {part: sum(step.estimate for step in STEPS if part in step.parts) for part in BUDGETS}
    for part, seconds in found.items():
        if seconds > BUDGETS[part] - MARGIN:
            raise Different(f"part {part} takes {seconds} s of {BUDGETS[part]}")
        if len(COMMAND.format(BUDGETS[part], part)) > COMMAND_LIMIT:
            raise Different(f"the command of part {part} is too long")
    return found


def rehearsed(trees: list[Path], steps: tuple[Step, ...], log: Path) -> None:
    """Run all steps, each in a session of its own, as many at a time as there are trees; keep their
    rows.
    """
    free: queue.Queue[Path] = queue.Queue()
    for tree in trees:
        free.put(tree)

    def one(step: Step) -> None:
        tree = free.get()
        ended = session(tree, *only(step), *UNHURRIED)
        free.put(tree)
        row = ended.rows[0]
        print(
            f"{step.name:22} {row['status']:13} {row['seconds']:6.1f} s  {row['figure']}",
            flush=True,
        )
        if row["status"] != "ok":
            print(ended.logs[step.file][-4000:], flush=True)
        keep(log / f"step {row['step']}.json", row)

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(one, steps))


def table(rows: list[dict], endings: dict[str, str], size: int) -> str:
    """The log of a rehearsal."""
    seconds = estimates()
    now = datetime.now(UTC).date().isoformat()
    lines = [
        f"{now}, {versions()}. Tree and kit: {size / 2**20:.1f} MiB of {TRAVELS / 2**20:.0f}. By estimate the first "
        f"call takes {seconds[1]} s of {BUDGETS[1]}, the second {seconds[2]} s of {BUDGETS[2]}.",
        "",
        "| step | estimate, s | limit, s | here, s | ended | figure |",
        "|---|--:|--:|--:|---|---|",
    ]
    for step in STEPS:
        row = next((row for row in rows if row["step"] == step.name), None)
        if row is not None:
            figure = row["figure"].replace("|", "/")
            cells = (
                step.name,
                step.estimate,
                step.limit,
                f"{row['seconds']:.0f}",
                row["status"],
                figure,
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| planted | how it ended |", "|---|---|"]
    lines += [f"| {kind} | {how} |" for kind, how in endings.items()]
    return "\n".join(lines)


def versions() -> str:
    import torch
    import transformers

    return f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"


def planted(tree: Path, steps: tuple[Step, ...]) -> Iterator[tuple[str, str]]:
    """Kinds of failure, and how they ended. Raises Different where one ended otherwise."""
    yield "out of memory", out_of_memory(tree, steps)
    yield "a hang", hangs(tree, steps)
    yield "the session killed", killed(tree, steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kit", type=Path, default=ROOT / "build" / "gpu-kit", metavar="DIR")
    parser.add_argument("--only", default="", metavar="REGEX", help="steps whose name has this")
    parser.add_argument(
        "--what", default="planted,steps,kernels", metavar="LIST", help="parts of the rehearsal"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="steps at a time")
    parser.add_argument("--write", action="store_true", help="write the log into docs/gpu.md")
    given = parser.parse_args()
    steps = tuple(step for step in STEPS if re.search(given.only, step.name))
    what = given.what.split(",")
    kit = given.kit if given.kit.exists() else None
    if kit is None:
        print(
            f"there is no kit at {given.kit} (make gpu-kit): what is built here is used", flush=True
        )
    log = ROOT / "build" / "gpu-rehearsal"
    log.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        trees = [Path(folder) / str(number) for number in range(given.jobs)]
        for tree in trees:
            size = travelling(tree, kit)
            if kit is None:
                for path in ROOT.glob("megatron_merak/*.so"):
                    shutil.copy2(path, tree / "megatron_merak")
        if size > TRAVELS:
            raise Different(
                f"tree and kit have {size / 2**20:.1f} MiB, at most {TRAVELS / 2**20:.0f} travel"
            )
        if "planted" in what:
            for kind, how in planted(trees[0], steps):
                print(f"{kind}: {how}", flush=True)
                keep(log / f"planted {kind}.json", how)
        if "steps" in what:
            rehearsed(trees, steps, log)
        if "kernels" in what:
            how = without_kernels(
                trees[0], tuple(step for step in STEPS if step.name in ("start", "kernels"))
            )
            print(f"no CUDA kernels: {how}", flush=True)
            keep(log / "planted no CUDA kernels.json", how)
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in log.glob("step *.json")]
    endings = {
        path.stem.removeprefix("planted "): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(log.glob("planted *.json"))
    }
    text = table(rows, endings, size)
    print(text)
    if given.write:
        write(ROOT / "docs" / "gpu.md", text, BEGIN, END)
    return int(any(row["status"] != "ok" for row in rows))


def keep(path: Path, found: object) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
