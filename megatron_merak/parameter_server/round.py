"""Steps that all workers take together: their gradients are added in the order of the workers, and applied once."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .piece import Piece, Update

AHEAD = 4  # gradients that a piece has memory for, beside their sum
Wait = Callable[[Callable[[], bool]], None]


@dataclass
class _Round:
    """step: the workers' count of steps, of the newest that contributed."""

    step: int = -1
    told: dict[int, tuple[float, ...]] = field(default_factory=dict)  # worker -> numbers that came with its gradient
    square: float | None = None  # of the sum, once it is complete
    applied: bool = False


@dataclass(frozen=True)
class Sum:
    """What became of a round: the squared norm of the sum of gradients, and what came with them, by worker. Empty
    where the worker's step was lost: others are past it, since the server was started again."""

    square: float = 0.0
    told: tuple[tuple[int, tuple[float, ...]], ...] = ()


class Rounds:
    """One piece, and the workers that step together. Safe to be called by a thread for each worker.

    changed: notified by whoever changes ``live``, the workers that the next round waits for; its lock protects the
    piece. done: called with the lock held after each update.
    """

    def __init__(self, piece: Piece, changed: threading.Condition, live: set[int], done: Callable[[], None]):
        self.piece, self.changed, self.live, self.done = piece, changed, live, done
        self.sum = torch.zeros(piece.layout.elements)
        self.round = _Round()
        self._incoming = 0  # gradients that are coming in, or wait to be added

    def contribute(
        self, worker: int, step: int, told: tuple[float, ...], receive: Callable[[], Tensor], wait: Wait
    ) -> tuple[_Round | None, Sum]:
        """Add a worker's gradient, which ``receive`` brings, behind those of the workers before it; return when all of
        the round's are there. ``wait`` returns when something holds, of which ``changed`` is notified. The round is
        None where the step was lost."""
        wait(lambda: self._admits(worker))
        try:
            gradient = receive()
            wait(lambda: self._is_next(worker))
            with self.changed:
                mine = self._add(worker, step, told, gradient)
        finally:
            with self.changed:
                self._incoming -= 1
                self.changed.notify_all()
        if mine is None:
            return None, Sum()
        wait(lambda: mine is not self.round or mine.square is not None or self._complete(mine))
        with self.changed:
            if mine is not self.round and mine.square is None:
                return None, Sum()
            if mine.square is None:
                mine.square = self.piece.square_norm(self.sum)
            return mine, Sum(mine.square, tuple(sorted(mine.told.items())))

    def apply(self, mine: _Round | None, update: Update | None) -> None:
        """Apply the sum of a round, by the first worker that says so; they all say the same. None: skip it."""
        with self.changed:
            if mine is None or mine.applied:
                return
            mine.applied = True
            self.round = _Round()
            if update is not None:
                self.piece.update(self.sum, update)
                self.done()
            self.changed.notify_all()

    def _admits(self, worker: int) -> bool:
        """Whether a gradient may come in, which counts then: so many at a time, and the next one in any case."""
        admits = self._incoming < AHEAD or self._is_next(worker)
        self._incoming += admits
        return admits

    def _is_next(self, worker: int) -> bool:
        """Whether every live worker before this one has contributed to the round."""
        earlier = {other for other in self.live if other < worker}
        return worker not in self.round.told and earlier <= self.round.told.keys()

    def _add(self, worker: int, step: int, told: tuple[float, ...], gradient: Tensor) -> _Round | None:
        """The round that a gradient was added to; None where its step is over for others."""
        if step < self.round.step:
            return None
        if step > self.round.step and self.round.told:  # those that contributed are late: their step is over elsewhere
            self.round = _Round()
        mine = self.round
        mine.step = step
        self.sum.add_(gradient) if mine.told else self.sum.copy_(gradient)
        mine.told[worker] = told
        return mine

    def _complete(self, mine: _Round) -> bool:
        return self.live <= mine.told.keys()
