"""Rules of functions along the divided dimension, for the losses that users write themselves over a vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.gradients import passes_gradient
from ..ir.nodes import op_name, values
from . import across, rules_shape
from .placement import Decision, Filler, Split
from .propagate import VOCABULARY_ROWS, Propagation
from .rules_value import along, argument, dims_of, reduction

aten = torch.ops.aten


def _far(p: Propagation, node: Node, dims: tuple[int, ...]) -> bool:
    """Whether a node works along the divided dimension, and that is a vocabulary by its size."""
    split = p.subject(node)
    floating = values(node.args[0])[0].is_floating_point()
    return split.dim in dims and sum(split.blocks) >= VOCABULARY_ROWS and floating


def _lowest(node: Node, split: Split) -> dict[Node, Filler]:
    """The fill that no maximum and no exponential sees."""
    x = node.args[0]
    return {x: torch.finfo(values(x)[0].dtype).min} if split.padded else {}


def logsumexp(p: Propagation, node: Node) -> Decision:
    dims = dims_of(p, node, "dim")
    if not _far(p, node, dims):
        return reduction(p, node)
    keepdim, dtype = bool(argument(node, "keepdim")), values(node)[0].dtype

    def write(writer: Any, node: Node) -> Node:
        part = writer.call(across.log_total, (writer.operand(node.args[0]), dims, keepdim))
        return writer.call(across.joined_log_total, (writer.stack(part), dtype), like=node, sharded=False)

    return Decision(None, fills=_lowest(node, p.subject(node)), write=write)


def softmax(p: Propagation, node: Node) -> Decision:
    """softmax, log_softmax: the ranks exchange the logarithm of every row's sum."""
    dims = dims_of(p, node, "dim")
    if not _far(p, node, dims):
        return along(p, node)
    dtype = values(node)[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    function = across.log_shares if "log" in op_name(node) else across.shares

    def write(writer: Any, node: Node) -> Node:
        part = writer.operand(node.args[0])
        if part.meta["val"].dtype.itemsize < dtype.itemsize:
            part = writer.call(aten.to.dtype, (part, dtype))
        total = writer.stack(writer.call(across.log_total, (part, dims, True)))
        total = writer.call(across.joined_log_total, (total, wide), sharded=False)
        return writer.call(function, (part, writer.enter(total), dtype))

    split = p.subject(node)
    return Decision(replace(split, filler=None), fills=_lowest(node, split), write=write)


def amax(p: Propagation, node: Node) -> Decision:
    dims = dims_of(p, node, "dim")
    if not _far(p, node, dims):
        return reduction(p, node)

    def write(writer: Any, node: Node) -> Node:
        part = writer.operand(node.args[0])
        fixed = writer.call(aten.detach.default, (part,))
        tops = writer.stack(writer.call(aten.amax.default, (fixed, dims, True)))
        top = writer.call(aten.amax.default, (tops, [0]), sharded=False)
        if part.meta["grad"] and any(map(passes_gradient, node.users)):
            count = writer.sum(writer.call(across.ties, (fixed, top, dims)))
            slope = writer.sum(writer.call(across.slope_of_top, (part, top, count, dims)))
            top = writer.call(aten.add.Tensor, (top, slope), sharded=False)
        return writer.call(aten.reshape.default, (top, list(p.shape(node))), like=node, sharded=False)

    return Decision(None, fills=_lowest(node, p.subject(node)), write=write)


def _summed(p: Propagation, split: Split, function: Callable, *args: Any) -> Callable[[Any, Node], Node]:
    """Writes the sum over the ranks of what each picks from its part; ``args`` come before the part's start."""

    def write(writer: Any, node: Node) -> Node:
        given = [[writer.get(x) for x in a] if isinstance(a, list) else a for a in args]
        given = [writer.get(a) if isinstance(a, Node) else a for a in given]
        start = writer.rank * split.extent(p.tp)
        return writer.sum(writer.call(function, (writer.operand(node.args[0]), *given, start)))

    return write


def gather(p: Propagation, node: Node) -> Decision:
    x, dim, index = node.args[:3]
    split = p.layout(x)
    dim %= len(p.shape(x))
    if split is None or p.layout(index) is not None or dim != split.dim or len(split.blocks) > 1:
        return rules_shape.gather(p, node)
    return Decision(None, write=_summed(p, split, across.picked, dim, index))


def index(p: Propagation, node: Node) -> Decision:
    """x[i, j, ...] with an index for every dimension: each rank has some of the entries."""
    x, indices = node.args[:2]
    split = p.subject(node)
    every = len(indices) == len(p.shape(x)) and all(isinstance(i, Node) and p.layout(i) is None for i in indices)
    if not every or len(split.blocks) > 1 or any(values(i)[0].dtype in (torch.bool, torch.uint8) for i in indices):
        return rules_shape.index(p, node)

    def write(writer: Any, node: Node) -> Node:
        start, extent = writer.rank * split.extent(p.tp), sum(split.blocks)
        given = (writer.operand(x), [writer.get(i) for i in indices], split.dim, start, extent)
        return writer.sum(writer.call(across.picked_at, given))

    return Decision(None, write=write)


def nll_loss(p: Propagation, node: Node) -> Decision:
    x, target = node.args[:2]
    split = p.subject(node)
    if split.dim != min(len(p.shape(x)) - 1, 1) or len(split.blocks) > 1 or p.layout(target) is not None:
        raise p.unfit(node, "takes classes in several pieces, or other dimensions in parts")
    if argument(node, "weight") is not None:
        raise p.unfit(node, "weights the classes")
    pick = _summed(p, split, across.picked_classes, target)

    def write(writer: Any, node: Node) -> Node:
        args = (pick(writer, node), writer.get(target), argument(node, "reduction"), argument(node, "ignore_index"))
        return writer.call(across.loss_of_picked, args, like=node, sharded=False)

    return Decision(None, write=write)


def maximum(p: Propagation, node: Node) -> Decision:
    """max(x, dim), argmax(x, dim): the first of several maxima counts."""
    x, dims = node.args[0], dims_of(p, node, "dim")
    split = p.subject(node)
    if not _far(p, node, dims) or len(dims) > 1 or len(split.blocks) > 1:
        return reduction(p, node)
    shape, dim = list(p.shape(node)), split.dim

    def write(writer: Any, node: Node) -> Node:
        part, start = writer.operand(x), writer.rank * split.extent(p.tp)
        fixed = writer.call(aten.detach.default, (part,))
        tops = writer.stack(writer.call(aten.amax.default, (fixed, [dim], True)))
        places = writer.stack(writer.call(across.place_of_top, (fixed, dim, start)))
        place = writer.call(across.joined_place, (tops, places), sharded=False)
        only = {} if op_name(node) == "max" else {"like": node}
        made = writer.call(aten.reshape.default, (place, shape), sharded=False, **only)
        if op_name(node) != "max":
            return made
        top = writer.sum(writer.call(across.picked, (part, dim, place, start)))
        top = writer.call(aten.reshape.default, (top, shape), sharded=False)
        return writer.call(across.both, (top, made), like=node, sharded=False)

    return Decision(None, fills=_lowest(node, split), write=write)
