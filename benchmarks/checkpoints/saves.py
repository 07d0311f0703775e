"""Saving and loading a training state, beside torch.distributed.checkpoint and transformers' way, on two ranks.

    python -m benchmarks saves --json result.json      # 15 minutes and 10 GB of disk
    python -m benchmarks saves --quick                 # a small state, once: does it all still run?
    python -m benchmarks saves --from result.json      # no run: the tables of an earlier one

Every rank has half of the weights and moments of a GPT, as sharded state has them. All save it in turns, in the same
processes, into a directory of --directory, and read it back; what they read is compared with what they wrote. Training
waits for a save until it returns, or until what is saved was copied where the rest is done behind it.

Then merak-pretrain trains with checkpoints on the way, with and without --async-save: how long training waits for one,
and how much slower it is while one is written.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Placed

from benchmarks import ROOT
from benchmarks.runs import add_from, circumstances, heading, parsed, show
from benchmarks.step.launcher import run_together
from megatron_merak.checkpoint import store
from megatron_merak.checkpoint.behind import Behind, Staging
from megatron_merak.checkpoint.save import check_finite, write
from megatron_merak.checkpoint.shard import Shard, StateKind
from megatron_merak.parallel.memory import keep_freed_memory

RANKS = 2
KINDS = ("model", "exp_avg", "exp_avg_sq")
WIDTH = 768
QUICK_WIDTH = 64
LAYERS = 12
VOCABULARY = 50304
BEGIN = "<!-- written by: python -m benchmarks saves -->"
END = "<!-- end of saves -->"

PLAIN = "a plain file of each rank, synced"
HERE = "here"
BEHIND = "here, `--async-save`"
DCP = "torch.distributed.checkpoint"
DCP_ASYNC = "torch.distributed.checkpoint, `async_save`"
ONE = "safetensors and `torch.save`, first rank, not synced"
WAYS = (PLAIN, HERE, BEHIND, DCP, DCP_ASYNC, ONE)

RUN = """--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --micro-batch-size 2
    --global-batch-size 16 --vocab-size 8192 --mock-data --lr 1e-3 --train-iters {steps} --eval-iters 0
    --log-interval 1000"""
RUNS = {"waiting": "", "`--async-save`": "--async-save"}
AFTER = 3  # steps behind a checkpoint that may be slower
SAVED = re.compile(r"saved .* in ([0-9.]+) s(?: beside training, which waited ([0-9.]+) s)?$")

State = dict[str, dict[str, torch.Tensor]]


def shapes(width: int) -> dict[str, tuple[int, int]]:
    """The matrices of a GPT-2."""
    found = {"wte": (VOCABULARY if width == WIDTH else 512, width)}
    for layer in range(LAYERS):
        found[f"h.{layer}.attn.c_attn"] = (3 * width, width)
        found[f"h.{layer}.attn.c_proj"] = (width, width)
        found[f"h.{layer}.mlp.c_fc"] = (4 * width, width)
        found[f"h.{layer}.mlp.c_proj"] = (width, 4 * width)
    return found


class Bench:
    """What one rank saves and loads, in the directory ``root``."""

    def __init__(self, root: Path, width: int):
        self.root = root
        self.rank = dist.get_rank()
        self.mesh: DeviceMesh = init_device_mesh("cpu", (RANKS,))
        self.own = dist.new_group(backend="gloo")
        self.shapes = shapes(width)
        generator = torch.Generator().manual_seed(self.rank)
        self.state = self.filled(partial(torch.rand, generator=generator))
        self.bytes = 0
        for tensors in self.state.values():
            self.bytes += RANKS * sum(tensor.nbytes for tensor in tensors.values())
        self.staging = Staging(torch.device("cpu"))
        self.behind = Behind()
        self.future: Any = None

    def filled(self, fill: Callable[[int, int], torch.Tensor]) -> State:
        """This rank's half of everything."""
        state: State = {}
        for kind in KINDS:
            state[kind] = {}
            for name, (rows, columns) in self.shapes.items():
                state[kind][name] = fill(rows // RANKS, columns)
        return state

    def kinds(self, state: State) -> dict[str, StateKind]:
        found = {}
        for kind, tensors in state.items():
            parts = []
            for name, tensor in tensors.items():
                rows = tensor.shape[0]
                interval = (self.rank * rows, (self.rank + 1) * rows)
                parts.append(Shard(name, self.shapes[name], 0, (interval,), tensor))
            found[kind] = StateKind.of(parts)
        return found

    def sharded(self, state: State) -> dict[str, DTensor]:
        return {
            f"{kind}.{name}": DTensor.from_local(tensor, self.mesh, [Placed(0)], run_check=False)
            for kind, tensors in state.items()
            for name, tensor in tensors.items()
        }

    def begin(self, way: str, place: Path) -> None:
        """Save; behind, where the way is to do so."""
        if way == PLAIN:
            place.mkdir(exist_ok=True)
            with open(place / f"rank-{self.rank}", "wb") as file:
                for tensors in self.state.values():
                    for tensor in tensors.values():
                        file.write(tensor.numpy().data)
                file.flush()
                os.fsync(file.fileno())
        elif way == HERE:
            store.save(place, 1, self.kinds(self.state), {}, group=dist.group.WORLD, device="cpu")
        elif way == BEHIND:
            kinds = self.kinds(self.state)
            check_finite(kinds, dist.group.WORLD, "cpu")
            staged = self.staging.copies(kinds, dist.group.WORLD, "cpu")
            self.behind.start(partial(write, place, 1, staged, {}, group=self.own, device="cpu"))
        elif way == DCP:
            dcp.save(self.sharded(self.state), checkpoint_id=place)
        elif way == DCP_ASYNC:
            self.future = dcp.async_save(
                self.sharded(self.state), checkpoint_id=place, process_group=self.own
            )
        else:
            self.one(place)

    def one(self, place: Path) -> None:
        """What a trainer does whose first rank has everything: gather, and write."""
        gathered: State = {kind: {} for kind in KINDS}
        for kind, tensors in self.state.items():
            for name, tensor in tensors.items():
                parts = [torch.empty_like(tensor) for _ in range(RANKS)] if self.rank == 0 else None
                dist.gather(tensor, parts)
                if parts is not None:
                    gathered[kind][name] = torch.cat(parts)
        if self.rank == 0:
            place.mkdir(exist_ok=True)
            save_file(gathered["model"], place / "model.safetensors")
            torch.save({kind: gathered[kind] for kind in KINDS[1:]}, place / "optimizer.pt")
        dist.barrier()

    def end(self, way: str) -> None:
        """Wait for what is done behind."""
        if way == BEHIND:
            self.behind.finish()
        elif way == DCP_ASYNC:
            self.future.result()
        dist.barrier()

    def load(self, way: str, place: Path) -> State | None:
        """Return what was read; None where the way is not to be read back."""
        found = self.filled(torch.zeros)
        if way in (HERE, BEHIND):
            store.load(place, self.kinds(found), dist.group.WORLD, "cpu")
        elif way in (DCP, DCP_ASYNC):
            dcp.load(self.sharded(found), checkpoint_id=place)
        else:
            return None
        return found

    def turn(self, way: str) -> dict[str, float]:
        """Save and load once: seconds until training goes on, until all is on disk, of the load."""
        place = self.root / str(WAYS.index(way))
        if self.rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            os.sync()
        dist.barrier()
        start = time.perf_counter()
        self.begin(way, place)
        waited = time.perf_counter() - start
        self.end(way)
        whole = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        found = self.load(way, place)
        dist.barrier()
        loaded = time.perf_counter() - start
        if found is None:
            return {"waits": waited, "whole": whole}
        for kind, tensors in found.items():
            assert all(self.state[kind][name].equal(each) for name, each in tensors.items()), way
        return {"waits": waited, "whole": whole, "load": loaded}


def run_rank(result: Path, root: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    bench = Bench(root, QUICK_WIDTH if options.quick else WIDTH)
    ways: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(1 if options.quick else options.repeats + 1):
        for way in WAYS:
            ways[way].append(bench.turn(way))
    if not options.quick:
        ways = {way: turns[1:] for way, turns in ways.items()}  # the first ones allocate
    if bench.rank == 0:
        result.write_text(json.dumps({"bytes": bench.bytes, "ways": ways}))
    dist.barrier()
    dist.destroy_process_group()


def stores(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The measurements of all ways to save."""
    result = root / "result.json"
    command = [sys.executable, "-m", "benchmarks", "saves", "--rank-result", str(result)]
    command += ["--directory", str(root), "--repeats", str(options.repeats)]
    command += ["--quick"] if options.quick else []
    if not run_together(command, RANKS, 1800):
        raise SystemExit(1)
    return json.loads(result.read_text())


def runs(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What each checkpoint but the last of runs of merak-pretrain cost: seconds that training
    waited, and by which the steps behind it were slower.
    """
    steps = 4 if options.quick else 40
    every = 2 if options.quick else 10
    found: dict[str, Any] = {name: {"waits": [], "slower": [], "steps": []} for name in RUNS}
    for _ in range(1 if options.quick else options.repeats):
        for name, flags in RUNS.items():
            waits, seconds = run(root / name.strip("`-"), steps, every, flags)
            usual = median(seconds)
            found[name]["steps"].append(usual)
            found[name]["waits"] += waits[:-1]
            for number in range(every, steps, every):
                behind = seconds[number : number + AFTER]
                found[name]["slower"].append(sum(behind) - usual * len(behind))
    return {"every": every, "of": found}


def run(place: Path, steps: int, every: int, flags: str) -> tuple[list[float], list[float]]:
    """Train; return the seconds that each checkpoint was waited for, and those of every step."""
    shutil.rmtree(place, ignore_errors=True)
    metrics = place.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    given = [*RUN.format(steps=steps).split(), *flags.split(), "--save", str(place)]
    given += ["--save-interval", str(every), "--metrics", str(metrics)]
    os.sync()
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *given],
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    saved = [match for line in done.stdout.splitlines() if (match := SAVED.fullmatch(line))]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if row["kind"] == "train"]
    return [float(match[2] or match[1]) for match in saved], seconds


def _cell(values: list[float], bytes_: int) -> str:
    rates = sorted(bytes_ / 2**30 / value for value in values)
    return f"{median(rates):.2f} ({rates[0]:.2f}-{rates[-1]:.2f})"


def table(found: dict[str, Any]) -> str:
    """A row per way: GiB/s until training goes on, until all is on disk, and of the load."""
    size = found["stores"]["bytes"]
    lines = [
        f"State of {size / 2**30:.2f} GiB on two ranks, GiB/s:",
        "",
        "| saved by | until training goes on | until all is written | read back |",
        "|---|--:|--:|--:|",
    ]
    for way, turns in found["stores"]["ways"].items():
        waits = _cell([turn["waits"] for turn in turns], size)
        whole = _cell([turn["whole"] for turn in turns], size)
        loads = [turn["load"] for turn in turns if "load" in turn]
        lines.append(f"| {way} | {waits} | {whole} | {_cell(loads, size) if loads else ''} |")
    told = found["runs"]
    lines += [
        "",
        f"merak-pretrain on one rank, a checkpoint in {told['every']} steps, seconds:",
        "",
        "| save | a step | training waits | steps behind it are slower by | of the steps |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, each in told["of"].items():
        step = median(each["steps"])
        cost = median(each["waits"]) + median(each["slower"])
        cells = [seconds(each[key]) for key in ("steps", "waits", "slower")]
        lines.append(f"| {name} | {' | '.join(cells)} | {cost / told['every'] / step:.1%} |")
    return "\n".join(lines)


def seconds(values: list[float], digits: int = 2) -> str:
    """Return the median, and the range in brackets."""
    middle = f"{median(values):.{digits}f}"
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def page(path: Path) -> str:
    """The tables of a file that a run wrote."""
    saved = json.loads(path.read_text())
    return f"{heading(saved, saved['repeats'], 'all')}\n\n{table(saved)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="of the disk to measure [a temporary one]")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument("--quick", action="store_true", help="a small state, once: a smoke test")
    parser.add_argument("--rank-result", type=Path, help=argparse.SUPPRESS)
    add_from(parser)
    options = parsed(parser, argv)
    if options.saved:
        return show(page(options.saved), options.into, BEGIN, END)
    if options.rank_result is not None:
        run_rank(options.rank_result, options.directory, options)
        return 0
    with tempfile.TemporaryDirectory(prefix="merak_bench_", dir=options.directory) as scratch:
        found = {
            "stores": stores(Path(scratch), options),
            "runs": runs(Path(scratch), options),
            "repeats": 1 if options.quick else options.repeats,
        } | circumstances()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0
