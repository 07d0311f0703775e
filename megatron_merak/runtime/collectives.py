"""The collectives of tensor-parallel ranks that stand between segments, launched and not waited for."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..segment import Collective
from ..tensor_parallel.sequence import gather_single, reduce_scatter_single, stacked, unstacked


class Work(Protocol):
    """What a launch hands back, to be waited for once."""

    def wait(self) -> object:
        """Return when the result is valid (on CUDA: for the current stream)."""


class Done:
    """A work that is over."""

    def wait(self) -> None:
        pass


class Unstack:
    """A gathering whose parts [n, b, s / n, ...] are put in order, into ``out`` [b, s, ...], when it is waited for."""

    def __init__(self, work: Work, parts: Tensor, out: Tensor):
        self._work, self._parts, self._out = work, parts, out

    def wait(self) -> None:
        self._work.wait()
        self._out.copy_(unstacked(self._parts))
        self._parts = self._out = None


def _reduce(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    if not (inplace and tensor.is_contiguous()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor, dist.all_reduce(tensor, group=group, async_op=True)


def _stack(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    parts = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    return parts, gather_single(parts.flatten(0, 1), tensor.contiguous(), group=group, async_op=True)


def _gather(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    parts, work = _stack(tensor, group, inplace)
    if tensor.shape[0] == 1:
        return unstacked(parts), work
    out = tensor.new_empty(tensor.shape[0], len(parts) * tensor.shape[1], *tensor.shape[2:])
    return out, Unstack(work, parts, out)


def _scatter(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    parts = stacked(tensor, dist.get_world_size(group))
    out = torch.empty_like(parts[0])
    return out, reduce_scatter_single(out, parts.flatten(0, 1), group=group, async_op=True)


_LAUNCHERS: dict[Collective, Callable[..., tuple[Tensor, Work]]] = {
    Collective.ALL_REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _scatter,
    Collective.ALL_GATHER: _gather,
    Collective.STACK: _stack,
}


def launch(tensor: Tensor, kind: Collective, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    """Start a collective over ``group``; the result is valid once the work was waited for.

    An all-reduce gives the shape of ``tensor``, STACK [n, ...], an all-gather of [b, s / n, ...] gives [b, s, ...], and
    a reduce-scatter the other way round. ``inplace``: an all-reduce may overwrite ``tensor``; the others never do.
    """
    return _LAUNCHERS[kind](tensor, group, inplace)


def own_gradient(grad: Tensor, kind: Collective, group: dist.ProcessGroup | None) -> Tensor:
    """The gradient of the tensor that a rank gave to the collective ``kind``, from that of the result, which all ranks
    read alike.
    """
    return grad[dist.get_rank(group)] if kind is Collective.STACK else grad
