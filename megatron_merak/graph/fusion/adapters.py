"""Fusion of adapters of low rank with the frozen linear layers that they are added to, and what
joins layers of one input, with adapters or without.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from ... import ops
from ..ir.inplace import call as new_node
from ..ir.kinds import kinds
from ..ir.nodes import constant, is_op, operand
from ..lowering.flow import REDUCTIONS
from .patterns import Match, Var, add, call, mul
from .pointwise import value


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a graph.

    up:     B of its adapter; None: it has none.
    down:   A; None where ``hidden`` is given.
    hidden: what B multiplies, computed elsewhere; None where it is the input times A.
    """

    input: Node
    weight: Node
    bias: Node | None
    up: Node | None = None
    down: Node | None = None
    hidden: Node | None = None
    scale: float = 1.0

    @property
    def parameters(self) -> list[Node]:
        all_of_them = (self.weight, self.bias, self.down, self.up)
        return [each for each in all_of_them if each is not None]


def layer_of(node: object) -> LinearLayer | None:
    """Return the linear layer that a node computes; None if it is something else, or several."""
    if not isinstance(node, Node):
        return None
    if is_op(node, "linear"):
        bias = constant(node, 2) if len(node.args) > 2 else None
        return LinearLayer(operand(node), operand(node, 1), bias)
    if node.target is not ops.adapted_linear or len(constant(node, 2)) > 1:
        return None
    (bias,) = constant(node, 2)
    weight, *factors = constant(node, 1)
    (scale,) = constant(node, 5)
    plain = LinearLayer(operand(node), weight, bias, factors[-1], scale=scale)
    if hiddens := constant(node, 3):
        return replace(plain, hidden=hiddens[0])
    return replace(plain, down=factors[0])


def is_weight(node: object) -> bool:
    return isinstance(node, Node) and node.op == "get_attr" and value(node).dim() == 2


def can_share(node: Node, written: Collection[Node]) -> bool:
    """Whether a node is a linear layer that may join a group: it reads parameters directly and its
    result is not all-reduced.
    """
    layer = layer_of(node)
    if layer is None or node.meta.get("unit") is None or not node.meta.get("grad"):
        return False
    if any(user.target in REDUCTIONS for user in node.users):
        return False
    if any(each in written for each in (node, layer.input, *layer.parameters)):
        return False
    if not layer.input.meta.get("grad", False) or not is_weight(layer.weight):
        return False
    return layer.bias is None or layer.bias.op == "get_attr"


def fit_together(layers: Sequence[LinearLayer]) -> bool:
    """Whether one operation computes the layers: all of their adapters have A, or none has."""
    return len({layer.down is None for layer in layers if layer.up is not None}) < 2


def join(
    graph: Graph, like: Node, layers: Sequence[LinearLayer], views: bool | None = None
) -> Node:
    """Add a node that computes layers of one input.

    like:  a layer, whose meta the node gets.
    views: see ``ops.linears``; None: there is one result, of all layers side by side.
    """
    input = layers[0].input
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    places = [place for place, layer in enumerate(layers) if layer.up is not None]
    adapted = [layers[place] for place in places]
    operands: list[Any] = [input, weights]
    operation: Callable[..., Any]
    if adapted:
        operation = ops.adapted_linear if views is None else ops.adapted_linears
        weights += [layer.down for layer in adapted if layer.down is not None]
        weights += [layer.up for layer in adapted if layer.up is not None]
        hiddens = [layer.hidden for layer in adapted if layer.hidden is not None]
        scales = [layer.scale for layer in adapted]
        operands += [biases, hiddens, places, scales]
    elif views is not None:
        operation = ops.linears
        operands.append(biases)
    else:
        operation = ops.joined_linear
        if any(bias is not None for bias in biases):
            operands.append([bias for bias in biases if bias is not None])
    if views:
        operands.append(True)
    return new_node(graph, like, operation, *operands)


# W and its bias are frozen; x A^T may be computed on other ranks' parts, or of what dropout left.
_ADAPTED = add(
    call("linear", Var("x"), Var("weight"), Var("bias")),
    mul(call("linear", Var("hidden"), Var("up"), None), Var("scale")),
)


def _join_adapter(graph: Graph, root: Node, match: Match) -> Node | None:
    weight = match["weight"]
    up = match["up"]
    hidden = match["hidden"]
    scale = match["scale"]
    if not (is_weight(weight) and is_weight(up)) or not isinstance(scale, int | float):
        return None
    if weight.meta["grad"] or not up.meta["grad"] or not isinstance(hidden, Node):
        return None
    if len({value(each).dtype for each in (match["x"], weight, hidden, up, root)}) > 1:
        return None
    if value(hidden).shape[:-1] != value(match["x"]).shape[:-1]:
        return None
    down = _down(hidden, match, root)
    layer = LinearLayer(match["x"], weight, match["bias"], up, down=down, scale=float(scale))
    return join(graph, root, [layer if down is not None else replace(layer, hidden=hidden)])


def _down(hidden: Node, match: Match, root: Node) -> Node | None:
    """Return A where x A^T is computed for this layer alone, where the layer is, and trained."""
    first = layer_of(hidden) if is_op(hidden, "linear") else None
    if first is None or first.input is not match["x"] or first.bias is not None:
        return None
    if len(hidden.users) > 1 or not is_weight(first.weight) or not first.weight.meta["grad"]:
        return None
    home = (root.meta.get("unit"), kinds(root))
    return first.weight if (hidden.meta.get("unit"), kinds(hidden)) == home else None


ROWS = (("adapters with frozen layers", _ADAPTED, _join_adapter, True),)
