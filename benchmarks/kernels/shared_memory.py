"""Collectives of tensor-parallel ranks through shared memory beside gloo: two ranks, pinned to a core each.

    python -m benchmarks shared_memory            # a few minutes on two idle cores
    python -m benchmarks shared_memory --quick    # a small model, few repeats: does it all still run?

First all-reduces of several sizes, then training steps with a tensor-parallel size of 2: both backends in the same
processes, taking turns. It is an error if they do not give the same losses to the bit.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.step.cases import LAYOUTS, QUICK, TENSOR, ModelShape
from benchmarks.step.launcher import run_together
from benchmarks.step.ours import configuration, fill
from benchmarks.step.weights import global_batch
from megatron_merak.parallel.launch import launch
from megatron_merak.parallel.memory import keep_freed_memory
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.precision import choose_fp32_matmul
from megatron_merak.parallel.shared_memory import SharedMemoryGroup
from megatron_merak.planner import plan
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.training.gpt_blueprint import by_formulas
from megatron_merak.training.trainer import Trainer

BACKENDS = ("gloo", "merak_shm")
TP, PP, DP = LAYOUTS[TENSOR]


@dataclass(frozen=True)
class Bench:
    """``sizes`` in KiB; ``rounds`` of ``calls`` all-reduces of each; ``steps`` measured after
    ``warmup`` others.
    """

    sizes: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096, 16384)
    rounds: int = 10
    calls: int = 30
    warmup: int = 2
    steps: int = 8
    seed: int = 1234

    def calls_of(self, size: int) -> int:
        """Fewer of the long ones."""
        return max(3, min(self.calls, self.calls * 1024 // size))


SHORT = Bench(sizes=(4, 1024), rounds=2, calls=3, warmup=1, steps=2)

Times = dict[str, list[float]]  # backend -> seconds of each call or step


def all_reduces(groups: dict[str, dist.ProcessGroup], bench: Bench) -> dict[int, Times]:
    """Seconds of every call; ranks are in step, since each call waits for the other rank."""
    found = {}
    for size in bench.sizes:
        tensor, times = torch.zeros(size * 256), {name: [] for name in groups}
        for _ in range(bench.rounds):
            for name, group in groups.items():
                dist.all_reduce(tensor, group=group)
                for _ in range(bench.calls_of(size)):
                    start = time.perf_counter()
                    dist.all_reduce(tensor, group=group)
                    times[name].append(time.perf_counter() - start)
        found[size] = times
    return found


def training_steps(
    rank: int, shape: ModelShape, bench: Bench
) -> tuple[Times, dict[str, list[float]]]:
    """Seconds of every step, and the losses."""
    config = configuration(shape, TP, PP, DP, bf16=False, seed=bench.seed)
    made = plan(config, TP)
    device = torch.device("cpu")
    traced = traced_gpt(config)
    trainers = {}
    for name in BACKENDS:
        mesh = build_mesh(made.grid, rank, device, collectives=name)
        blueprint = by_formulas(traced, config, made)
        trainers[name] = Trainer(config, GPTModel(blueprint, config, mesh))
        fill(trainers[name], bench.seed)
    mask = torch.ones(shape.micro_batch, shape.sequence)
    positions = torch.arange(shape.sequence).expand(shape.micro_batch, -1)
    times, losses = {name: [] for name in BACKENDS}, {name: [] for name in BACKENDS}
    for index in range(bench.warmup + bench.steps):
        rows = global_batch(shape, bench.seed, index).split(shape.micro_batch)
        batches = [
            {
                "tokens": row[:, :-1],
                "labels": row[:, 1:],
                "loss_mask": mask,
                "position_ids": positions,
            }
            for row in rows
        ]
        for name in BACKENDS if index % 2 else reversed(BACKENDS):
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(trainers[name].step(batches).loss)
            times[name].append(time.perf_counter() - start)
    return {name: seconds[bench.warmup :] for name, seconds in times.items()}, losses


def measure(rank: int, world_size: int, shape: ModelShape, bench: Bench) -> dict:
    """Everything, on one rank of a gloo job that knows the backend merak_shm."""
    groups = {name: dist.new_group(list(range(world_size)), backend=name) for name in BACKENDS}
    shared = type(groups["merak_shm"]) is SharedMemoryGroup
    reduces = all_reduces(groups, bench)
    times, losses = training_steps(rank, shape, bench)
    return {"shared": shared, "all_reduce": reduces, "step": times, "losses": losses}


def row(what: str, times: Times) -> str:
    gloos, ours = (times[name] for name in BACKENDS)
    cells = [f"{1e6 * function(one):12.0f}" for one in (gloos, ours) for function in (min, median)]
    ratios = [f"{function(gloos) / function(ours):9.2f}" for function in (min, median)]
    return f"{what:<22}" + "".join(cells + ratios)


def table(result: dict) -> str:
    head = f"{'microseconds':<22}" + "".join(
        f"{title:>12}" for title in ("gloo min", "gloo median", "shm min", "shm median")
    )
    lines = [head + f"{'ratio':>9}{'median':>9}"]
    lines += [row(f"all-reduce {size} KiB", times) for size, times in result["all_reduce"].items()]
    return "\n".join([*lines, row("training step, TP 2", result["step"])])


def run_rank(result: Path, quick: bool) -> None:
    rank = int(os.environ["RANK"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    world = launch("merak_shm")
    choose_fp32_matmul(world.device)
    keep_freed_memory()
    shape, bench = (QUICK, SHORT) if quick else (ModelShape(), Bench())
    found = measure(world.rank, world.size, shape, bench)
    if world.rank == 0:
        result.write_text(json.dumps({**found, "shape": asdict(shape)}))
    dist.barrier()
    os._exit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model, few repeats: a smoke test"
    )
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank_result is not None:
        run_rank(options.rank_result, options.quick)
    with tempfile.TemporaryDirectory(prefix="merak_bench_") as scratch:
        result = Path(scratch, "result.json")
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "shared_memory",
            "--rank-result",
            str(result),
        ]
        command += ["--quick"] if options.quick else []
        if not run_together(command, TP, 900):
            return 1
        found = json.loads(result.read_text())
    print(table(found))
    if not found["shared"]:
        print("The ranks do not share memory: both columns are gloo.")
    gloos, ours = (found["losses"][name] for name in BACKENDS)
    print(
        "Losses are equal to the bit." if gloos == ours else f"Losses differ: {gloos} and {ours}."
    )
    return int(gloos != ours or not found["shared"])
