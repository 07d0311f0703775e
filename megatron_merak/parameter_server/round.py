"""Steps that all workers take together: their gradients are added in the order of workers, and
applied once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .piece import ServedPiece, Update

AHEAD = 4  # gradients that a piece has memory for, beside their sum
Wait = Callable[[Callable[[], bool]], None]


@dataclass
class _Round:
    """The sum of one step.

    step:     of the newest contribution.
    reported: numbers that came with the gradients, by worker.
    square:   squared norm of the sum, once it is complete.
    """

    step: int = -1
    reported: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by worker
    square: float | None = None
    applied: bool = False


@dataclass(frozen=True)
class Sum:
    """The result of a round; empty if the worker's step was lost because the server restarted and
    others are past it.

    square:   squared norm of the sum of gradients.
    reported: numbers that came with them, by worker.
    """

    square: float = 0.0
    reported: tuple[tuple[int, tuple[float, ...]], ...] = ()


class Rounds:
    """The rounds of one piece. Safe to use from one thread per worker.

    changed: notified by whoever changes ``live``, the workers that the next round waits for; its
             lock protects the piece.
    done:    called with the lock held after each update.
    """

    def __init__(
        self,
        piece: ServedPiece,
        changed: threading.Condition,
        live: set[int],
        done: Callable[[], None],
    ):
        self.piece = piece
        self.changed = changed
        self.live = live
        self.done = done
        self.sum = torch.zeros(piece.layout.elements)
        self.round = _Round()
        self._incoming = 0  # gradients that are coming in, or wait to be added

    def contribute(
        self,
        worker: int,
        step: int,
        reported: tuple[float, ...],
        receive: Callable[[], Tensor],
        wait: Wait,
    ) -> tuple[_Round | None, Sum]:
        """Add a worker's gradient after those of the workers before it; return when the round is
        complete.

        receive: returns the gradient.
        wait:    returns when a condition holds; ``changed`` is notified of changes.

        The round is None if the step was lost.
        """
        wait(lambda: self._admits(worker))
        try:
            gradient = receive()
            wait(lambda: self._is_next(worker))
            with self.changed:
                joined = self._add(worker, step, reported, gradient)
        finally:
            with self.changed:
                self._incoming -= 1
                self.changed.notify_all()
        if joined is None:
            return None, Sum()
        wait(
            lambda: joined is not self.round or joined.square is not None or self._complete(joined)
        )
        with self.changed:
            if joined is not self.round and joined.square is None:
                return None, Sum()
            if joined.square is None:
                joined.square = self.piece.square_norm(self.sum)
            return joined, Sum(joined.square, tuple(sorted(joined.reported.items())))

    def apply(self, finished: _Round | None, update: Update | None) -> None:
        """Apply the sum of a round at the first call, which all workers make alike. update: None:
        skip the step.
        """
        with self.changed:
            if finished is None or finished.applied:
                return
            finished.applied = True
            self.round = _Round()
            if update is not None:
                self.piece.update(self.sum, update)
                self.done()
            self.changed.notify_all()

    def _admits(self, worker: int) -> bool:
        """Whether another gradient may be received now: only so many at a time, but always the next
        in order.
        """
        admits = self._incoming < AHEAD or self._is_next(worker)
        self._incoming += admits
        return admits

    def _is_next(self, worker: int) -> bool:
        """Whether every live worker before this one has contributed to the round."""
        earlier = {other for other in self.live if other < worker}
        return worker not in self.round.reported and earlier <= self.round.reported.keys()

    def _add(
        self, worker: int, step: int, reported: tuple[float, ...], gradient: Tensor
    ) -> _Round | None:
        """Return the round that a gradient was added to; None if other workers are past
        its step.
        """
        if step < self.round.step:
            return None
        if step > self.round.step and self.round.reported:
            self.round = _Round()  # those that contributed are late: their step is over elsewhere
        current = self.round
        current.step = step
        self.sum.add_(gradient) if current.reported else self.sum.copy_(gradient)
        current.reported[worker] = reported
        return current

    def _complete(self, current: _Round) -> bool:
        return self.live <= current.reported.keys()
