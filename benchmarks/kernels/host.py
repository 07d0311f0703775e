"""How much faster are the compiled host-side cores than their twins in Python and NumPy?

    python -m benchmarks host                      # two minutes
    python -m benchmarks host --scale 0.01         # seconds, as the tests run it

Least CPU seconds of all threads over a few runs, both ways in one process, results compared. Where
cores share the work there is a row of the least time on the wall, on all cores beside one thread.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from unittest import mock

import numpy as np

from megatron_merak import _native
from megatron_merak.data.blend import blending_indices, normalized
from megatron_merak.data.gpt_index import build_indices, sample_starts, shuffle
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.search.search import search
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate
from megatron_merak.planner.partition import partition


@dataclass(frozen=True)
class Row:
    """Seconds of one task, compiled and as its twin."""

    name: str
    compiled: float
    twin: float

    def __str__(self) -> str:
        return f"| {self.name} | {self.compiled:.3g} | {self.twin:.3g} | {self.twin / self.compiled:.1f} |"


def least(
    work: Callable[[], object], clock: Callable[[], float], runs: int
) -> tuple[float, object]:
    """The least seconds, and the result."""
    seconds, result = float("inf"), None
    for _ in range(runs):
        started = clock()
        result = work()
        seconds = min(seconds, clock() - started)
    return seconds, result


def compare(name: str, work: Callable[[], object], runs: int = 3) -> Row:
    """Raises AssertionError where the results differ."""
    compiled, ours = least(work, time.process_time, runs)
    with mock.patch.dict(os.environ, MERAK_EXT="0"):
        python, theirs = least(work, time.process_time, min(runs, 2))
    assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs, name
    return Row(name, compiled, python)


def shuffled(count: int) -> np.ndarray:
    items = np.arange(count, dtype=np.uint32)
    shuffle(items, np.random.RandomState(1))
    return items


def as_bytes(work: Callable[[], Sequence[np.ndarray]]) -> list[bytes]:
    return [array.tobytes() for array in work()]


def simulated(schedule: Schedule, costs: StageCosts) -> tuple:
    found = simulate(schedule, costs)
    return found.makespan, found.busy, found.peak_in_flight


def indices(scale: float) -> Iterator[Row]:
    draw = np.random.RandomState(0)
    documents, samples = int(1e6 * scale), int(1e7 * scale)
    lengths = draw.randint(1, 200, size=documents).astype(np.int32)  # a hundred tokens each
    order = draw.permutation(documents).astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    size = f"{documents:,} documents, {tokens:,} tokens"
    host, cores = _native.host(), len(os.sched_getaffinity(0))
    for length in (2048, 64):
        task = f"samples of {length} tokens, {size}"
        yield compare(task, partial(sample_starts, lengths, order, length))
        alone = partial(host.sample_starts, lengths, order, length, True)
        clocks = [least(partial(alone, threads), time.perf_counter, 7)[0] for threads in (cores, 1)]
        yield Row(f"the same, {cores} cores beside 1 thread, on the wall", *clocks)
    for count in (documents, samples):
        yield compare(f"shuffle of {count:,} items", partial(shuffled, count))
    whole = partial(build_indices, lengths, order, 3 * tokens // 2048, 2048, 1234)
    yield compare(f"all indices of 3 passes, {size}", partial(as_bytes, whole))


def blends(scale: float) -> Iterator[Row]:
    for datasets in (4, 32, 256):
        weights = normalized([1 + index % 7 for index in range(datasets)])
        steps = int(1e5 * scale)
        work = partial(as_bytes, partial(blending_indices, weights, steps))
        yield compare(f"blend of {datasets} data sets, {steps:,} steps", work)


def schedules(scale: float) -> Iterator[Row]:
    for stages, microbatches in ((16, 64), (64, 256), (128, 2048)):
        microbatches = max(4, int(microbatches * scale))
        schedule = build_schedule("1f1b", stages, microbatches)
        costs = StageCosts.uniform(stages, 1.0, 2.0, transfer=0.1, latency=0.01)
        name = f"simulate 1F1B, {stages} stages x {microbatches} micro-batches"
        yield compare(name, partial(simulated, schedule, costs), runs=2 if stages < 128 else 1)


def plans(scale: float) -> Iterator[Row]:
    draw = Random(0)
    for units, stages in ((130, 16), (1000, 64), (4000, 128)):
        units = max(stages, int(units * scale))
        costs = [1 + draw.random() * (index % 3) for index in range(units)]
        yield compare(
            f"partition of {units} units into {stages} stages",
            partial(partition, costs, stages),
            runs=2,
        )
    for stages, microbatches in ((8, 32), (16, 64)):
        forward = tuple(1 + draw.random() for _ in range(stages))
        links = ((0.1,) * (stages - 1),) * 2
        costs = StageCosts(forward, tuple(2 * value for value in forward), forward, forward, *links)
        budget = max(60, int(500 * scale))
        name = (
            f"search of a schedule, {stages} stages x {microbatches} micro-batches, {budget} timed"
        )
        yield compare(
            name,
            partial(search, costs, microbatches, split_weights=True, evaluations=budget),
            runs=1,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes [1]")
    options = parser.parse_args()
    if _native.host() is None:
        sys.exit(f"host: nothing to compare: {_native.host_problem()}. {_native.REMEDY}.")
    print("| task | compiled, s | twin, s | ratio |\n|---|---:|---:|---:|")
    for part in (indices, blends, schedules, plans):
        for row in part(options.scale):
            print(row, flush=True)
