"""Accumulation of weight gradients into ``main_grad``, at once or deferred in a queue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import ops

_CACHED_ROWS = 2048


class Gradient:
    """The gradient of one parameter, accumulated over a step.

    The first gradient after `start` overwrites ``total``, which saves zeroing it and reading the
    zeros.

    total: fp32 view of ``main_grad``, in the shape of the parameter.
    """

    def __init__(self, total: Tensor):
        self.total = total
        self._begun = True
        self._in_product = ops.adds_in_product(total.device)

    def start(self) -> None:
        """Begin a step: ``total`` still has the gradient of the previous one."""
        self._begun = False

    def settle(self) -> None:
        """Zero ``total`` if no gradient was added in this step."""
        if not self._begun:
            self.total.zero_()
            self._begun = True

    def add(self, grad: Tensor) -> None:
        """Add a gradient in the parameter's shape."""
        if self._begun:
            self.total.add_(grad)
        else:
            self.total.copy_(grad)
            self._begun = True

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Add ``rows`` [t, h], of any dtype, to the rows of ``total`` given by ``index``
        int64 [t].
        """
        self.settle()
        ops.add_rows_(self.total, index, rows)

    def add_product(self, grad_output: Tensor, input: Tensor) -> None:
        """Add grad_output.T @ input, where grad_output [t, o] and input [t, i] have the
        same dtype.
        """
        total = self.total
        beta = int(self._begun)
        if grad_output.dtype == total.dtype:
            total.addmm_(grad_output.t(), input, beta=beta)
        elif self._in_product:
            torch.addmm(total, grad_output.t(), input, out_dtype=total.dtype, beta=beta, out=total)
        else:
            # On a CPU in blocks of rows, so that each low-precision product is still in the cache
            # when it is added.
            rows = _CACHED_ROWS if total.device.type == "cpu" else len(total)
            write = ops.accumulate_ if beta else ops.cast_
            for block, columns in zip(total.split(rows), grad_output.split(rows, 1), strict=True):
                write(block, columns.t() @ input)
        self._begun = True


@dataclass(frozen=True, eq=False)
class DeferredProduct:
    """A contribution to ``grad``, not computed yet.

    With ``input`` it is grad_output.T @ input; with ``index``, the rows of grad_output are added at
    the rows ``index``; with neither, it is grad_output itself.
    """

    grad: Gradient
    grad_output: Tensor
    input: Tensor | None = None
    index: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that must not be modified before `accumulate`."""
        return [tensor for tensor in (self.grad_output, self.input) if tensor is not None]

    @torch.no_grad()
    def accumulate(self) -> None:
        if self.index is not None:
            self.grad.add_rows(self.index, self.grad_output)
        elif self.input is None:
            self.grad.add(self.grad_output)
        else:
            self.grad.add_product(self.grad_output, self.input)


def _in_shape(get: Callable[[], Tensor], shape: torch.Size) -> Tensor:
    return get().view(shape)


class WeightGradients:
    """Accumulates the weight gradients that parallel layers compute themselves, outside of
    autograd.

    grads:      parameter -> its gradient; those of other parameters (frozen ones) are dropped.
    queues_all: whether gradients returned by autograd are queued as well.

    Attributes:
    queue:   if a list, products are appended to it for `drain`, except those that must be computed
             now.
    getters: inputs of the running segment that are not kept for the backward -> a function that
             returns the value. A layer may read one in another shape.
    """

    def __init__(self, grads: Mapping[Tensor, Gradient], queues_all: bool = False):
        self.grads = dict(grads)
        self._queues_all = queues_all
        self.queue: list[DeferredProduct] | None = None
        self.getters: Mapping[Tensor, Callable[[], Tensor]] = {}

    def getter(self, input: Tensor) -> Callable[[], Tensor] | None:
        for value, get in self.getters.items():
            if input is value:
                return get
            same_memory = input.data_ptr() == value.data_ptr() and input.numel() == value.numel()
            if same_memory and input.is_contiguous():
                return partial(_in_shape, get, input.shape)
        return None

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        # Detached: outside of a backward grad mode is on, and main_grad would silently become part
        # of a graph.
        self._accumulate(weight, grad_output.detach(), now, input=input.detach())

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        self._accumulate(weight, grad_output.detach(), index=index)

    def _accumulate(
        self, weight: Tensor, grad_output: Tensor, now: bool = False, **operands: Tensor
    ) -> None:
        if weight not in self.grads:
            return
        product = DeferredProduct(self.grads[weight], grad_output, **operands)
        if now or self.queue is None:
            product.accumulate()
        else:
            self.queue.append(product)

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """Add a gradient that autograd returned (of a norm or bias), in the parameter's shape."""
        if self.queue is not None and self._queues_all:
            self.queue.append(DeferredProduct(self.grads[parameter], grad))
        else:
            self.grads[parameter].add(grad)

    def drain(self, products: Sequence[DeferredProduct]) -> None:
        """Compute queued products."""
        for product in products:
            product.accumulate()
