"""Accumulation of weight gradients into ``main_grad``, at once or deferred in a queue."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from .regather import Again, UnkeptView, unkept

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

    def resume(self) -> None:
        """Go on where ``total`` has what was added in this step."""
        self._begun = True

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

    def add_grouped_product(self, left: Tensor, right: Tensor, ends: Tensor) -> None:
        """Add left.T @ right of the rows of each group, see ``ops.add_products_``."""
        ops.add_products_(self.total, left, right, ends, self._begun)
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


@dataclass(frozen=True, eq=False)
class DeferredGroupedProduct:
    """A contribution to ``grad``, not computed yet: left.T @ right of the rows of each group."""

    grad: Gradient
    left: Tensor
    right: Tensor
    ends: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that must not be modified before `accumulate`."""
        return [self.left, self.right, self.ends]

    @torch.no_grad()
    def accumulate(self) -> None:
        self.grad.add_grouped_product(self.left, self.right, self.ends)


@dataclass(frozen=True, eq=False)
class DeferredCall:
    """A contribution to ``grad``, not computed yet, that a function returns in a dtype."""

    grad: Gradient
    compute: Callable[[torch.dtype], Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """None: the operands are the function's own."""
        return []

    @torch.no_grad()
    def accumulate(self) -> None:
        self.grad.add(self.compute(self.grad.total.dtype))


Deferred = DeferredProduct | DeferredGroupedProduct | DeferredCall
_Place = tuple[int, int, torch.Size]  # storage, offset, shape


def _place(tensor: Tensor) -> _Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape


class WeightGradients:
    """Accumulates the weight gradients that parallel layers compute themselves, outside of
    autograd.

    grads:      parameter -> its gradient; those of other parameters (frozen ones) are dropped.
    queues_all: whether gradients returned by autograd are queued as well.
    group:      the ranks that share the work of a layer; None: this one alone.

    Attributes:
    queue:   if a list, products are appended to it for `drain`, except those that must be computed
             now.
    getters: inputs of the running segment that are not kept for the backward, and what was moved
             from them -> a function that returns the value. A layer may read another view of one.
    pack:    what its tape keeps in the place of other tensors; see `regather.unpack`.
    """

    def __init__(
        self,
        grads: Mapping[Tensor, Gradient],
        queues_all: bool = False,
        group: dist.ProcessGroup | None = None,
    ):
        self.grads = dict(grads)
        self._group = group
        self._queues_all = queues_all
        self._by_place: dict[_Place, Tensor] = {}
        self.queue: list[Deferred] | None = None
        self.getters: dict[Tensor, Callable[[], Tensor]] = {}
        self.pack: Callable[[Tensor], Any] = Tensor.detach

    def getter(self, input: Tensor) -> Callable[[], Tensor] | None:
        if input in self.getters:
            return self.getters[input]
        view = UnkeptView.of(input, self.getters)
        return None if view is None else view.tensor

    def again(self, result: Tensor, get: Callable[[], Tensor]) -> None:
        self.getters[result] = Again(get)

    def unkept(self) -> AbstractContextManager[object]:
        return unkept(self.getters, self.pack) if self.getters else nullcontext()

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each of ``values`` over the ranks of a layer."""
        if self._group is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        # Detached: outside of a backward grad mode is on, and main_grad would silently become part
        # of a graph.
        self._accumulate(weight, grad_output.detach(), now, input=input.detach())

    def grouped(self, weight: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
        grad = self._of(weight)
        if grad is not None:
            self._add(DeferredGroupedProduct(grad, left.detach(), right.detach(), ends))

    def product(self, weight: Tensor, product: Callable[[torch.dtype], Tensor]) -> None:
        grad = self._of(weight)
        if grad is not None:
            self._add(DeferredCall(grad, product))

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        self._accumulate(weight, grad_output.detach(), index=index)

    def _accumulate(
        self, weight: Tensor, grad_output: Tensor, now: bool = False, **operands: Tensor
    ) -> None:
        grad = self._of(weight)
        if grad is None:
            return
        self._add(DeferredProduct(grad, grad_output, **operands), now)

    def _add(self, product: Deferred, now: bool = False) -> None:
        if now or self.queue is None:
            product.accumulate()
        else:
            self.queue.append(product)

    def _of(self, weight: Tensor) -> Gradient | None:
        """Return the gradient of a parameter, also of one that a tape with hooks gave back: that is
        another tensor of the same memory.
        """
        if weight in self.grads:
            return self.grads[weight]
        if isinstance(weight, torch.nn.Parameter) or not weight.requires_grad:
            return None  # a frozen one
        found = self._by_place.get(_place(weight))
        if found is None or _place(found) != _place(weight):  # parameters may have moved
            self._by_place = {_place(parameter): parameter for parameter in self.grads}
            found = self._by_place.get(_place(weight))
        return None if found is None else self.grads[found]

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """Add a gradient that autograd returned (of a norm or bias), in the parameter's shape."""
        if self.queue is not None and self._queues_all:
            self.queue.append(DeferredProduct(self.grads[parameter], grad))
        else:
            self.grads[parameter].add(grad)

    def drain(self, products: Sequence[Deferred]) -> None:
        """Compute queued products."""
        for product in products:
            product.accumulate()
