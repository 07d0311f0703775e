"""Under sequence parallelism a rank keeps only its shard of an all-gathered value for the backward,
as in Megatron-LM.

The backward of the segment that read the value starts the all-gather before it computes. A linear
layer needs its input only for the weight gradient, which comes last, so the all-gather overlaps
with the rest of the segment's backward.
"""

from collections.abc import Callable

from torch import Tensor

from ..parallel.in_flight import Work
from ..segment import Collective, LayerAxis

Launch = Callable[[Tensor, Collective, LayerAxis, bool], tuple[Tensor, Work]]


class Regather:
    """An all-gathered value, of which a tape keeps one shard. Call it in the backward to get the
    full value.

    shard: this rank's shard, [b, s / n, ...].
    axis:  of the ranks that have the others.
    """

    def __init__(self, shard: Tensor, axis: LayerAxis):
        self.shard = shard
        self.axis = axis
        self._full: Tensor | None = None
        self._work: Work | None = None

    def start(self, launch: Launch) -> None:
        """Start the all-gather; call it once, before calling this object."""
        self._full, self._work = launch(self.shard, Collective.ALL_GATHER, self.axis, False)

    def __call__(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._full is not None, "the all-gather was started"
        return self._full
