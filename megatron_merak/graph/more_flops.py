"""What a unit computes beside the FLOPs that count for utilisation: what kernels add, what a backward leaves out."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from .. import ops
from ..planner.attention import SHORT, causal_more, masked_more
from .ir.nodes import constant, is_op, op_name, operand, values
from .ir.operators import facts, flops, is_causal


def more_flops(nodes: Iterable[Node], fused: bool) -> tuple[int, tuple[int, int]]:
    """``attention_flops`` and ``more_flops`` of a ``plan.Unit``, from its nodes after ``fuse``. fused: see
    ``cluster.Device``."""
    total = 0
    ahead = 0
    behind = 0
    for node in nodes:
        chunked = node.target is ops.linear_cross_entropy and node.kwargs.get("chunk")
        if chunked or node.target is ops.linear_cross_entropy_stats:  # logits are recomputed
            behind += 2 * _operand(node, 0).numel() * _operand(node, 1).shape[0]
            continue
        if node.target is ops.causal_attention:
            query, key, value = (_operand(node, place) for place in range(3))
            count = _products(query, key.shape[1], value) // 2
            more = causal_more(count, query.shape[1], fused, _dropout(node, 3) > 0)
        elif node.target is ops.attention:
            query, key, value = (_operand(node, place) for place in range(3))
            count = _products(query, key.shape[2], value)
            more = masked_more(count, query.shape[2], fused, _dropout(node, 4) > 0)
        elif is_op(node, "scaled_dot_product_attention"):
            count = flops(node)
            kind = causal_more if is_causal(node) else masked_more
            more = kind(count, SHORT + 1, fused, _dropout(node, 4) > 0)
        else:
            continue
        total = total + count
        ahead = ahead + more[0]
        behind = behind + more[1]
    return total, (ahead, behind)


def _products(query: Tensor, keys: int, value: Tensor) -> int:
    """FLOPs of all scores, and of their product with the values."""
    return 2 * query.numel() // query.shape[-1] * keys * (query.shape[-1] + value.shape[-1])


def _operand(node: Node, place: int) -> Tensor:
    return values(operand(node, place))[0]


def _dropout(node: Node, place: int) -> float:
    rate = node.kwargs.get("dropout_p", node.kwargs.get("dropout", node.args[place] if len(node.args) > place else 0))
    return rate if isinstance(rate, int | float) else 0.0


def unneeded_flops(nodes: Iterable[Node]) -> tuple[int, int]:
    """FLOPs of the products that the backward leaves out: of (inputs, weights) that take no gradient."""
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


def _is_parameter(node: Node) -> bool:
    """Whether a value is a parameter, or one seen or cut in another way."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node.op == "get_attr"
