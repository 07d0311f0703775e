"""Sequence parallelism keeps a rank's shard of an all-gathered value between forward and backward, as Megatron-LM does.

The backward of the segment that read the value starts the all-gather before it computes. A linear layer wants its input
last, for the weight gradient: the collective runs behind all that the segment computes before.
"""

from collections.abc import Callable

from torch import Tensor

from ..segment import Collective
from .collectives import Work

Launch = Callable[[Tensor, Collective, bool], tuple[Tensor, Work]]


class Regather:
    """An all-gathered value on a tape. Called in the backward, it returns the value.

    shard: this rank's, [b, s / n, ...].
    """

    def __init__(self, shard: Tensor):
        self.shard, self._whole, self._work = shard, None, None

    def start(self, launch: Launch) -> None:
        """Start the all-gather; once, before the value is asked for."""
        self._whole, self._work = launch(self.shard, Collective.ALL_GATHER, False)

    def __call__(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._whole
