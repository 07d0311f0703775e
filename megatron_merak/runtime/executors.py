"""Executors for steps with different numbers of micro-batches, over the same stages."""

from collections.abc import Mapping

from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Schedule
from ..pipeline_parallel.passes import add_communication, forward_only, resize
from .executor import Executor
from .stage import Stage


class Executors:
    """Creates an executor at the first step with a given number of micro-batches; all of them share
    their pipes.

    stages, mesh: see `Executor`.
    schedule:     compute ops, for the plan's number of micro-batches.
    """

    def __init__(self, stages: Mapping[int, Stage], schedule: Schedule, mesh: Mesh):
        self._stages = stages
        self._schedule = schedule
        self._mesh = mesh
        self._executors: dict[tuple[int, bool], Executor] = {}
        self.of(schedule.microbatches)  # all others use the pipes of this one

    def of(self, micro_batches: int, training: bool = True) -> Executor:
        """Return the executor of steps with that many micro-batches; of forwards only where not
        ``training``.
        """
        key = (micro_batches, training)
        if key not in self._executors:
            schedule = self._schedule if training else forward_only(self._schedule)
            schedule = add_communication(resize(schedule, micro_batches))
            pipes = next(iter(self._executors.values())).pipes if self._executors else None
            self._executors[key] = Executor(self._stages, schedule, self._mesh, pipes)
        return self._executors[key]
