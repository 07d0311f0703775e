"""Plain Python functions out of nodes of a rewritten graph."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_aggregate

from ... import ops
from ..sharding.local import embedding_part
from .flow import Flow

# Operations that hand the gradient of a weight, or of several, their second argument, to a sink.
_TAKE_SINK = (ops.linear, ops.linears, ops.joined_linear, ops.gated_linear, ops.gelu_linear, ops.embedding)
_LOSSES = (ops.linear_cross_entropy, ops.linear_cross_entropy_stats)  # without a sink they make the gradient themselves
_TAKE_SINK += _LOSSES


class Emitter:
    """Writes one function: first the arguments, then the nodes, then what it returns.

    The code that torch.fx generates drops every value after its last use. device: of what the nodes create; a capture
    knows the CPU only.
    """

    def __init__(self, flow: Flow, device: torch.device, sink: bool = False):
        self.flow, self.device = flow, device
        self._graph, self._made = Graph(), {}
        self._modules: dict[str, GraphModule] = {}
        self._has_sink = sink
        self._sink: Node | None = None

    def arguments(self, groups: Sequence[tuple[str, Iterable[Node]]]) -> None:
        """One argument per (name, the nodes whose value it is); after them ``sink``, where there is one."""
        for name, nodes in groups:
            argument = self._graph.placeholder(name)
            self._made.update((node, argument) for node in nodes)
        if self._has_sink:
            self._sink = self._graph.placeholder("sink")

    def add(self, node: Node) -> None:
        args, kwargs = self._translated(node.args), self._translated(node.kwargs)
        target, args, kwargs = self._with_sink(node, args, kwargs)
        # A fused operation may lay its result out otherwise than the one that was captured.
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        self._made[node] = self._graph.call_function(target, args, kwargs)

    def finish(self, results: Sequence[Node]) -> Callable[..., tuple[torch.Tensor, ...]]:
        self._graph.output(tuple(self._made[self.flow.behind(node)] for node in results))
        return GraphModule(self._modules, self._graph).forward

    def _translated(self, arguments: Argument) -> Any:
        def translate(value: Any) -> Any:
            if isinstance(value, Node):
                return self._value(self.flow.behind(value))
            if isinstance(value, torch.device) and value.type == "cpu":
                return self.device
            return value

        return map_aggregate(arguments, translate)

    def _value(self, node: Node) -> Node:
        if node not in self._made and self.flow.is_module(node):
            self._modules[str(node.target)] = self.flow.constants[str(node.target)]
            self._made[node] = self._graph.get_attr(str(node.target))
        return self._made[node]

    def _with_sink(self, node: Node, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
        """The operation that hands its weight's gradient to the sink, where the weight is a parameter."""
        found = sinking(self.flow, node) if self._sink is not None else None
        if found is None:
            return node.target, args, kwargs
        function, operands, options = found
        return function, self._translated(operands), {**self._translated(options), "sink": self._sink}


def sinking(flow: Flow, node: Node) -> tuple[Callable, tuple, dict] | None:
    """The operation, its arguments and options, that does the work of ``node`` and hands the gradient of its weight to
    a sink; None where there is none, or the weight is no parameter of two dimensions as it is. Nor where no weight is
    trained: autograd keeps no input of it then. Nor where the result is written in place: autograd lets no one write to
    a view that a function of ours returns."""
    target, operands = node.target, node.args
    if node in flow.written:
        return None
    if target in _TAKE_SINK:
        found = target, operands, dict(node.kwargs)
    else:
        found = _SINKING[target](operands) if target in _SINKING and not node.kwargs else None
    if found is None:
        return None
    weights = found[1][1]
    weights = weights if isinstance(weights, list | tuple) else [weights]
    if not all(_is_matrix(flow, weight) for weight in weights):
        return None
    return found if target in _LOSSES or any(flow.differentiable[flow.behind(weight)] for weight in weights) else None


def _is_matrix(flow: Flow, weight: object) -> bool:
    return isinstance(weight, Node) and flow.is_parameter(flow.behind(weight)) and _dims(weight) == 2


def _dims(node: Node) -> int:
    return node.meta["val"].dim()


def _linear(operands: tuple) -> tuple:
    return ops.linear, operands, {}


def _product(operands: tuple) -> tuple | None:
    input, weight = operands
    return (ops.linear, (input, weight), {"transposed": True}) if _dims(input) > 1 else None


def _addmm(operands: tuple) -> tuple | None:
    bias, input, weight = operands
    return (ops.linear, (input, weight, bias), {"transposed": True}) if _dims(bias) == 1 else None


def _embedding(operands: tuple) -> tuple | None:
    weight, index, padding, by_frequency, sparse = (*operands, *(-1, False, False)[len(operands) - 2 :])
    if by_frequency or sparse:
        return None
    return ops.embedding, (index, weight), {"padding": padding} if padding >= 0 else {}


def _embedding_part(operands: tuple) -> tuple:
    weight, index, start, padding = operands
    return ops.embedding_part, (index, weight, start), {} if padding is None else {"padding": padding}


# What is called -> its arguments -> (operation, arguments with the weight second, options), or None: it stays as it is.
_SINKING = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.mm.default: _product,
    torch.ops.aten.matmul.default: _product,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.embedding.default: _embedding,
    embedding_part: _embedding_part,
}
