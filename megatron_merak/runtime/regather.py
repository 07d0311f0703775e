"""A rank keeps only its shard of an all-gathered value for the backward, as in Megatron-LM: of what
linear layers read under sequence parallelism, and of keys and values of other ranks' positions.

The backward of the segment that read the value starts the all-gather before it computes. A linear
layer needs its input only for the weight gradient, which comes last, so the all-gather overlaps
with the rest of the segment's backward; attention comes first in a segment, and so last in its
backward.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parallel.in_flight import Work
from ..segment import Collective, LayerAxis
from .offload import Packed, address
from .offload import unpack as unpack_offloaded

Launch = Callable[[Tensor, Collective, LayerAxis, bool], tuple[Tensor, Work]]


class Regather:
    """An all-gathered value, of which a tape keeps one shard. Call it in the backward to get the
    full value.

    shard: this rank's shard, [b, s / n, ...], or what stands for it until the backward.
    axis:  of the ranks that have the others.
    """

    def __init__(self, shard: Tensor | Packed, axis: LayerAxis):
        self.shard = shard
        self.axis = axis
        self._full: Tensor | None = None
        self._work: Work | None = None

    def start(self, launch: Launch) -> None:
        """Start the all-gather; call it once, before calling this object."""
        shard = unpack_offloaded(self.shard)
        self._full, self._work = launch(shard, Collective.ALL_GATHER, self.axis, False)

    def __call__(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._full is not None, "the all-gather was started"
        return self._full


class Again:
    """What a function returns when it is first called; later calls return that, too."""

    def __init__(self, function: Callable[[], Tensor]):
        self._function = function
        self._result: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._result is None:
            self._result = self._function()
        return self._result


class UnkeptView(NamedTuple):
    """A tensor on a tape that shares memory with a value which the tape does not keep.

    get:    returns that value, in memory that is laid out in the same way.
    offset: from its first element.
    """

    get: Callable[[], Tensor]
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(
        cls, tensor: Tensor, getters: Mapping[Tensor, Callable[[], Tensor]]
    ) -> "UnkeptView | None":
        """Return what stands for a tensor; None if it shares memory with no value of ``getters``."""
        for value, get in getters.items():
            if address(value) == address(tensor) and value.dtype == tensor.dtype:
                offset = int(tensor.storage_offset()) - int(value.storage_offset())
                return cls(get, offset, tensor.shape, tensor.stride())
        return None

    def tensor(self) -> Tensor:
        value = self.get()
        return value.as_strided(self.shape, self.stride, int(value.storage_offset()) + self.offset)


def unkept(
    getters: Mapping[Tensor, Callable[[], Tensor]], pack: Callable[[Tensor], Any]
) -> AbstractContextManager[object]:
    """Return a context in which tapes keep no value of ``getters``, nor a view of one.

    pack: what they keep in the place of other tensors, of which `unpack` returns the tensor.
    """
    return torch.autograd.graph.saved_tensors_hooks(partial(_pack, getters, pack), unpack)


def _pack(
    getters: Mapping[Tensor, Callable[[], Tensor]], pack: Callable[[Tensor], Any], tensor: Tensor
) -> Any:
    view = UnkeptView.of(tensor, getters)
    return pack(tensor) if view is None else view


def unpack(packed: Any) -> Tensor:
    """Return the tensor in whose place a tape keeps ``packed``."""
    return packed.tensor() if isinstance(packed, UnkeptView) else unpack_offloaded(packed)
