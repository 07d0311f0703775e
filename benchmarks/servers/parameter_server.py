"""Data-parallel training with and without parameter servers on a modelled cluster: time per step, staleness, loss.

    python -m benchmarks servers --workers 4 --servers 1 --slow 1:2.0
    python -m benchmarks servers --into docs/evidence/servers.md    # its tables and pictures, 3 minutes

Times are modelled (modelled.py): every worker, and every server that only serves, is a node of the cluster, and
the model that they train is GPT-2 unless --model-elements and --compute say otherwise. Losses are real: a small GPT of
bytes is trained in this one process, gradient by gradient in the order of modelled time, and the servers' own code
applies them (learner.py). all-reduce has the losses of ps-sync, whose sums are the same, at its own times.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from benchmarks.servers import pictures
from benchmarks.servers.byte_model import SEQUENCE, Bytes
from benchmarks.servers.learner import Curve, Settings, learn
from benchmarks.servers.modelled import STRATEGIES, Setup, Trace, follow
from benchmarks.two_lines_page import PageError, write
from megatron_merak.cluster import GIB, Cluster, find_cluster
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import MerakError
from megatron_merak.plan import held_parameters
from megatron_merak.planner import plan
from megatron_merak.planner.predict import timeline

GPT2 = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50257
)
BATCH = 64  # sequences of a worker's part of a batch: GPT-2's 512 on eight workers
WORKERS, SERVERS = (2, 4, 8, 16), (0, 1, 2, 4, 8)
SLOW = {1: 2.0}
# of the byte model: parts of a batch are so many samples
STEPS = 200
SAMPLES = 8
RATE = 3e-3
WARMUP = 20
TIMED = 10  # steps that are traced for a time alone
BEGIN, END = "<!-- written by: python -m benchmarks servers -->", "<!-- end of servers -->"


@cache
def planned(cluster: Cluster) -> tuple[int, float]:
    """GPT-2's elements, and the seconds that a rank of the cluster computes for BATCH sequences."""
    train = TrainConfig(micro_batch_size=4, global_batch_size=BATCH, bf16=True)
    found = plan(Config(model=GPT2, parallel=ParallelConfig(), train=train), 1, cluster)
    return held_parameters(found.units), timeline(found).makespan


def setup(cluster: str, workers: int, servers: int, slow: dict[int, float]) -> Setup:
    """Workers that train GPT-2. slow: how much longer some of them take."""
    found = find_cluster(cluster)
    factors = tuple(slow.get(worker, 1.0) for worker in range(workers))
    return Setup(workers, servers, found, *planned(found), slow=factors)


def opening(one: Setup) -> str:
    return (
        f"{one.elements / 1e6:,.0f} million parameters in {one.dtype}, {one.compute:.2f} s of computing per step on "
        f"{one.cluster.device.name}; a node sends and receives {one.link.bandwidth / 1e9:g} GB/s ({one.link.name}), a "
        f"server updates with one core ({one.server_bandwidth / 1e9:g} GB/s)."
    )


def times(cluster: str = "rtx3090") -> dict[tuple[int, int], list[Trace]]:
    """(workers, servers) -> a trace of each of STRATEGIES, all workers being equal."""
    return {
        (workers, servers): [
            follow(setup(cluster, workers, servers, {}), name, TIMED) for name in STRATEGIES
        ]
        for workers in WORKERS
        for servers in SERVERS
    }


def times_table(found: dict[tuple[int, int], list[Trace]]) -> str:
    lines = [
        "| workers | servers | all-reduce, s per step | ps-sync | ps-async | a worker sends, receives "
        "| a server receives, sends |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (workers, servers), traces in found.items():
        node = traces[1].setup.role.endpoints[-1]
        moved = [
            traces[1].sent[0],
            traces[1].received[0],
            traces[1].received[node],
            traces[1].sent[node],
        ]
        if not servers:  # a node is both
            own = traces[1].setup.pushed, traces[1].setup.pulled
            moved = [each * (workers - 1) for each in (*own, *own)]
        gib = [f"{size / GIB:.2f}" for size in moved]
        cells = [f"{trace.step:.2f}" for trace in traces]
        lines.append(
            f"| {workers} | {servers or 'co-located'} | {' | '.join(cells)} | {gib[0]}, {gib[1]} GiB "
            f"| {gib[2]}, {gib[3]} GiB |"
        )
    return "\n".join(lines)


def curves(one: Setup, problem: Bytes, steps: int) -> dict[str, Curve]:
    """The loss under each strategy over modelled time."""
    found, every = {}, max(1, steps // 40)
    for name in STRATEGIES[1:]:
        settings = Settings(one.workers, name == "ps-sync", 4 * one.workers)
        trace = follow(one, name, steps)
        found[name] = learn(
            trace, problem, settings, lambda step: RATE * min(1.0, (step + 1) / WARMUP), every
        )
    trace = follow(one, "allreduce", steps)
    seconds = [0.0, *(event.seconds for event in trace.events[every - 1 :: every])]
    return {"allreduce": replace(found["ps-sync"], trace=trace, seconds=seconds)} | found


def goal(found: Sequence[dict[str, Curve]]) -> float:
    """A loss that all curves reach, in tenths."""
    return max(-(-min(curve.losses) * 10 // 1) / 10 for some in found for curve in some.values())


def curves_table(found: dict[str, dict[str, Curve]]) -> str:
    aim = goal([*found.values()])
    lines = [
        "| workers | strategy | s per batch | steps/s of each worker | staleness of each one's gradients, mean (most) "
        f"| dropped | s until a loss of {aim:.1f} | last loss |",
        "|---|---|--:|---|---|--:|--:|--:|",
    ]
    for who, some in found.items():
        for name, curve in some.items():
            trace = curve.trace
            rates = ", ".join(f"{trace.rate(worker):.2f}" for worker in range(trace.setup.workers))
            ages = ", ".join(map(_age, curve.staleness)) if name == "ps-async" else "0"
            lines.append(
                f"| {who} | {name} | {trace.step:.2f} | {rates} | {ages} | {sum(curve.dropped)} "
                f"| {curve.reached(aim):.0f} | {curve.losses[-1]:.2f} |"
            )
    return "\n".join(lines)


def _age(staleness: Counter[int]) -> str:
    return (
        f"{sum(age * n for age, n in staleness.items()) / staleness.total():.1f} ({max(staleness)})"
    )


def page(cluster: str, into: Path, steps: int) -> None:
    """Write the tables into a page, and its pictures beside it."""
    problem = Bytes(SAMPLES)
    servers = 2
    workers = 4
    timed = times(cluster)
    cases = {"equal": {}, "one twice as slow": SLOW}
    found = {
        who: curves(setup(cluster, workers, servers, slow), problem, steps)
        for who, slow in cases.items()
    }
    pictures.losses(found, into.with_name("servers_loss.png"))
    pictures.staleness_and_times(found, timed, into.with_name("servers_times.png"))
    learned = (
        f"{workers} workers and {servers} servers; the losses, in nats per byte, are those of a GPT of "
        f"{problem.weights.numel():,} parameters after {steps} steps of {workers} x {SAMPLES} x {SEQUENCE} bytes of "
        f"Python {sys.version.split()[0]}'s standard library (torch {torch.__version__}), at a learning rate of {RATE}."
    )
    text = [opening(setup(cluster, 1, 1, {})), times_table(timed), learned, curves_table(found)]
    text += ["![loss over modelled time](servers_loss.png)"]
    text += ["![staleness, and time of a step](servers_times.png)"]
    write(into, "\n\n".join(text), BEGIN, END)


def factors(text: str) -> dict[int, float]:
    """'1:2.0,3:1.5': workers 1 and 3 take so many times as long."""
    found = {
        int(worker): float(factor)
        for worker, factor in (part.split(":") for part in text.split(","))
    }
    if min(found) < 0 or min(found.values()) <= 0:
        raise ValueError(text)
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--servers",
        type=int,
        default=1,
        help="nodes that only serve; 0: workers' nodes serve as well",
    )
    parser.add_argument(
        "--cluster", default="rtx3090", help="its device and its link between nodes (rtx3090)"
    )
    parser.add_argument(
        "--slow", type=factors, default={}, metavar="WORKER:FACTOR,...", help="who computes longer"
    )
    parser.add_argument(
        "--model-elements", type=int, help="of the model whose steps are timed (GPT-2's)"
    )
    parser.add_argument(
        "--compute",
        type=float,
        help="seconds that a worker computes for a step (planned for GPT-2)",
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of all workers ({STEPS})")
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write all tables, and pictures beside that page"
    )
    given = parser.parse_args(argv)
    if given.workers < 1 or given.servers < 0 or given.steps < 2:
        parser.error("give at least one worker, no negative number of servers, and two steps")
    if any(value is not None and value <= 0 for value in (given.model_elements, given.compute)):
        parser.error("--model-elements and --compute are above 0")
    if any(worker >= given.workers for worker in given.slow):
        parser.error(f"--slow names a worker that is not among 0 to {given.workers - 1}")
    return given


def main(argv: list[str] | None = None) -> int:
    """2 for a page without marks, or an unknown cluster."""
    given = parse(argv)
    try:
        if given.into:
            page(given.cluster, given.into, given.steps)
            return 0
        one = setup(given.cluster, given.workers, given.servers, given.slow)
        own = {"elements": given.model_elements, "compute": given.compute}
        one = replace(one, **{name: value for name, value in own.items() if value is not None})
        print(opening(one), "\n")
        who = (
            ", ".join(f"{worker} takes {factor:g} x" for worker, factor in given.slow.items())
            or "equal"
        )
        print(curves_table({who: curves(one, Bytes(SAMPLES), given.steps)}))
    except (PageError, MerakError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
