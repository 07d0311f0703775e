"""A linear layer whose output is summed over ranks, in chunks of rows: one is summed while the next is multiplied.

    current stream   multiply 0 | multiply 1 | multiply 2 |            | use the output
    side stream                 | sum 0      | sum 1      | sum 2      |

Streams wait for each other by events; the host waits for nothing.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

TILE = 128  # rows that a tile of a matrix product has: chunks of whole tiles waste none


class Pending(Protocol):
    """A collective under way, as ``dist.all_reduce(..., async_op=True)`` returns it."""

    def wait(self) -> object:
        """What the current stream (on a CPU: the caller) does next finds the result."""

    def is_completed(self) -> bool:
        """Whether the result is there already."""


Start = Callable[[Tensor], Pending]
"""Starts to sum a dense tensor over ranks in place, after what the current stream was given so far."""


class SideStream:
    """Makes a ``Start`` of a sum that runs on the current stream, by running it on a stream of its own.

    all_reduce: sums a tensor in place on the current stream, such as ``PeerMemory.all_reduce``. api: the module with
    Stream, Event, stream and current_stream.
    """

    def __init__(self, all_reduce: Callable[[Tensor], None], api: Any = torch.cuda):
        self._all_reduce, self._api = all_reduce, api
        self.stream = api.Stream()

    def __call__(self, tensor: Tensor) -> Pending:
        ready, done = self._api.Event(), self._api.Event()
        ready.record(self._api.current_stream())
        with self._api.stream(self.stream):
            self.stream.wait_event(ready)
            self._all_reduce(tensor)
            done.record(self.stream)
        tensor.record_stream(self.stream)  # its memory is not given away before the sum is through
        return _Done(done, self._api)


class _Done:
    def __init__(self, event: Any, api: Any):
        self._event, self._api = event, api

    def wait(self) -> None:
        self._api.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


def row_chunks(rows: int, chunks: int) -> list[slice]:
    """At most ``chunks`` slices that cover ``rows``, of nearly equal numbers of whole tiles but for the end."""
    assert chunks > 0, chunks
    tiles = -(-rows // TILE)
    chunks = max(1, min(chunks, tiles))
    bounds = [min(rows, TILE * (tiles * chunk // chunks)) for chunk in range(chunks + 1)]
    return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


class _LinearAllReduce(torch.autograd.Function):
    """The sum's backward is the identity: every rank has the gradient of the sum, which is that of its own term."""

    @staticmethod
    def forward(ctx, x, weight, start, chunks):
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        transposed, pending = weight.t(), []
        for part in row_chunks(rows.shape[0], chunks):
            torch.mm(rows[part], transposed, out=out[part])
            pending.append(start(out[part]))
        for work in pending:
            work.wait()
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        return grad_x, grad_weight, None, None


def linear_all_reduce(x: Tensor, weight: Tensor, start: Start, chunks: int) -> Tensor:
    """Sum over ranks of x [..., i] @ weight [o, i]^T, [..., o]: the forward of a row-parallel linear.

    The same of the output's gradient and ``weight.t()`` is the backward of a column-parallel one. ``chunks`` 1 is the
    plain product and sum; every rank passes the same.
    """
    return _LinearAllReduce.apply(x, weight, start, chunks)
