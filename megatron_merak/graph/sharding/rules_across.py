"""Rules of operators along a sharded vocabulary, for losses that users write themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.gradients import passes_gradient
from ..ir.nodes import constant, op_name, operand, operands, values
from . import across, rules_shape
from .known import VOCABULARY_ROWS, Known
from .placement import Decision, Layout, PaddingValue
from .rules_value import along, argument, dims_of, reduction
from .writer import Writer

aten = torch.ops.aten


def _along_vocabulary(p: Known, node: Node, dims: tuple[int, ...]) -> bool:
    """Whether a node works along the sharded dimension, and that is large enough for a
    vocabulary.
    """
    layout = p.input_layout(node)
    floating = values(operand(node))[0].is_floating_point()
    return layout.dim in dims and sum(layout.blocks) >= VOCABULARY_ROWS and floating


def _fill_lowest(node: Node, layout: Layout) -> dict[Node, PaddingValue]:
    """Return fills with the lowest number, which changes no maximum and no sum of exponentials."""
    x = operand(node)
    return {x: torch.finfo(values(x)[0].dtype).min} if layout.padded else {}


def logsumexp(p: Known, node: Node) -> Decision:
    dims = dims_of(p, node, "dim")
    if not _along_vocabulary(p, node, dims):
        return reduction(p, node)
    keepdim = bool(argument(node, "keepdim"))
    dtype = values(node)[0].dtype

    def write(writer: Writer, node: Node) -> Node:
        own = writer.call(across.log_sum_exp, (writer.operand(operand(node)), dims, keepdim))
        return writer.call(
            across.combined_log_sum_exp, (writer.stack(own), dtype), like=node, sharded=False
        )

    return Decision(None, fills=_fill_lowest(node, p.input_layout(node)), write=write)


def softmax(p: Known, node: Node) -> Decision:
    """softmax, log_softmax: the ranks exchange the log-sum-exp of every row."""
    dims = dims_of(p, node, "dim")
    if not _along_vocabulary(p, node, dims):
        return along(p, node)
    dtype = values(node)[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    function = across.log_softmax_shard if "log" in op_name(node) else across.softmax_shard

    def write(writer: Writer, node: Node) -> Node:
        shard = writer.operand(operand(node))
        if shard.meta["val"].dtype.itemsize < dtype.itemsize:
            shard = writer.call(aten.to.dtype, (shard, dtype))
        totals = writer.stack(writer.call(across.log_sum_exp, (shard, dims, True)))
        total = writer.call(across.combined_log_sum_exp, (totals, wide), sharded=False)
        return writer.call(function, (shard, writer.enter(total), dtype))

    layout = p.input_layout(node)
    return Decision(
        replace(layout, padding_value=None), fills=_fill_lowest(node, layout), write=write
    )


def amax(p: Known, node: Node) -> Decision:
    dims = dims_of(p, node, "dim")
    if not _along_vocabulary(p, node, dims):
        return reduction(p, node)

    def write(writer: Writer, node: Node) -> Node:
        shard = writer.operand(operand(node))
        detached = writer.call(aten.detach.default, (shard,))
        maxima = writer.stack(writer.call(aten.amax.default, (detached, dims, True)))
        largest = writer.call(aten.amax.default, (maxima, [0]), sharded=False)
        if shard.meta["grad"] and any(map(passes_gradient, node.users)):
            count = writer.sum(writer.call(across.count_of_max, (detached, largest, dims)))
            gradient = writer.sum(
                writer.call(across.gradient_of_max, (shard, largest, count, dims))
            )
            largest = writer.call(aten.add.Tensor, (largest, gradient), sharded=False)
        return writer.call(
            aten.reshape.default, (largest, list(p.shape(node))), like=node, sharded=False
        )

    return Decision(None, fills=_fill_lowest(node, p.input_layout(node)), write=write)


def _reduced(
    p: Known, layout: Layout, function: Callable, *args: Any
) -> Callable[[Writer, Node], Node]:
    """Return a ``Decision.write`` for the all-reduce of function(shard of the first operand, *args,
    start of the shard)."""

    def write(writer: Writer, node: Node) -> Node:
        operands = [[writer.get(x) for x in a] if isinstance(a, list) else a for a in args]
        operands = [writer.get(a) if isinstance(a, Node) else a for a in operands]
        start = writer.rank * layout.extent(p.tp)
        return writer.sum(writer.call(function, (writer.operand(operand(node)), *operands, start)))

    return write


def gather(p: Known, node: Node) -> Decision:
    x, index = operands(node, 0, 2)
    dim = constant(node, 1)
    layout = p.layout(x)
    dim %= len(p.shape(x))
    if layout is None or p.layout(index) is not None or dim != layout.dim or len(layout.blocks) > 1:
        return rules_shape.gather(p, node)
    return Decision(None, write=_reduced(p, layout, across.gather_own, dim, index))


def index(p: Known, node: Node) -> Decision:
    """x[i, j, ...] with an index for every dimension: each rank has some of the entries."""
    x = operand(node)
    indices = constant(node, 1)
    layout = p.input_layout(node)
    full = len(indices) == len(p.shape(x)) and all(
        isinstance(i, Node) and p.layout(i) is None for i in indices
    )
    if (
        not full
        or len(layout.blocks) > 1
        or any(values(i)[0].dtype in (torch.bool, torch.uint8) for i in indices)
    ):
        return rules_shape.index(p, node)

    def write(writer: Writer, node: Node) -> Node:
        start = writer.rank * layout.extent(p.tp)
        extent = sum(layout.blocks)
        args = (writer.operand(x), [writer.get(i) for i in indices], layout.dim, start, extent)
        return writer.sum(writer.call(across.index_own, args))

    return Decision(None, write=write)


def nll_loss(p: Known, node: Node) -> Decision:
    x, target = operands(node, 0, 1)
    layout = p.input_layout(node)
    if (
        layout.dim != min(len(p.shape(x)) - 1, 1)
        or len(layout.blocks) > 1
        or p.layout(target) is not None
    ):
        raise p.cannot_shard(node, "has classes in several blocks, or another dimension sharded")
    if argument(node, "weight") is not None:
        raise p.cannot_shard(node, "weights the classes")
    write_log_probs = _reduced(p, layout, across.gather_own_classes, target)

    def write(writer: Writer, node: Node) -> Node:
        log_probs = write_log_probs(writer, node)
        args = (
            log_probs,
            writer.get(target),
            argument(node, "reduction"),
            argument(node, "ignore_index"),
        )
        return writer.call(across.nll_of_log_probs, args, like=node, sharded=False)

    return Decision(None, write=write)


def maximum(p: Known, node: Node) -> Decision:
    """max(x, dim), argmax(x, dim): the first of several maxima counts."""
    x = operand(node)
    dims = dims_of(p, node, "dim")
    layout = p.input_layout(node)
    if not _along_vocabulary(p, node, dims) or len(dims) > 1 or len(layout.blocks) > 1:
        return reduction(p, node)
    shape = list(p.shape(node))
    dim = layout.dim

    def write(writer: Writer, node: Node) -> Node:
        shard = writer.operand(x)
        start = writer.rank * layout.extent(p.tp)
        detached = writer.call(aten.detach.default, (shard,))
        maxima = writer.stack(writer.call(aten.amax.default, (detached, [dim], True)))
        indices = writer.stack(writer.call(across.own_argmax, (detached, dim, start)))
        index = writer.call(across.combined_argmax, (maxima, indices), sharded=False)
        if op_name(node) != "max":
            return writer.call(aten.reshape.default, (index, shape), like=node, sharded=False)
        reshaped = writer.call(aten.reshape.default, (index, shape), sharded=False)
        largest = writer.sum(writer.call(across.gather_own, (shard, dim, index, start)))
        largest = writer.call(aten.reshape.default, (largest, shape), sharded=False)
        return writer.call(across.max_and_index, (largest, reshaped), like=node, sharded=False)

    return Decision(None, fills=_fill_lowest(node, layout), write=write)
