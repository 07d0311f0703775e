"""What one rank does: runs a cell on the modelled clock, or ours and torch's in turn on the
machine's.
"""

import gc
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.schedules.cells import Cell
from benchmarks.schedules.timed_peer import PeerPipeline
from benchmarks.schedules.timed_stages import Pipeline, microbatches
from megatron_merak.cluster import DEVICES, Cluster, Link
from megatron_merak.parallel.clock import Clock, LogicalClock, WallClock
from megatron_merak.parallel.emulated import register
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid

FREE = Link("free", 0.0, math.inf)
HEAD_START = 0.1  # seconds from the agreement on a start to the start
CPU = torch.device("cpu")


@dataclass
class Timing:
    """One rank's part of the steps of a cell: by contestant, when each began and ended by the
    machine's clock; and the gradients of its stages.
    """

    steps: dict[str, list[tuple[float, float]]]
    gradients: dict[str, dict[int, list[float]]]


def emulate(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    """Modelled seconds of a step of each cell on this rank: real ranks, transfers and executor, and
    a logical clock.
    """
    clock = LogicalClock(
        Cluster(
            DEVICES["A100"], ranks_per_node=world_size, inside=FREE, between=FREE, name="free links"
        )
    )
    register(clock)
    mesh = _mesh(rank, world_size, dist.new_group(list(range(world_size)), backend="emu"), clock)
    seconds = []
    for cell in cells:
        pipeline = Pipeline(cell, cell.build(), mesh)
        pipeline.prepare()
        dist.barrier(group=mesh.pp)
        began = clock.now()
        pipeline.step(microbatches(cell.microbatches))
        seconds.append(clock.now() - began)
    return seconds


class SleepingClock(WallClock):
    """The machine's clock, whose kernels may be told to take no time."""

    def __init__(self):
        self.awake = False

    def kernel(self, seconds: float) -> None:
        if not self.awake:
            super().kernel(seconds)


def measure(rank: int, world_size: int, cell: Cell, repeats: int) -> Timing:
    """Steps of ours and of torch's in turn, after one of each, without kernels, that opens the
    connections.
    """
    clock = SleepingClock()
    mesh = _mesh(rank, world_size, dist.group.WORLD, clock)
    schedule, batches = cell.build(), microbatches(cell.microbatches)
    pipelines = {"ours": Pipeline(cell, schedule, mesh)}
    if cell.peer:
        mine = [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
        pipelines["torch"] = PeerPipeline(cell, schedule.stages, mine, batches, clock)
    timing = Timing({name: [] for name in pipelines}, {})
    for repeat in range(repeats + 1):
        clock.awake = repeat == 0
        for name, pipeline in pipelines.items():
            pipeline.prepare()
            began = _start_together()
            pipeline.step(batches)
            if repeat:
                timing.steps[name].append((began, time.perf_counter()))
    for name, pipeline in pipelines.items():
        timing.gradients[name] = {
            stage: grad.tolist() for stage, grad in pipeline.gradients().items()
        }
    return timing


def _mesh(rank: int, world_size: int, group: dist.ProcessGroup, clock: Clock) -> Mesh:
    return Mesh(Grid(pp=world_size), rank, CPU, pp=group, control=dist.group.WORLD, clock=clock)


def _start_together() -> float:
    """Return at a moment that all ranks agree on. The ranks share a machine, and so its monotonic
    clock.
    """
    gc.collect()
    dist.barrier()
    start = met = 0.0
    while met >= start - HEAD_START / 2:
        start = _agree(time.perf_counter() + HEAD_START, dist.ReduceOp.MIN)
        met = _agree(time.perf_counter(), dist.ReduceOp.MAX)
    time.sleep(max(0.0, start - time.perf_counter()))
    return start


def _agree(seconds: float, extreme: dist.ReduceOp) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, extreme)
    return found.item()
