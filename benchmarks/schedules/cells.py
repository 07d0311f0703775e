"""What `schedules.py` measures: a cell is a schedule with a number of ranks and of micro-batches.
Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType

from packaging.version import parse

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.pipeline_parallel.simulate import StageCosts, simulate

RANKS = (2, 4, 8, 16)
FACTORS = (1, 2, 4, 8)
TIMED_RANKS = (4, 8)

# The schedules of torch.distributed.pipelining that do the same; its InterleavedZeroBubble with one
# stage per rank is the ZB-H1 of the paper ("ZB1P" there).
PEERS: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "zb-v": "ScheduleZBVZeroBubble",
    }
)


@dataclass(frozen=True)
class Cell:
    """A schedule of a number of ranks and of micro-batches.

    ``forward``: seconds of one micro-batch on all stages of a rank. The backward takes twice that,
    half of it for the
    weight gradient, and a recomputation what the forward takes.
    """

    schedule: str
    ranks: int
    microbatches: int
    forward: float = 0.05

    def build(self) -> Schedule:
        """Raises ScheduleError outside of the domain of the schedule."""
        return build_schedule(self.schedule, self.ranks, self.microbatches)

    @property
    def outside(self) -> str:
        """Why there is no such schedule, empty if there is."""
        try:
            self.build()
        except ScheduleError as error:
            return error.reason
        return ""

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return BUILDERS[self.schedule].chunks

    @property
    def peer(self) -> str | None:
        """torch's schedule; in torch 2.11 that of a V sends from a rank to itself, which gloo
        cannot.
        """
        to_itself = self.schedule == "zb-v" and parse(version("torch")) < parse("2.13")
        return None if to_itself else PEERS.get(self.schedule)

    def stage_times(self) -> tuple[float, float, float]:
        """Seconds of a stage's forward, of its backward, and of the weight gradient in that."""
        forward = self.forward / self.chunks
        return forward, 2 * forward, forward

    def recomputing(self, stages: int) -> range:
        """The stages that recompute: all but the last, where the schedule is made for it."""
        return range(stages - 1 if BUILDERS[self.schedule].recomputes else 0)

    def simulated(self) -> float:
        """Seconds of a step, transfers taking none."""
        schedule = self.build()
        stages = range(schedule.stages)
        again = [
            self.stage_times()[0] * (stage in self.recomputing(schedule.stages)) for stage in stages
        ]
        compute = [(value,) * schedule.stages for value in self.stage_times()]
        free = (0.0,) * (schedule.stages - 1)
        return simulate(schedule, StageCosts(*compute, tuple(again), free, free)).makespan

    def formula(self) -> float | None:
        """Seconds of a step in closed form; None where none holds."""
        find = FORMULAS.get(self.schedule)
        units = find(self.ranks, self.microbatches) if find else None
        return None if units is None else units * self.forward

    @property
    def work(self) -> float:
        """Seconds of the forwards and backwards of a rank in a step."""
        return 3 * self.forward * self.microbatches


# Seconds of a step by (ranks, micro-batches) in forwards of a rank; see the builders for their
# general form.
FORMULAS: Mapping[str, Callable[[int, int], float | None]] = MappingProxyType(
    {
        "naive": lambda s, m: 3 * m * s,
        "gpipe": lambda s, m: 3 * (m + s - 1),
        "1f1b": lambda s, m: 3 * (m + s - 1),
        "interleaved": lambda s, m: 3 * (m + (s - 1) / 2) if m % s == 0 else None,
        "shifted": lambda s, m: 4 * m + 3 * s - 6 if m >= max(s, 4) else None,
        "early-recompute": lambda s, m: 4 * (m + s - 1) - (s + 1),
        "zb-h1": lambda s, m: 3 * m + s - 1 if m >= s else None,
        "zb-v": lambda s, m: 3 * m + (s - 1) / 2 if m >= 2 * s - 1 else None,
    }
)


def all_cells(
    ranks: tuple[int, ...] = RANKS, factors: tuple[int, ...] = FACTORS, forward: float = 0.05
) -> list[Cell]:
    """By ranks, then schedule, then micro-batches; those outside of a schedule's domain too."""
    return [
        Cell(name, s, factor * s, forward) for s in ranks for name in BUILDERS for factor in factors
    ]
