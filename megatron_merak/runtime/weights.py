"""Weight gradients on their way into ``main_grad``: at once, or queued until the collective they shall hide is
launched.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_CACHED_ROWS = 2048


class WeightGradients:
    """The sink that parallel layers hand their weight gradients to.

    grads: parameter -> its fp32 view of ``main_grad``; what is handed in for any other one (frozen) is dropped. While
    ``deferred`` is set, matrix products wait for ``drain``.
    """

    def __init__(self, grads: Mapping[Tensor, Tensor]):
        self.grads = dict(grads)
        self.deferred = False
        self._queue: list[tuple[Tensor, Tensor, Tensor]] = []

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor) -> None:
        if weight not in self.grads:
            return
        # Detached: outside of a backward grad mode is on, and main_grad would silently become a graph.
        product = (self.grads[weight], grad_output.detach(), input.detach())
        if self.deferred:
            self._queue.append(product)
        else:
            self._accumulate(*product)

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        if weight in self.grads:
            with torch.no_grad():
                self.grads[weight].index_add_(0, index, grad_output.to(self.grads[weight].dtype))

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """A gradient that autograd returned (norms, biases), in the parameter's shape."""
        self.grads[parameter].add_(grad)

    @property
    def queued(self) -> list[Tensor]:
        """What waits to be read by ``drain``."""
        return [tensor for _, grad_output, input in self._queue for tensor in (grad_output, input)]

    def drain(self) -> None:
        """Do what was queued."""
        for product in self._queue:
            self._accumulate(*product)
        self._queue.clear()

    @torch.no_grad()
    def _accumulate(self, grad: Tensor, grad_output: Tensor, input: Tensor) -> None:
        if grad_output.dtype == grad.dtype:
            grad.addmm_(grad_output.t(), input)
            return
        # By rows, so that on a CPU the low-precision product is still in the cache when it is added.
        rows = _CACHED_ROWS if grad.device.type == "cpu" else len(grad)
        for part, columns in zip(grad.split(rows), grad_output.split(rows, 1), strict=True):
            part.add_(columns.t() @ input)
