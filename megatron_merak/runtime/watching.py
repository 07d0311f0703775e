"""What a step can be watched by: the values of every segment, and digests of what leaves
this rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from ..ops import sum_of_squares
from ..pipeline_parallel.ops import Kind
from ..segment import Common, Segment
from .executor import Executor
from .parameters import RankParameters
from .stage import Stage


class Observer(Protocol):
    """Is called after each forward (F) and backward (B) of a segment."""

    def __call__(
        self,
        kind: Kind,
        segment: Segment,
        common: Common,
        read: Sequence[Tensor],
        made: Sequence[Tensor | None],
    ) -> None:
        """Look at one run of a segment.

        read: what it read: values in F, gradients of its outputs in B.
        made: what it computed: values in F, before their collectives; gradients of inputs and
              parameters in B, None for those that are accumulated elsewhere.
        """


@contextmanager
def observed(stages: Sequence[Stage], observer: Observer) -> Iterator[None]:
    """Call ``observer`` for every segment that runs inside."""
    for stage in stages:
        stage.observe(observer)
    try:
        yield
    finally:
        for stage in stages:
            stage.observe(None)


class Seals:
    """Digests of the bits that one rank computes in a step, before others add to them.

    sent:      of every value that leaves a stage, in the order of the schedule.
    gradients: of every bucket, before it is reduced over replicas.
    squares:   their sums of squares.
    """

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.squares: list[Tensor] = []

    def note_sent(self, value: Tensor) -> None:
        self.sent.append(bits(value))

    def note_gradient(self, flat: Tensor) -> None:
        self.gradients.append(bits(flat))
        self.squares.append(sum_of_squares(flat))

    @property
    def square(self) -> float:
        """The squared norm of this rank's gradient."""
        return float(torch.stack(self.squares).double().sum()) if self.squares else 0.0


@contextmanager
def sealed(executor: Executor, parameters: RankParameters) -> Iterator[Seals]:
    """Collect digests of the step that runs inside."""
    seals = Seals()
    reduces = parameters.reducer if parameters.units is None else parameters.units.gradients
    executor.on_send = seals.note_sent
    reduces.before_reduction = seals.note_gradient
    try:
        yield seals
    finally:
        executor.on_send = reduces.before_reduction = None


@torch.no_grad()
def bits(value: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns modulo 2**64, int64 on its device: the same in any
    order.
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.detach().contiguous().view(whole).sum(dtype=torch.int64)
