"""What a stage does with one micro-batch: its segments and its borders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..segment import Common, Crossing, Segment

LOSS = "loss"


@dataclass(frozen=True, eq=False)
class Program:
    """A stage's work on micro-batches of one shape.

    prelude: batch -> what the segments share. sources, targets: values that enter and leave the stage, in the order in
    which they travel. results: values that the last stage hands out, ``loss`` the first. count: how many tokens the
    loss of a micro-batch is a sum over; None where the loss is complete as it is. named: what each result is called.
    """

    segments: tuple[Segment, ...]
    prelude: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    sources: tuple[Crossing, ...] = ()
    targets: tuple[Crossing, ...] = ()
    results: tuple[str, ...] = ()
    count: Callable[[Common], Tensor] | None = None
    named: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Values that outlive the segments."""
        return (*(value.name for value in self.targets), *self.results)
