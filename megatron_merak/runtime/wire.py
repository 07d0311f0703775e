"""How gradients travel between data-parallel ranks: in fp32, or rounded to bf16.

A ring that adds in bf16 rounds every partial sum, so its error grows with the ranks. Here, in bf16, a bucket is cut
into a shard for each rank. Every rank rounds its fp32 gradient once and sends each other rank that one's shard
(all-to-all); what comes is added up in fp32. Where every rank needs the whole sum, the shards are rounded once more and
all-gathered in bf16:

    gradients of which ranks have shards        sum over ranks r of bf16(g[r])
    gradients of which every rank has all       bf16(sum over ranks r of bf16(g[r]))

The bytes sent are those of a ring in bf16, half of those in fp32.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..tensor_parallel.sequence import gather_single, reduce_scatter_single
from .collectives import Work

_SENT = torch.bfloat16


class Wire:
    """Sums of fp32 gradients over the ranks of ``group``, which launch the same ones in the same order.

    in_bf16: what is sent is rounded to bf16. A sum is two collectives then, the second of which is launched when the
    next sum is launched, or in the wait; so at most two buckets are copied at a time. On CUDA that work has a stream of
    its own: computing does not wait for it.
    """

    def __init__(self, group: dist.ProcessGroup | None, in_bf16: bool = False):
        self.group, self.in_bf16 = group, in_bf16
        self._under_way: list[_Steps] = []
        self._stream: torch.cuda.Stream | None = None

    def all_reduce(self, values: Tensor) -> Work:
        """Start to sum ``values`` fp32 [n] in place."""
        if not self.in_bf16:
            return dist.all_reduce(values, group=self.group, async_op=True)
        return self._launch(values, lambda: _reduced(values, self.group))

    def reduce_scatter(self, own: Tensor, values: Tensor) -> Work:
        """Start to sum ``values`` fp32 [n]; ``own`` [n / ranks] takes this rank's shard, and may be its place there."""
        if not self.in_bf16:
            return reduce_scatter_single(own, values, group=self.group, async_op=True)
        return self._launch(values, lambda: _scattered(own, values, self.group))

    def start(self) -> None:
        """Begin a step: what an earlier one left when it failed is forgotten."""
        self._under_way.clear()

    @torch.no_grad()
    def _launch(self, values: Tensor, steps: Callable[[], Iterator[Work]]) -> Work:
        for each in self._under_way:
            each.advance()
        if values.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(values.device)
            self._stream.wait_stream(torch.cuda.current_stream(values.device))
        started = _Steps(steps, self._stream)
        self._under_way = [each for each in (*self._under_way, started) if not each.over]
        return started


class _Steps:
    """A sum of several collectives; what yields them works between one and the next. stream: where, None on a CPU."""

    def __init__(self, steps: Callable[[], Iterator[Work]], stream: torch.cuda.Stream | None):
        self._stream, self._steps, self._work = stream, steps(), None
        with torch.cuda.stream(self._stream):
            self._work = next(self._steps)

    @property
    def over(self) -> bool:
        return self._work is None

    @torch.no_grad()
    def advance(self) -> None:
        """Await the collective that is under way, and go on to the next."""
        if self._work is not None:
            with torch.cuda.stream(self._stream):
                self._work.wait()
                self._work = next(self._steps, None)

    def wait(self) -> None:
        while not self.over:
            self.advance()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _scattered(own: Tensor, values: Tensor, group: dist.ProcessGroup) -> Iterator[Work]:
    sent = values.to(_SENT)
    came = torch.empty_like(sent)
    yield dist.all_to_all_single(came, sent, group=group, async_op=True)
    _add_up(came, own)


def _reduced(values: Tensor, group: dist.ProcessGroup) -> Iterator[Work]:
    ranks, count = dist.get_world_size(group), values.numel()
    shard = -(-count // ranks)
    whole = values.new_zeros(shard * ranks, dtype=_SENT)
    whole[:count].copy_(values)
    came = torch.empty_like(whole)
    yield dist.all_to_all_single(came, whole, group=group, async_op=True)
    own = whole[dist.get_rank(group) * shard :][:shard]
    own.copy_(_add_up(came, values.new_empty(shard)))
    del came
    yield gather_single(whole, own, group=group, async_op=True)
    values.copy_(whole[:count])


def _add_up(came: Tensor, into: Tensor) -> Tensor:
    """into fp32 [n] = the sum of the ranks' shards, one behind the other in ``came`` bf16 [ranks n]."""
    return torch.sum(came.view(-1, len(into)), 0, dtype=into.dtype, out=into)
