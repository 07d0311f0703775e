"""Lowers linear layers with weights in 4 bits: their operations get these as they are stored."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ... import ops
from ...errors import PlanError
from ...ops import FourBit
from ...plan import TensorSharding
from ..ir.inplace import call as new_node
from ..ir.nodes import constant, is_op, operand
from .pointwise import value

_GROUPS = (ops.linears, ops.joined_linear, ops.adapted_linear, ops.adapted_linears)
_FLAG = "--tensor-model-parallel-size"


def stored_as(how: FourBit, shape: Sequence[int]) -> FourBit:
    """Return how a rank stores its shard, of ``shape``, of a weight in 4 bits.

    The scales of a part are in fp32, since blocks of scales in 8 bits are of the whole.
    """
    rows, columns = shape
    whole = (rows, columns) == how.shape
    return how._replace(rows=rows, columns=columns, nested=how.nested and whole)


def check_cuts(
    weights: Mapping[str, FourBit], tensors: Mapping[str, TensorSharding], tp: int
) -> None:
    """Raise PlanError for a weight in 4 bits that is cut inside of a block."""
    for name, how in weights.items():
        tensor = tensors[name]
        if tensor.dim is None or tp == 1:
            continue
        if tensor.experts or tensor.padded is not None:
            what = "its experts are divided" if tensor.experts else "its features are padded"
            raise _refused(f"{name} is in 4 bits, and {what}", tp)
        cuts = [edge for rank in range(tp) for pair in tensor.intervals(rank, tp) for edge in pair]
        if tensor.dim == 1 and any(edge % how.block for edge in cuts):
            reason = f"{name}, {how.rows} x {how.columns} in 4 bits, is cut inside of blocks of "
            raise _refused(f"{reason}{how.block} values of a row", tp)


def _refused(reason: str, tp: int) -> PlanError:
    remedy = "Use a smaller degree, or pipeline parallelism"
    return PlanError(_FLAG, tp, reason, remedy)


def to_four_bit(graph: Graph, weights: Mapping[str, FourBit]) -> int:
    """Let the operations of a fused graph read weights in 4 bits as they are stored, in place;
    return how many these are.

    weights: of the unsharded model, by name.
    """
    formats: dict[Node, FourBit] = {}
    readers: dict[Node, None] = {}
    for node in graph.find_nodes(op="get_attr"):
        if node.target in weights:
            formats[node] = stored_as(weights[str(node.target)], value(node).shape)
            readers |= dict.fromkeys(node.users)
    for node, how in formats.items():
        node.meta["val"] = value(node).new_empty((ops.stored_bytes(how),), dtype=torch.uint8)
    for node in readers:
        _lower(graph, node, formats)
    return len({*map(str, (node.target for node in formats))})


def _lower(graph: Graph, node: Node, formats: Mapping[Node, FourBit]) -> None:
    operation: Callable[..., Any]
    if is_op(node, "linear"):
        input, weight, *rest = node.args
        biases = [bias for bias in rest if bias is not None]
        operation = ops.joined_linear
        operands: tuple[Any, ...] = (input, [weight], biases)
    else:
        assert node.target in _GROUPS, f"{node.format_node()} reads a weight in 4 bits"
        operation = node.target
        operands = node.args
    count = len(operands[1])
    if operation in (ops.adapted_linear, ops.adapted_linears):
        count = len(constant(node, 2))
    of_weights = [formats.get(weight) for weight in operands[1][:count]]
    with graph.inserting_before(node):
        new = new_node(graph, node, operation, *operands, formats=of_weights)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def unpacked_bytes(nodes: Sequence[Node]) -> tuple[int, int]:
    """Return the bytes that are read and written to make matrices of weights in 4 bits, of
    (forward, backward).

    nodes: of a unit of a lowered graph.
    """
    forward = 0
    backward = 0
    for node in nodes:
        if node.op != "call_function":
            continue
        formats: Any = node.kwargs.get("formats") or ()
        for how in formats:
            if how is None:
                continue
            moved = ops.stored_bytes(how) + prod(how.shape) * value(operand(node)).element_size()
            forward += moved
            if operand(node).meta.get("grad", True):
                backward += moved
    return forward, backward
