"""Name the first module, in the order of the forward, whose output or gradient is not finite: a
step is run again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.agree import gather_json
from ..pipeline_parallel.ops import Kind
from ..runtime.watching import observed
from ..segment import Common, Segment
from .inside import all_finite, module_inside

_FORWARD = 0
_BACKWARD = 1


class _Finder:
    """Observes a step of this rank; ``found`` is the first place that makes of finite numbers
    others, as JSON.

    names: of this rank's parameters.
    units: the names of the model's units, in order.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], units: Sequence[str]):
        self.names = names
        self.units = units
        self.found: tuple[list[int], str] | None = None

    def __call__(
        self,
        kind: Kind,
        segment: Segment,
        common: Common,
        read: Sequence[Tensor],
        made: Sequence[Tensor | None],
    ) -> None:
        if kind is Kind.F:
            order = [_FORWARD, segment.unit, segment.index]
        elif kind is Kind.B:
            order = [_BACKWARD, -segment.unit, -segment.index]
        else:
            return
        earlier = self.found is not None and self.found[0] <= order
        if earlier or not all_finite(read) or all_finite(made):
            return
        self.found = order, self._told(kind, segment, common, read)

    def _told(self, kind: Kind, segment: Segment, common: Common, read: Sequence[Tensor]) -> str:
        for parameter in segment.parameters:
            if not all_finite([parameter]):
                return f"the weight {self.names.get(parameter, self._module(segment))}"
        entries = [
            name for name, value in common.items() if value.is_floating_point() and _no_mask(value)
        ]
        if entries and kind is Kind.F and segment.unit == 0:
            return f"the batch ({', '.join(entries)})"
        if kind is Kind.B:
            return f"the gradient behind {self._module(segment)}"
        return f"the output of {module_inside(segment, common, read) or self._module(segment)}"

    def _module(self, segment: Segment) -> str:
        return (
            self.units[segment.unit] if segment.unit < len(self.units) else f"unit {segment.unit}"
        )


def _no_mask(value: Tensor) -> bool:
    """Whether it has NaN or +inf; -inf stands in masks."""
    return bool((value.isnan() | (value == torch.inf)).any())


def first_not_finite(model: Any, batches: Sequence[Mapping[str, Any]], iteration: int) -> str:
    """Return where numbers of a step stop being finite, and on which rank; "" if they are finite
    when run again.

    model:     a TrainedModel.
    batches:   of this replica, as `TrainedModel.backward` takes them.
    iteration: steps that were done before it; weights must still be those of its start.

    Collective over all ranks; ``main_grad`` is overwritten.
    """
    units = [unit.name for unit in model.plan.units]
    finder = _Finder(model.parameters.names, units)
    restore = model.snapshot()
    present = model.iteration
    model.iteration = iteration
    try:
        with observed(list(model.stages.values()), finder):
            model.backward(batches)
    finally:
        model.iteration = present
        restore()
    reports = gather_json(finder.found, model.mesh.control, "cpu")
    places = sorted(
        (order, rank, text) for rank, (order, text) in ((r, f) for r, f in enumerate(reports) if f)
    )
    if not places:
        return ""
    _, rank, text = places[0]
    return f"{text} on rank {rank}"
