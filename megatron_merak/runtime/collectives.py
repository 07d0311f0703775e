"""Asynchronous collectives over tensor-parallel ranks, which run between segments."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.in_flight import Work
from ..segment import Collective
from ..tensor_parallel.sequence import gather_single, reduce_scatter_single, stacked, unstacked


class Unstack:
    """An all-gather whose `wait` also reorders the shards [n, b, s / n, ...] into ``out`` [b, s,
    ...].
    """

    def __init__(self, work: Work, shards: Tensor, out: Tensor):
        self._work = work
        self._tensors: tuple[Tensor, Tensor] | None = (shards, out)

    def wait(self) -> None:
        self._work.wait()
        assert self._tensors is not None, "is waited for once"
        shards, out = self._tensors
        out.copy_(unstacked(shards))
        self._tensors = None


def _reduce(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    if not (inplace and tensor.is_contiguous()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor, dist.all_reduce(tensor, group=group, async_op=True)


def _stack(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    shards = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    return shards, gather_single(
        shards.flatten(0, 1), tensor.contiguous(), group=group, async_op=True
    )


def _gather(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    shards, work = _stack(tensor, group, inplace)
    if tensor.shape[0] == 1:
        return unstacked(shards), work
    out = tensor.new_empty(tensor.shape[0], len(shards) * tensor.shape[1], *tensor.shape[2:])
    return out, Unstack(work, shards, out)


def _scatter(tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool) -> tuple[Tensor, Work]:
    shards = stacked(tensor, dist.get_world_size(group))
    out = torch.empty_like(shards[0])
    return out, reduce_scatter_single(out, shards.flatten(0, 1), group=group, async_op=True)


def _exchange(
    tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool
) -> tuple[Tensor, Work]:
    got = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return got, dist.all_to_all_single(got, tensor.contiguous(), group=group, async_op=True)


def _rotate(
    tensor: Tensor, group: dist.ProcessGroup | None, inplace: bool, by: int = 1
) -> tuple[Tensor, Work]:
    """Send to the rank that is ``by`` further; an exchange in which every other share is empty."""
    ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    got = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    sent_to = [0] * ranks
    got_of = [0] * ranks
    sent_to[(rank + by) % ranks] = tensor.numel()
    got_of[(rank - by) % ranks] = tensor.numel()
    flat = tensor.contiguous().view(-1)
    work = dist.all_to_all_single(got.view(-1), flat, got_of, sent_to, group=group, async_op=True)
    return got, work


_LAUNCHERS: dict[Collective, Callable[..., tuple[Tensor, Work]]] = {
    Collective.ALL_REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _scatter,
    Collective.ALL_GATHER: _gather,
    Collective.STACK: _stack,
    Collective.EXCHANGE: _exchange,
    Collective.ROTATE: _rotate,
    Collective.ROTATE_BACK: partial(_rotate, by=-1),
}


@dataclass(frozen=True)
class RowCounts:
    """How many rows are sent to each rank, and got of each."""

    sent: list[int]
    got: list[int]

    @classmethod
    def of(cls, counts: Tensor) -> "RowCounts":
        """Return those of int64 [2, n]. The host waits for them."""
        sent, got = counts.tolist()
        return cls(sent, got)

    def reversed(self) -> "RowCounts":
        return RowCounts(self.got, self.sent)


def exchange_rows(
    tensor: Tensor, counts: RowCounts, group: dist.ProcessGroup | None
) -> tuple[Tensor, Work]:
    """Start the exchange of rows; see ``launch``."""
    rows = tensor.new_empty(sum(counts.got), *tensor.shape[1:])
    work = dist.all_to_all_single(
        rows, tensor.contiguous(), counts.got, counts.sent, group=group, async_op=True
    )
    return rows, work


def launch(
    tensor: Tensor, kind: Collective, group: dist.ProcessGroup | None, inplace: bool
) -> tuple[Tensor, Work]:
    """Start a collective over ``group``. Return its result, valid after waiting for the work, and
    that work.

    kind:    ALL_REDUCE keeps the shape of ``tensor``; STACK returns [n, *tensor.shape]; ALL_GATHER
             turns [b, s / n, ...] into [b, s, ...]; REDUCE_SCATTER turns [b, s, ...] into [b, s /
             n, ...]; EXCHANGE keeps the shape, [n, ...];
             ROTATE and ROTATE_BACK keep it.
    inplace: an all-reduce may overwrite ``tensor``; the other collectives never do.
    """
    return _LAUNCHERS[kind](tensor, group, inplace)


def own_gradient(grad: Tensor, kind: Collective, group: dist.ProcessGroup | None) -> Tensor:
    """Return the gradient of a collective's input on this rank, given that of its output.

    grad: gradient of the output, equal on all ranks of ``group``; for STACK [n, ...], one entry per
          rank.
    """
    return grad[dist.get_rank(group)] if kind is Collective.STACK else grad
