"""Weight gradients on their way into ``main_grad``: at once, or queued until it is their turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops

_CACHED_ROWS = 2048


class Gradient:
    """The gradient of one parameter, summed over a step in ``total``, its fp32 view of ``main_grad``.

    After `start` what comes first overwrites it: no pass of zeros, and none that reads them.
    """

    def __init__(self, total: Tensor):
        self.total = total
        self._begun = True
        self._in_product = ops.adds_in_product(total.device)

    def start(self) -> None:
        """Begin a step: what ``total`` holds is of the last one."""
        self._begun = False

    def settle(self) -> None:
        """Make ``total`` zero if nothing has come."""
        if not self._begun:
            self.total.zero_()
            self._begun = True

    def add(self, grad: Tensor) -> None:
        """A gradient in the parameter's shape."""
        if self._begun:
            self.total.add_(grad)
        else:
            self.total.copy_(grad)
            self._begun = True

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Rows [t, h] of any dtype, at those of index int64 [t]."""
        self.settle()
        ops.add_rows_(self.total, index, rows)

    def add_product(self, grad_output: Tensor, input: Tensor) -> None:
        """grad_output [t, o], transposed, @ input [t, i], of one dtype."""
        total, beta = self.total, int(self._begun)
        if grad_output.dtype == total.dtype:
            total.addmm_(grad_output.t(), input, beta=beta)
        elif self._in_product:
            torch.addmm(total, grad_output.t(), input, out_dtype=total.dtype, beta=beta, out=total)
        else:
            # By rows, so that on a CPU the low-precision product is still in the cache when it is added.
            rows = _CACHED_ROWS if total.device.type == "cpu" else len(total)
            put = ops.accumulate_ if beta else ops.cast_
            for part, columns in zip(total.split(rows), grad_output.split(rows, 1), strict=True):
                put(part, columns.t() @ input)
        self._begun = True


@dataclass(frozen=True, eq=False)
class Product:
    """What is to be added to ``grad``: grad_output.T @ input; with ``index``, rows of grad_output at those of
    ``index``; with neither, grad_output as it is."""

    grad: Gradient
    grad_output: Tensor
    input: Tensor | None = None
    index: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What must not change before it is computed."""
        return [tensor for tensor in (self.grad_output, self.input) if tensor is not None]

    @torch.no_grad()
    def accumulate(self) -> None:
        if self.index is not None:
            self.grad.add_rows(self.index, self.grad_output)
        elif self.input is None:
            self.grad.add(self.grad_output)
        else:
            self.grad.add_product(self.grad_output, self.input)


class WeightGradients:
    """The sink that parallel layers hand their weight gradients to.

    grads: of each parameter; what is handed in for any other one (frozen) is dropped. While ``queue`` is a list,
    products are appended to it, for ``drain``, but for those that must be done now. ``getters``: of the inputs of the
    segment that runs, those that a backward gets otherwise than by keeping them. queues_all: what autograd returned is
    appended as well.
    """

    def __init__(self, grads: Mapping[Tensor, Gradient], queues_all: bool = False):
        self.grads, self._queues_all = dict(grads), queues_all
        self.queue: list[Product] | None = None
        self.getters: Mapping[Tensor, Callable[[], Tensor]] = {}

    def getter(self, input: Tensor) -> Callable[[], Tensor] | None:
        return self.getters.get(input)

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        # Detached: outside of a backward grad mode is on, and main_grad would silently become a graph.
        self._take(weight, grad_output.detach(), now, input=input.detach())

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        self._take(weight, grad_output.detach(), index=index)

    def _take(self, weight: Tensor, grad_output: Tensor, now: bool = False, **more: Tensor) -> None:
        if weight not in self.grads:
            return
        product = Product(self.grads[weight], grad_output, **more)
        if now or self.queue is None:
            product.accumulate()
        else:
            self.queue.append(product)

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """A gradient that autograd returned (norms, biases), in the parameter's shape."""
        if self.queue is not None and self._queues_all:
            self.queue.append(Product(self.grads[parameter], grad))
        else:
            self.grads[parameter].add(grad)

    def drain(self, products: Sequence[Product]) -> None:
        """Do what was queued."""
        for product in products:
            product.accumulate()
