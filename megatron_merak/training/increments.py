"""Increments of a pretraining job, written while it trains on (--save-increment-interval).

    increments.begin(base)     the checkpoint that the steps follow is complete
    increments.wait()          before each update: the gradient of the step before is written
    (the update)               the gradient is copied, while it is final and before it is used
    increments.put(record)     a thread writes it; behind every interval-th step it completes a directory
    increments.flush()         all steps are durable: before a checkpoint, and at the end

One step at a time is copied and written, whatever the interval, so that the host has memory of one
gradient. A run that ends by an error leaves out the steps since the last complete directory.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoint.behind import Behind
from ..checkpoint.full_disk import Saving
from ..checkpoint.increment_writer import IncrementWriter
from ..checkpoint.increments import StepRecord
from ..checkpoint.shard import Shard
from ..counting import counted
from ..errors import CheckpointError
from ..optimizer.base import LocalOptimizer, Rates
from ..stages.own_gradient import OwnGradient, running_copies
from ..stages.trained_model import TrainedModel


class IncrementsBehind:
    """Writes the steps of a run behind training. Collective.

    model:     whose optimizer consumes the gradients; the only one that sets ``before_update``.
    interval:  steps that become durable together.
    policy:    see `Saving`.
    received:  see `Saving`.
    run:       the name of the run, equal on every rank.

    ``behind`` is the context in which they are written; ``behind.lines`` is what the thread says.
    """

    def __init__(
        self,
        model: TrainedModel,
        interval: int,
        policy: str,
        received: Callable[[], int],
        run: str,
    ):
        mesh = model.mesh
        assert isinstance(model.optimizer, LocalOptimizer), "only its own ranks update the model"
        self.run = run
        self._model = model
        self._interval = interval
        self._optimizer = model.optimizer
        self._gradient = OwnGradient(model)
        self._group = mesh.group_of_thread()
        self.behind = Behind(self._give_up)
        self._saving = Saving(policy, self._group, self.behind.lines.put, received)
        self._writer: IncrementWriter | None = None
        self._is_lost = False  # the directory was removed: until the next checkpoint
        self._taken: tuple[float, float, Rates] | None = None
        self._records: list[StepRecord] = []  # of steps that are not sealed
        self._meta: dict[str, Any] = {}
        self._waited = 0.0  # seconds, since the last flush
        self._steps = 0
        self._bytes = 0
        model.optimizer.before_update = self._take

    def begin(self, root: str, base: tuple[int, str], meta: dict[str, Any]) -> None:
        """Write the steps from now on.

        root: where the checkpoints are.
        base: iteration and save_id of the checkpoint of this state.
        meta: what checkpoints say of the run.
        """
        layout = self._gradient.layout
        self._meta = meta
        self._writer = IncrementWriter(Path(root), self.run, base, layout, self._group)

    def wait(self) -> None:
        """Wait until the gradient before is written.

        Raises on every rank CheckpointError where that failed, and Interrupted for a signal while it
        waited for space.
        """
        began = time.perf_counter()
        self.behind.finish()
        self._waited += time.perf_counter() - began

    def put(self, record: StepRecord) -> None:
        """Begin to write the step that was just done.

        record: with ``square``, ``scaled`` and ``rates`` of `taken`.
        """
        if self._writer is None or self._is_lost:
            return
        self._records.append(record)
        self._steps += 1
        self._bytes += 0 if record.square is None else self._gradient.bytes
        records = [*self._records] if len(self._records) == self._interval else None
        if records is not None:
            self._records.clear()
        running = running_copies(self._model)
        self.behind.start(partial(self._write, self._writer, record, records, running))

    def taken(self) -> tuple[float | None, float, Rates]:
        """Return the squared norm, the scale and the rates of the last update; None for a norm that
        is not finite.
        """
        assert self._taken is not None, "before_update was not called"
        square, scaled, rates = self._taken
        return square if abs(square) < float("inf") else None, scaled, rates

    def flush(self) -> None:
        """Wait until all steps so far are durable. Raises as `wait`."""
        began = time.perf_counter()
        self.behind.finish()
        if self._records and self._writer is not None:
            records = [*self._records]
            self._records.clear()
            self.behind.start(partial(self._seal, self._writer, records))
            self.behind.finish()
        self._waited += time.perf_counter() - began
        if self._steps:
            told = f"{counted(self._steps, 'step')}, {counted(self._bytes, 'byte')} of a rank"
            self.behind.lines.put(
                f"saved increments of {told}, for which training waited {self._waited:.2f} s"
            )
        self._steps = 0
        self._bytes = 0
        self._waited = 0.0

    def follow_checkpoint(self) -> None:
        """Write the steps behind a checkpoint, also where the directory had been removed."""
        self._is_lost = False
        self._records.clear()

    def _take(self, square: float, rates: Rates) -> None:
        """Copy the gradient that the optimizer is about to consume."""
        began = time.perf_counter()
        self._taken = (square, self._optimizer.scaled, rates)
        if self._writer is not None and not self._is_lost and self.taken()[0] is not None:
            self._gradient.copy()
        self._waited += time.perf_counter() - began

    def _write(
        self,
        writer: IncrementWriter,
        record: StepRecord,
        records: list[StepRecord] | None,
        running: list[Shard],
    ) -> Path:
        """Write a step; complete the directory of ``records``. Called in the thread.

        running: what forwards have changed.
        """
        if self._is_lost:
            return writer.root
        self._gradient.wait()
        shards = running + ([] if record.square is None else self._gradient.shards)
        self._run(writer, partial(writer.write_step, record.iteration, shards))
        if records is not None and not self._is_lost:
            return self._seal(writer, records)
        return writer.root

    def _seal(self, writer: IncrementWriter, records: list[StepRecord]) -> Path:
        if not self._is_lost:
            self._run(writer, partial(writer.seal, records, self._meta))
        return writer.root

    def _run(self, writer: IncrementWriter, write: Callable[[], object]) -> None:
        """Write; leave out increments until the next checkpoint if the directory was removed."""
        try:
            self._saving.run(writer.root, write)
        except CheckpointError:
            if not writer.is_gone():
                raise
            self._is_lost = True
            writer.forget()
            self.behind.lines.put(
                f"{writer.root} was removed under the run: there are no increments until the next "
                "checkpoint"
            )

    def _give_up(self) -> None:
        self._saving.patience = 0.0
