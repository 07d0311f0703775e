"""The executors of steps that have different numbers of micro-batches, over one set of stages."""

from collections.abc import Mapping

from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Schedule
from ..pipeline_parallel.passes import add_communication, forward_only, resize
from .executor import Executor
from .stage import Stage


class Executors:
    """Makes an executor when steps of its number of micro-batches first come; all share their pipes.

    stages, mesh, per_token: see ``Executor``. schedule: compute ops of the plan's number of micro-batches.
    """

    def __init__(self, stages: Mapping[int, Stage], schedule: Schedule, mesh: Mesh, per_token: bool):
        self._stages, self._schedule, self._mesh, self._per_token = stages, schedule, mesh, per_token
        self._made: dict[tuple[int, bool], Executor] = {}
        self.of(schedule.microbatches)  # the first one's pipes serve all others

    def of(self, micro_batches: int, training: bool = True) -> Executor:
        """What runs steps of so many micro-batches; of their forwards alone where it is not ``training``."""
        key = (micro_batches, training)
        if key not in self._made:
            schedule = self._schedule if training else forward_only(self._schedule)
            schedule = add_communication(resize(schedule, micro_batches))
            pipes = next(iter(self._made.values())).pipes if self._made else None
            self._made[key] = Executor(self._stages, schedule, self._mesh, self._per_token, pipes)
        return self._made[key]
