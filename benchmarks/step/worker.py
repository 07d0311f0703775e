"""One rank of one case, in its own process: pins itself, builds, warms up, measures, writes a JSON
file.

launcher.py starts it with one argument, a JSON object: case, shape, warmup, steps, seed, core,
result (a path).
"""

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.step.cases import LAYOUTS, OURS, Case, ModelShape

PEERS = {
    "huggingface": "benchmarks.peers.one",
    "huggingface-compiled": "benchmarks.peers.one",
    "huggingface-ddp": "benchmarks.peers.ddp",
    "torch-fsdp2": "benchmarks.peers.sharded",
    "torch-zero-1": "benchmarks.peers.sharded",
    "deepspeed-zero-1": "benchmarks.peers.deepspeed",
    "torch-pipelining": "benchmarks.peers.pipelining",
    "torch-tensor-parallel": "benchmarks.peers.tensor",
    "megatron-core": "benchmarks.peers.megatron",
}


def build(case: Case, shape: ModelShape, seed: int):
    if case.contestant not in OURS:
        return importlib.import_module(PEERS[case.contestant]).build(case, shape, seed)
    ours = importlib.import_module(OURS[case.contestant])
    tp, pp, dp = LAYOUTS[case.layout]
    return ours.step_runner(shape, tp, pp, dp, bf16=case.precision == "bf16", seed=seed)


def peak_memory() -> int:
    """Highest resident set of this process in bytes.

    Read from /proc where there is one: getrusage's figure survives exec and may be the parent's.
    """
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def cpu_seconds() -> tuple[float, float]:
    """(user, system) of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def measure(job: dict[str, Any]) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {job["core"]})
    import torch

    torch.set_num_threads(1)
    from benchmarks.step.weights import global_batch

    case, shape = Case(**job["case"]), ModelShape(**job["shape"])
    runner = build(case, shape, job["seed"])
    losses = []
    wall = []
    user = []
    system = []
    for index in range(job["warmup"] + job["steps"]):
        tokens = global_batch(shape, job["seed"], index)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        start, cpu = time.perf_counter(), cpu_seconds()
        losses.append(runner.step(tokens))
        wall.append(time.perf_counter() - start)
        now = cpu_seconds()
        user.append(now[0] - cpu[0])
        system.append(now[1] - cpu[1])
    kept = slice(job["warmup"], None)
    measured = {"wall_s": wall[kept], "user_s": user[kept], "system_s": system[kept]}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return {
        **measured,
        "losses": losses,
        "peak_bytes": peak_memory(),
        "notes": runner.notes,
        "versions": versions,
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    result = Path(job["result"])
    partial = result.with_suffix(".part")
    partial.write_text(json.dumps(measure(job)))
    partial.rename(result)
    # until the launcher has the results of all ranks: no rank leaves while another still needs it
    sys.stdin.read()
    os._exit(
        0
        # taking process groups down can hang (a gloo thread and DDP's destructor wait for one
        # another)
    )


if __name__ == "__main__":
    main()
