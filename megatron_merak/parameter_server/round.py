"""Steps that all workers take together: their gradients are added in the order of the workers, and applied once."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .piece import Piece, Update


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
        self.sum, self.incoming = torch.zeros(piece.layout.elements), torch.empty(piece.layout.elements)
        self.round = _Round()
        self._receiving = False

    def contribute(
        self,
        worker: int,
        step: int,
        told: tuple[float, ...],
        receive: Callable[[Tensor], None],
        wait: Callable[[Callable[[], bool]], None],
    ) -> tuple[_Round | None, Sum]:
        """Add a worker's gradient, which ``receive`` writes into a tensor, when it is its turn; return when all of the
        round's are there. ``wait`` returns when something holds. The round is None where the step was lost."""
        with self._turn(worker) as mine:
            receive(self.incoming)
            with self.changed:
                if mine is not self.round:  # it ended meanwhile, without this worker
                    return None, Sum()
                if step < mine.step:
                    return None, Sum()
                if step > mine.step and mine.told:  # those that contributed are late: their step is over elsewhere
                    mine = self.round = _Round()
                mine.step = step
                self.sum.copy_(self.incoming) if not mine.told else self.sum.add_(self.incoming)
                mine.told[worker] = told
        with self.changed:
            self.changed.notify_all()
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

    def _complete(self, mine: _Round) -> bool:
        return self.live <= mine.told.keys()

    @contextmanager
    def _turn(self, worker: int):
        """The round, when every live worker before this one has contributed to it and none is at it."""

        def mine() -> bool:
            earlier = {other for other in self.live if other < worker}
            return not self._receiving and worker not in self.round.told and earlier <= self.round.told.keys()

        with self.changed:
            self.changed.wait_for(mine)
            self._receiving, now = True, self.round
        try:
            yield now
        finally:
            with self.changed:
                self._receiving = False
                self.changed.notify_all()
