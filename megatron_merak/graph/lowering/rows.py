"""Routed rows as what follows wants them, see ``routed``.

Their weights come before the last product of their experts:

    (silu(gate) * up) W * weight  =  (silu(gate) * up * weight) W

No backward reads that product's rows then, so none of a layer's widest values is kept for the
gradient of the weights; and a rank that has the experts gets the weights with the rows.

The inverse of an order is written as a sort of it, however a model finds it.
"""

import operator
from collections.abc import Container

import torch
from torch.fx import Graph, Node

from ..ir.aliases import changing
from ..ir.inplace import call as new_node
from ..ir.nodes import constant, is_op, is_random, op_name, operand, values
from ..sharding.experts import GROUPED
from .routed import sort_for_inverse

aten = torch.ops.aten


def prepare_rows(graph: Graph) -> None:
    """Multiply rows by their weights before the last product of gated experts, where nothing else
    reads what that computes, and find inverses by sorts.
    """
    products = [node for node in graph.nodes if op_name(node) in GROUPED]
    if not products:
        return
    for node in list(graph.nodes):
        if op_name(node) == "sort":
            sort_for_inverse(node)
    written = changing(graph)
    for product in products:
        found = _weighted(product, written)
        if found is not None:
            reader, weights = found
            _move(graph, product, reader, weights, written=written)


def _weighted(product: Node, written: Container[Node]) -> tuple[Node, Node] | None:
    """Return what multiplies a product's rows, one number each, and these numbers."""
    if len(product.users) != 1:
        return None
    (reader,) = product.users
    if not is_op(reader, "mul") or reader in written or product in written:
        return None
    if not _is_swiglu(operand(product)):
        return None
    weights = next((x for x in reader.args[:2] if x is not product), None)
    if not isinstance(weights, Node) or reader.meta.get("unit") != product.meta.get("unit"):
        return None
    (rows,) = values(product)
    (value,) = values(weights)
    if value.shape != (*rows.shape[:1], 1) or rows.dim() != 2:
        return None
    return reader, weights


def _is_swiglu(node: Node) -> bool:
    """Whether a value is silu(gate) * up, of the halves of one value, for one reader."""
    if not is_op(node, "mul") or len(node.users) != 1:
        return False
    factors = [x for x in node.args[:2] if isinstance(x, Node)]
    gates = [x for x in factors if is_op(x, "silu")]
    ups = [x for x in factors if x.target is operator.getitem]
    if len(gates) != 1 or len(ups) != 1:
        return False
    halves = (operand(gates[0]), ups[0])
    source = operand(ups[0])
    if not is_op(source, "chunk", "split", "split_with_sizes"):
        return False
    if any(x.target is not operator.getitem or operand(x) is not source for x in halves):
        return False
    return [constant(x, 1) for x in halves] == [0, 1]


def _move(
    graph: Graph, product: Node, reader: Node, weights: Node, written: Container[Node]
) -> None:
    """Multiply what ``product`` reads in place of what it computes, if the weights can be known then."""
    late = _computed_behind(product, weights)
    if late is None or any(node in written or is_random(node) for node in late):
        return
    for node in late:
        product.prepend(node)
    rows = operand(product)
    with graph.inserting_before(product):
        weighted = new_node(graph, rows, aten.mul.Tensor, rows, weights)
        if values(weighted)[0].dtype != values(rows)[0].dtype:
            weighted = new_node(graph, rows, aten.to.dtype, weighted, values(rows)[0].dtype)
    product.replace_input_with(rows, weighted)
    result = product
    if values(product)[0].dtype != values(reader)[0].dtype:
        with graph.inserting_before(reader):
            dtype = values(reader)[0].dtype
            result = new_node(graph, reader, aten.to.dtype, product, dtype)
    reader.replace_all_uses_with(result)
    graph.erase_node(reader)


def _computed_behind(product: Node, value: Node) -> list[Node] | None:
    """Return what is computed behind a product for a value, in order; None if the product is, too."""
    needed = {value}
    late = []
    node = value
    while node is not product:
        if node.op == "root":
            return []
        if node in needed:
            late.append(node)
            needed |= set(node.all_input_nodes)
        node = node.prev
    return None if product in needed else late[::-1]
