"""Executors for steps with different numbers of micro-batches, over the same stages."""

from collections.abc import Mapping

from ..parallel.mesh import Mesh
from ..parallel.p2p import Pipes
from ..pipeline_parallel.ops import Schedule
from ..pipeline_parallel.passes import add_communication, forward_only, resize
from .executor import Executor
from .stage import Stage


class Executors:
    """Creates an executor at the first step with a given number of micro-batches; all of them share
    their pipes.

    stages, mesh: see `Executor`.
    schedule:     compute ops, for the plan's number of micro-batches.
    warm_up:      see `Executor`, of training steps with as many; others run op by op.
    message:      see `Pipes`.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        mesh: Mesh,
        warm_up: int | None = None,
        message: int = 0,
    ):
        self._stages = stages
        self._schedule = schedule
        self._mesh = mesh
        self._warm_up = warm_up
        self._pipes = Pipes(mesh, add_communication(schedule), message)
        self._executors: dict[tuple[int, bool], Executor] = {}
        self.of(schedule.microbatches)

    def of(self, micro_batches: int, training: bool = True) -> Executor:
        """Return the executor of steps with that many micro-batches; of forwards only where not
        ``training``.
        """
        key = (micro_batches, training)
        if key not in self._executors:
            schedule = self._schedule if training else forward_only(self._schedule)
            schedule = add_communication(resize(schedule, micro_batches))
            planned = training and micro_batches == self._schedule.microbatches
            self._executors[key] = Executor(
                self._stages,
                schedule,
                self._mesh,
                self._pipes,
                self._warm_up if planned else None,
            )
        return self._executors[key]
