"""What a unit computes beside the FLOPs that count for utilisation: what kernels add, what a
backward leaves out.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .. import ops
from ..planner.attention import SHORT, causal_more, masked_more
from .ir.nodes import constant, is_op, is_random, op_name, operand, values
from .ir.operators import facts, filled, flops, is_causal

_LOOK_UP = (ops.embedding, ops.embedding_part)


def more_flops(nodes: Iterable[Node], fused: bool) -> tuple[int, tuple[int, int]]:
    """``attention_flops`` and ``more_flops`` of a ``plan.Unit``, from its nodes after ``fuse``.
    fused: see ``cluster.Device``."""
    total = 0
    ahead = 0
    behind = 0
    for node in nodes:
        recomputed = ops.row(node.target).recomputed
        if recomputed is not None:
            behind += recomputed(*_values(node.args), **_values(node.kwargs))
        scores = _scores(node)
        if scores is not None:
            more = causal_more if scores.causal else masked_more
            forward, backward = more(scores.flops, scores.queries, fused, is_random(node))
            total += scores.flops
            ahead += forward
            behind += backward
    return total, (ahead, behind)


def attention_drops(nodes: Iterable[Node]) -> bool:
    """Whether attention among these nodes has dropout."""
    return any(is_random(node) for node in nodes if _scores(node) is not None)


def attention_heads(nodes: Iterable[Node]) -> tuple[int, int]:
    """Return the queries of a head and its features, of the last attention among these nodes; zeros
    without one.
    """
    found = (0, 0)
    for node in nodes:
        scores = _scores(node)
        if scores is not None:
            found = (scores.queries, scores.features)
            if is_op(node, "scaled_dot_product_attention"):
                queries, features = values(operand(node))[0].shape[-2:]
                found = (int(queries), int(features))
    return found


def _scores(node: Node) -> ops.Scores | None:
    """Return the products of attention; None if a node is something else."""
    known = ops.row(node.target).scores
    if known is not None:
        return known(*_values(node.args), **_values(node.kwargs))
    if is_op(node, "scaled_dot_product_attention"):  # which never computes scores in full rows
        features = values(operand(node))[0].shape[-1]
        return ops.Scores(flops(node), SHORT + 1, features, causal=is_causal(node))
    return None


def _values(arguments: Any) -> Any:
    """Return arguments of a node with values in place of nodes."""
    return map_arg(arguments, lambda node: node.meta["val"])


def unneeded_flops(nodes: Iterable[Node]) -> tuple[int, int]:
    """FLOPs of the products that the backward leaves out: of (inputs, weights) that take no
    gradient.
    """
    inputs = 0
    weights = 0
    for node in nodes:
        name = op_name(node)
        if facts(node).attends or not (work := flops(node)):
            continue
        factors: Sequence[Any] = node.args[1:3] if "add" in name else node.args[:2]
        if name == "einsum":
            factors = constant(node, 1)
        for factor in factors:
            if not isinstance(factor, Node) or factor.meta.get("grad", True):
                continue
            if _is_parameter(factor):
                weights += work
            else:
                inputs += work
    return inputs, weights


class ProductFlops(NamedTuple):
    """FLOPs of a product's forward, and of its gradients of inputs and of weights."""

    forward: int
    inputs: int
    weights: int


def product_flops(node: Node) -> ProductFlops:
    """Return the FLOPs of a node after ``fuse`` if it is a product, but not attention; else zeros."""
    if ops.row(node.target).sink is None or node.target in _LOOK_UP:
        work = 0 if facts(node).attends else flops(node)
        inputs, weights = unneeded_flops([node])
        return ProductFlops(work, work - inputs, work - weights)
    x = operand(node)
    rows = round(filled(node) * values(x)[0].numel() / values(x)[0].shape[-1])
    given: Any = node.args[1]
    factors = list(given) if isinstance(given, list | tuple) else [given]
    counts = [values_of_row(node.target, values(factor)[0]) for factor in factors]
    formats: Any = node.kwargs.get("formats") or ()
    for place, how in enumerate(formats):
        if how is not None:  # its value is what is stored
            counts[place] = prod(how.shape)
    work = 2 * rows * sum(counts)
    pairs = zip(factors, counts, strict=True)
    of_weights = 2 * rows * sum(count for factor, count in pairs if factor.meta["grad"])
    return ProductFlops(work, work if x.meta["grad"] else 0, of_weights)


def values_of_row(operation: object, weight: Tensor) -> int:
    """Return how many values of a weight an operation multiplies each row with."""
    return weight[0].numel() if ops.row(operation).grouped else weight.numel()


def _is_parameter(node: Node) -> bool:
    """Whether a value is a parameter, or one seen or cut in another way."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"
