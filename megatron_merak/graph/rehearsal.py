"""Runs the forward and the backward of a unit on fake tensors, and counts their bytes as an allocator
does: what a unit needs only while it runs.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import ops
from .ir.marks import (
    MARKS,
    all_gather,
    copy_in,
    exchange,
    exchange_rows,
    reduce_scatter,
    reduce_sum,
)
from .ir.nodes import called, operand, values
from .ir.operators import facts
from .lowering.emit import call_with_sink
from .lowering.flow import Flow
from .replay import fake_input, tensors_of

_PRODUCT_ROWS = 2048  # of a 16-bit weight gradient that a CPU computes before it adds them


class _Allocator(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._living: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._take(tensor.untyped_storage())
        return results

    def known(self, tensor: Tensor) -> None:
        """Do not count a tensor that was there before."""
        self._living[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        found = self._living.get(key)
        if found is not None and found() is not None:
            return
        size = storage.nbytes()

        def free(ended: weakref.ref) -> None:
            self.now -= size
            if self._living.get(key) is ended:
                del self._living[key]

        self._living[key] = weakref.ref(storage, free)
        self.now += size
        self.most = max(self.most, self.now)


class _HeldOperands:
    """Keeps the operands of weight gradients as the engine does: until the collective is launched
    that they overlap with, or until a W (``defers``).

    adds: whether 16-bit products are added to fp32 gradients without a copy.
    """

    def __init__(self, defers: bool, overlaps: bool, adds: bool):
        self.defers = defers
        self.adds = adds
        self._holds = defers or overlaps
        self._held: list[Callable[[], object]] = []
        self._parts: list[Tensor] = []  # of tensors in flight

    def _take(self, compute: Callable[[], object], now: bool = False) -> None:
        """Compute a weight gradient now, or keep what does so, with its operands."""
        if self._holds and not now:
            self._held.append(compute)
        else:
            compute()

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        self._take(partial(self._multiply, grad_output.detach(), input.detach()), now)

    def _multiply(self, grad_output: Tensor, input: Tensor) -> None:
        if not self.adds and grad_output.dtype != torch.float32:
            rows = grad_output[:, :_PRODUCT_ROWS]
            grad_output.new_empty(rows.shape[1], input.shape[1])

    def grouped(self, weight: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
        self._take(partial(self._multiply_groups, left.detach(), right.detach(), ends))

    def _multiply_groups(self, left: Tensor, right: Tensor, ends: Tensor) -> None:
        """A device with a kernel for all groups makes the products of all before it adds them, in
        16 bits; others one by one.
        """
        if left.dtype != torch.float32:
            groups = len(ends) if self.adds else 1
            left.new_empty((groups, left.shape[1], right.shape[1]))

    def product(self, weight: Tensor, product: Callable[[torch.dtype], Tensor]) -> None:
        self._take(partial(product, torch.float32))

    def largest(self, values: Tensor) -> Tensor:
        return values

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        self._take(partial(_keep, grad_output.detach(), index))

    def getter(self, input: Tensor) -> Callable[[], Tensor] | None:
        return None

    def launched(self, *tensors: Tensor) -> None:
        """A collective of a backward is in flight, so that its segment ends."""
        self._parts = list(tensors)
        if not self.defers:
            for compute in self._held:
                compute()
            self._held.clear()


def _keep(*operands: Tensor) -> None:
    """Rows are added where they belong, without a copy."""


class _Mark(torch.autograd.Function):
    """A collective: what it makes, and makes of the gradient, beside what it reads."""

    @staticmethod
    def forward(ctx, x, shape, target, alone, sink):
        ctx.shape = x.shape
        ctx.target = target
        ctx.sink = sink
        if target is copy_in or target is reduce_sum and alone:
            return x.view_as(x)
        return _sent(x, shape, target)

    @staticmethod
    def backward(ctx, grad):
        if ctx.target is reduce_sum:
            return grad, None, None, None, None
        made = _sent(grad, ctx.shape, ctx.target)
        ctx.sink.launched(grad, made)
        return made, None, None, None, None


def _sent(x: Tensor, shape: torch.Size, target: object) -> Tensor:
    """Return what comes of a collective, with the copies that are made on the way."""
    if target in (all_gather, reduce_scatter):
        beside = x.new_empty(max(x.numel(), shape.numel()))
        made = x.new_empty(shape)
        del beside
        return made
    if target in (exchange, exchange_rows):
        sent = x.contiguous()
        made = x.new_empty(shape)
        del sent
        return made
    return x.new_empty(shape)


class _Fused(torch.autograd.Function):
    """Attention in one kernel: an fp32 statistic per query is saved, and the backward sums the
    gradient of the queries in fp32, and those of shared keys and values for each query head.
    """

    @staticmethod
    def forward(ctx, query, key, value, like):
        statistics = query.new_empty(query.numel() // query.shape[-1], dtype=torch.float32)
        result = query.new_empty(like.shape)
        ctx.save_for_backward(query, key, value, result, statistics)
        return result

    @staticmethod
    def backward(ctx, grad):
        query, key, value, _, _ = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        sums = query.new_empty(query.shape, dtype=torch.float32)
        shared = [x.new_empty(query.numel()) for x in (key, value) if x.numel() < query.numel()]
        del sums, shared
        return *grads, None


class _Rehearsal:
    def __init__(
        self, nodes: Sequence[Node], flow: Flow, fused_attention: bool, sink: _HeldOperands
    ):
        self.nodes = nodes
        self.flow = flow
        self.fused_attention = fused_attention
        self.sink = sink
        self.outside: dict[Node, Any] = {}
        self.inner = dict.fromkeys(nodes)
        self.last_use: dict[Node, int] = {}
        for index, node in enumerate(nodes):
            for read in node.all_input_nodes:
                self.last_use[flow.resolve(read)] = index
        self.leaving = [
            node
            for node in nodes
            if node in flow.outputs or any(user not in self.inner for user in node.users)
        ]

    def inputs(self) -> Iterator[Tensor]:
        """Make what comes from outside, and yield the tensors among it."""
        for node in self.nodes:
            for read in map(self.flow.resolve, node.all_input_nodes):
                if read not in self.inner and read not in self.outside:
                    self.outside[read] = fake_input(self.flow, read)
                    yield from tensors_of(self.outside[read])

    def forward(self) -> list[Tensor]:
        """Run the nodes, free every value after its last use, and return those that leave."""
        results: dict[Node, Any] = {}

        def value(node: Node) -> Any:
            node = self.flow.resolve(node)
            return results[node] if node in results else self.outside[node]

        for index, node in enumerate(self.nodes):
            results[node] = self._run(node, value)
            for read in map(self.flow.resolve, node.all_input_nodes):
                if read in results and self.last_use[read] == index and read not in self.leaving:
                    del results[read]
        return [x for node in self.leaving for x in tensors_of(results[node])]

    def _run(self, node: Node, value: Callable[[Node], Any]) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), value)
        if node.target in MARKS:
            source = operand(node)
            alone = len(source.users) == 1 and facts(source).result_unread
            shape = values(node)[0].shape
            return _Mark.apply(args[0], shape, node.target, alone, self.sink)
        if self.fused_attention and facts(node).attends and node.target is not ops.ring_part:
            (like,) = values(node)
            return _Fused.apply(*args[:3], like)
        call = call_with_sink(self.flow, node)
        if call is None:
            return called(node)(*args, **kwargs)
        args, options = map_arg((call.args, call.options), value)
        return call.operation(*args, **options, sink=self.sink)

    def wanted(self) -> list[GradientEdge]:
        """Return where the gradients of inputs and parameters arrive."""
        return [
            get_gradient_edge(x)
            for value in self.outside.values()
            for x in tensors_of(value)
            if x.requires_grad
        ]


def rehearse(
    nodes: Sequence[Node],
    flow: Flow,
    fused_attention: bool,
    saved: int,
    unread: int,
    overlaps: bool = False,
) -> tuple[int, int, int]:
    """Return ``Unit.running_bytes`` of a unit.

    fused_attention: see ``cluster.Device``; where it is, the device also adds 16-bit products to
                     fp32 gradients.
    saved, unread:   ``saved_bytes`` and ``unread_bytes`` of the unit.
    overlaps:        whether weight gradients wait for the launch of a collective.
    """
    found = []
    for defers in (False, True):
        sink = _HeldOperands(defers, overlaps, fused_attention)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            rehearsal = _Rehearsal(nodes, flow, fused_attention, sink)
            inputs = [*rehearsal.inputs()]
            with _Allocator() as allocator:
                for tensor in inputs:
                    allocator.known(tensor)
                outputs = rehearsal.forward()
                forward = allocator.most
                roots = [get_gradient_edge(x) for x in outputs if x.requires_grad]
                grads = [torch.empty_like(x) for x in outputs if x.requires_grad]
                del outputs
                allocator.most = allocator.now
                if roots:
                    wanted = rehearsal.wanted()
                    results = torch.autograd.grad(roots, wanted, grads, allow_unused=True)
                    del results
        found.append((forward - saved + unread, allocator.most - saved))
    (forward, backward), (_, deferred) = found
    return max(0, forward), max(0, backward), max(0, deferred)
