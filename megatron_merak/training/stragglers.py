"""Ranks that compute more slowly than the others that do the same, for --log-straggler."""

import statistics
from dataclasses import dataclass

from ..config import LoggingConfig
from ..parallel.agree import gather_json
from ..parallel.mesh import Mesh
from ..plan import Grid


@dataclass(frozen=True)
class RankTime:
    """What a rank computed of a step, on average.

    rank:     of the job.
    seconds:  without waiting for other ranks.
    relative: that beside the median of the ranks of its stage.
    """

    rank: int
    seconds: float
    relative: float


class Stragglers:
    """Adds up what each rank computes, and compares at each log interval."""

    def __init__(self, config: LoggingConfig, mesh: Mesh):
        self._count = config.straggler_minmax_count
        self._mesh = mesh
        self._seconds = 0.0
        self._steps = 0
        mesh.pulse.timer = mesh.clock.now

    def add(self, seconds: float) -> None:
        """Note what this rank computed in a step."""
        self._seconds += seconds
        self._steps += 1

    def report(self, iteration: int) -> str:
        """Return a line on the steps since the last one. Collective."""
        own = self._seconds / max(self._steps, 1)
        self._seconds = 0.0
        self._steps = 0
        every = gather_json(own, self._mesh.control, "cpu")
        times = compared(every, self._mesh.grid)
        return straggler_line(iteration, times, self._mesh.grid, self._count)


def compared(seconds: list[float], grid: Grid) -> list[RankTime]:
    """Return the ranks of a grid, those first that are slowest beside others of their stage.

    seconds: of each rank.
    """
    stages: dict[int, list[float]] = {}
    for rank, each in enumerate(seconds):
        stages.setdefault(grid.coordinates(rank)[3], []).append(each)
    usual = {stage: statistics.median(values) for stage, values in stages.items()}
    times = []
    for rank, each in enumerate(seconds):
        median = usual[grid.coordinates(rank)[3]]
        times.append(RankTime(rank, each, each / median if median else 1.0))
    return sorted(times, key=lambda time: (-time.relative, time.rank))


def straggler_line(iteration: int, times: list[RankTime], grid: Grid, count: int) -> str:
    """Return a line on the slowest and the fastest ``count`` ranks."""
    median = statistics.median(time.seconds for time in times)
    slowest = ", ".join(_text(time, grid) for time in times[:count])
    fastest = ", ".join(_text(time, grid) for time in times[::-1][:count])
    return (
        f" computing at iteration {iteration} | median {median * 1e3:.1f} ms of a step | "
        f"slowest {slowest} | fastest {fastest} |"
    )


def _text(time: RankTime, grid: Grid) -> str:
    tp, cp, dp, pp = grid.coordinates(time.rank)
    places = (("tp", tp, grid.tp), ("cp", cp, grid.cp), ("dp", dp, grid.dp), ("pp", pp, grid.pp))
    named = " ".join(f"{name} {place}" for name, place, extent in places if extent > 1)
    where = f" ({named})" if named else ""
    return f"rank {time.rank}{where}: {time.seconds * 1e3:.1f} ms, {time.relative:.2f}x"
