"""Weight gradients on their way into ``main_grad``: at once, or queued until it is their turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops

_CACHED_ROWS = 2048


@dataclass(frozen=True, eq=False)
class Product:
    """A weight gradient to be computed into ``grad``: grad_output.T @ input, or, with ``index``, rows of grad_output
    added at those of ``index``."""

    grad: Tensor
    grad_output: Tensor
    input: Tensor | None = None
    index: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What must not change before it is computed."""
        return [tensor for tensor in (self.grad_output, self.input) if tensor is not None]

    @torch.no_grad()
    def accumulate(self) -> None:
        grad, grad_output = self.grad, self.grad_output
        if self.index is not None:
            ops.add_rows_(grad, self.index, grad_output)
        elif grad_output.dtype == grad.dtype:
            grad.addmm_(grad_output.t(), self.input)
        else:
            # By rows, so that on a CPU the low-precision product is still in the cache when it is added.
            rows = _CACHED_ROWS if grad.device.type == "cpu" else len(grad)
            for part, columns in zip(grad.split(rows), grad_output.split(rows, 1), strict=True):
                ops.accumulate_(part, columns.t() @ self.input)


class WeightGradients:
    """The sink that parallel layers hand their weight gradients to.

    grads: parameter -> its fp32 view of ``main_grad``; what is handed in for any other one (frozen) is dropped. While
    ``queue`` is a list, products are appended to it, for ``drain``, but for those that must be done now.
    """

    def __init__(self, grads: Mapping[Tensor, Tensor]):
        self.grads = dict(grads)
        self.queue: list[Product] | None = None

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
        self.grads[parameter].add_(grad)

    def drain(self, products: Sequence[Product]) -> None:
        """Do what was queued."""
        for product in products:
            product.accumulate()
