"""The program of a stage: its segments, and the values that enter and leave it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..segment import Common, Crossing, Segment

LOSS = "loss"


@dataclass(frozen=True, eq=False)
class Program:
    """A stage's work on micro-batches of one shape.

    segments: in forward order.
    prelude:  batch -> the tensors that all segments can read.
    sources:  values that enter the stage, in the order of their transfers.
    targets:  values that leave the stage, in the order of their transfers.
    results:  values that the last stage returns, ``loss`` first.
    count:    returns the number of tokens that a micro-batch's loss is summed over; None where the
              loss is complete.
    named:    the name under which the caller sees each result.
    codes:    names of the functions of the model's own code, run in Python, that segments call.
    by_host:  of the tensors that all segments can read, those whose numbers Python reads: other
              numbers are other work.
    fixed:    of these tensors, those whose memory is the same for every batch: segments may write to
              it, as to running statistics.
    """

    segments: tuple[Segment, ...]
    prelude: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    sources: tuple[Crossing, ...] = ()
    targets: tuple[Crossing, ...] = ()
    results: tuple[str, ...] = ()
    count: Callable[[Common], Tensor] | None = None
    named: tuple[str, ...] = ()
    by_host: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that are needed after the segments have run."""
        return (*(value.name for value in self.targets), *self.results)
