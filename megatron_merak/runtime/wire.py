"""Reduction of gradients over data-parallel ranks, communicated in fp32 or in bf16.

A ring all-reduce in bf16 rounds every partial sum, so its error grows with the number of ranks.
Here, a bucket is split into one shard per rank. Every rank rounds its fp32 gradient to bf16 once
and sends each shard to its rank (all-to-all), which sums the shards in fp32. Where every rank needs
the full sum, the sums are rounded once more and all-gathered in bf16:

    sharded gradients         sum over ranks r of bf16(g[r])
    replicated gradients      bf16(sum over ranks r of bf16(g[r]))

The bytes sent are those of a bf16 ring, half of those of an fp32 ring.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.in_flight import Work
from ..tensor_parallel.sequence import gather_single, reduce_scatter_single

_SENT_DTYPE = torch.bfloat16


class Wire:
    """Sums fp32 gradients over the ranks of ``group``, which must launch the same sums in the same
    order.

    in_bf16: whether gradients are rounded to bf16 to be sent. An all-reduce is two collectives
             then. The second is launched by the next sum or by `wait`, so that at most two buckets
             have bf16 copies at a time. On CUDA this work runs on a stream of its own and does not
             delay computation.
    """

    def __init__(self, group: dist.ProcessGroup | None, in_bf16: bool = False):
        self.group = group
        self.in_bf16 = in_bf16
        self._in_flight: list[_Steps] = []
        self._stream: torch.cuda.Stream | None = None

    def all_reduce(self, values: Tensor) -> Work:
        """Start to sum ``values`` fp32 [n] in place."""
        if not self.in_bf16:
            return dist.all_reduce(values, group=self.group, async_op=True)
        return self._launch(values, lambda: _all_reduce_steps(values, self.group))

    def reduce_scatter(self, own: Tensor, values: Tensor) -> Work:
        """Start to sum ``values`` fp32 [n]; this rank's shard goes to ``own`` [n / ranks], which
        may be its view.
        """
        if not self.in_bf16:
            return reduce_scatter_single(own, values, group=self.group, async_op=True)
        return self._launch(values, lambda: _reduce_scatter_steps(own, values, self.group))

    def start(self) -> None:
        """Begin a step: drop the sums of an earlier one that failed."""
        self._in_flight.clear()

    @torch.no_grad()
    def _launch(self, values: Tensor, steps: Callable[[], Iterator[Work]]) -> Work:
        for each in self._in_flight:
            each.advance()
        if values.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(values.device)
            self._stream.wait_stream(torch.cuda.current_stream(values.device))
        pending_sum = _Steps(steps, self._stream)
        self._in_flight = [each for each in (*self._in_flight, pending_sum) if not each.finished]
        return pending_sum


class _Steps:
    """The work of a sum of several collectives.

    steps:  yields each collective's work, and computes between them.
    stream: of CUDA, on which the steps run; None on a CPU.
    """

    def __init__(self, steps: Callable[[], Iterator[Work]], stream: torch.cuda.Stream | None):
        self._stream = stream
        self._steps = steps()
        self._work = None
        with torch.cuda.stream(self._stream):
            self._work = next(self._steps)

    @property
    def finished(self) -> bool:
        return self._work is None

    @torch.no_grad()
    def advance(self) -> None:
        """Wait for the collective in flight and launch the next one."""
        if self._work is not None:
            with torch.cuda.stream(self._stream):
                self._work.wait()
                self._work = next(self._steps, None)

    def wait(self) -> None:
        while not self.finished:
            self.advance()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def _reduce_scatter_steps(
    own: Tensor, values: Tensor, group: dist.ProcessGroup | None
) -> Iterator[Work]:
    sent = values.to(_SENT_DTYPE)
    received = torch.empty_like(sent)
    yield dist.all_to_all_single(received, sent, group=group, async_op=True)
    _sum_shards(received, own)


def _all_reduce_steps(values: Tensor, group: dist.ProcessGroup | None) -> Iterator[Work]:
    ranks = dist.get_world_size(group)
    count = values.numel()
    shard = -(-count // ranks)
    padded = values.new_zeros(shard * ranks, dtype=_SENT_DTYPE)
    padded[:count].copy_(values)
    received = torch.empty_like(padded)
    yield dist.all_to_all_single(received, padded, group=group, async_op=True)
    own = padded[dist.get_rank(group) * shard :][:shard]
    own.copy_(_sum_shards(received, values.new_empty(shard)))
    del received
    yield gather_single(padded, own, group=group, async_op=True)
    values.copy_(padded[:count])


def _sum_shards(received: Tensor, into: Tensor) -> Tensor:
    """Sum the ranks' shards, concatenated in ``received`` bf16 [ranks n], into ``into`` fp32 [n];
    return it.
    """
    return torch.sum(received.view(-1, len(into)), 0, dtype=into.dtype, out=into)
