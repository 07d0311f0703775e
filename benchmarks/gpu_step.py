"""Training steps on one GPU: tokens/s, model FLOP/s and MFU, peak memory, and where the time of a step goes.

    python benchmarks/gpu_step.py --out DIR                        # every row, the most valuable first; hours
    python benchmarks/gpu_step.py --out DIR --only native --within 400
    python benchmarks/gpu_step.py --out DIR --device cpu           # the same code on tiny shapes: does it run?
    python benchmarks/gpu_step.py --list                           # names of the rows

A row is one process: pretrain_gpt.py, pretrain_hf.py or MerakTrainer as shipped, or a peer, in bf16 on sequences of
4096 tokens, one per micro-batch. Its result is DIR/step_ROW.json, there as soon as its steps are over. A second call
takes up what is missing and what failed; --again also what is there. A row that cannot be measured says why: "does not
fit", "not installed", "failed", "too slow".

FLOPs are those of the matrix products of forward and backward, causal attention with the half of its scores that is
needed, nothing for recomputation. Megatron-LM counted all scores when it published its table: `tflops_all_scores` is
that (Llama-2-7B at 4096: 7.5 % more). MFU is of the dense bf16 peak, 989e12 FLOP/s for H100 and H200.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from gpu_results import path_of, read, write
from gpu_rows import NEEDS, ROWS, SEQUENCE, SHAPES, Row

HERE = Path(__file__).resolve().parent
AGAIN = ("failed", "too slow")  # what another call takes up
MEASURED = {1: 5, 8: 5, 16: 3}  # micro-batches -> steps
CPU_SEQUENCE, START = 64, 20.0  # tokens where only the code is tried; seconds that no row can do with less


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results are, and go")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name has this, such as '^7b.*8$'")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start no row that would end later; stop one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the code")
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps of a row (5; 3 of 16 micro-batches)")
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and end")
    return parser.parse_args(argv)


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def impossible(row: Row, memory: int | None) -> tuple[str, str] | None:
    """Status and reason of a row that need not be tried. memory: bytes of the device, None where that is no limit."""
    shape = SHAPES[row.model]
    needed = [NEEDS[row.contestant]] if row.contestant in NEEDS else []
    needed += ["peft"] if shape.lora else []
    missing = next((module for module in needed if not installed(module)), None)
    if missing:
        return "not installed", f"{missing} cannot be imported"
    if memory is not None and shape.state_bytes > memory:
        reason = f"weights, gradients and optimizer of {shape.parameters / 1e9:.2f}e9 parameters take "
        return "does not fit", f"{reason}{shape.state_bytes / 1e9:.1f} GB, the device has {memory / 1e9:.1f} GB"
    return None


def device_memory(device: str) -> int | None:
    """Bytes of the GPU. Raises SystemExit where there is none."""
    if device == "cpu":
        return None
    asked = "import torch; print(torch.cuda.mem_get_info()[1])"  # in another process: this one keeps no context there
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise SystemExit(f"gpu_step.py: --device cuda: there is no GPU ({said}). Use --device cpu to try the code.")
    return int(done.stdout)


def why(text: str) -> tuple[str, str]:
    """Status and reason from what a process that failed printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b|rank \S+: ", line)]
    last = (errors or lines or ["it printed nothing"])[-1][:600]
    return ("does not fit" if "out of memory" in text.lower() else "failed"), last


def measure(row: Row, out: Path, given: argparse.Namespace, limit: float) -> dict:
    """Run a row in its own process; its result, which is in its file too."""
    path = path_of(row, out)
    path.unlink(missing_ok=True)
    sequence = CPU_SEQUENCE if given.device == "cpu" else SEQUENCE
    measured = given.steps or MEASURED.get(row.micro_batches, 3)
    request = {"row": asdict(row), "device": given.device, "sequence": sequence, "measured": measured}
    request |= {"into": str(path.resolve()), "began": time.time()}
    paths = (str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, str(HERE / "gpu_worker.py"), json.dumps(request)]
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        said.seek(0)
        text = said.read()
    found = read(path)
    if not found:
        told = ("too slow", f"no result after {limit:.0f} s") if status is None else why(text)
        found = {"row": row.name, **asdict(row), "status": told[0], "why": told[1], "said": text[-3000:]}
        write(path, found)
    elif status != 0:
        problem = f"no result after {limit:.0f} s" if status is None else why(text)[1]
        found = {"profile": {"problem": problem}} | found
        write(path, found)
    return found


def _end(process: subprocess.Popen) -> None:
    """With all that it has started, such as compilers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def line(found: dict) -> str:
    """A result in one line."""
    if found["status"] != "measured":
        return f"{found['row']:22} {found['status']}: {found['why']}"
    mfu = f"{found['mfu']:.1%} MFU, " if found["mfu"] else ""
    memory = f"{found['peak_allocated'] / 1e9:.1f} GB ({found['peak_reserved'] / 1e9:.1f} GB reserved)"
    speed = f"{found['tokens_per_s']:.0f} tokens/s, {found['tflops']:.3g} TFLOP/s, {mfu}{memory}"
    return f"{found['row']:22} {speed}, first step after {found['startup_s']:.0f} s"


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    rows = [row for row in ROWS if re.search(given.only, row.name)]
    if given.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not rows or given.out is None:
        what = "--out: it is missing. Name a directory." if rows else f"--only {given.only}: no row. See --list."
        print(f"gpu_step.py: {what}", file=sys.stderr)
        return 2
    began, left = time.monotonic(), []
    memory = device_memory(given.device)
    for row in rows:
        there = read(path_of(row, given.out))
        if there and there["status"] not in AGAIN and not given.again:
            print(f"{line(there)} [there already]", flush=True)
            continue
        told = impossible(row, memory)
        if told:
            found = {"row": row.name, **asdict(row), "status": told[0], "why": told[1]}
            write(path_of(row, given.out), found)
            print(line(found), flush=True)
            continue
        remaining = float("inf") if given.within is None else given.within - (time.monotonic() - began)
        if remaining < START:
            left.append(row.name)
            continue
        print(line(measure(row, given.out, given, min(row.seconds, remaining))), flush=True)
    if left:
        print(f"left out, {given.within:.0f} s are over: {', '.join(left)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
