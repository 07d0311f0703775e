"""Generates plain Python functions from nodes of a rewritten graph."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_aggregate

from ... import ops
from ..ir.nodes import called
from .flow import Flow


@dataclass(frozen=True)
class SinkCall:
    """A call that passes the gradients of its weights to a sink.

    operation: one of ``ops.OPERATIONS`` that takes a sink.
    args:      its input, its weight or a list of weights, and others.
    """

    operation: Callable[..., Any]
    args: tuple
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> list[Any]:
        given = self.args[1]
        return list(given) if isinstance(given, list | tuple) else [given]

    def kept(self, *args: Any, **options: Any) -> ops.Kept:
        """Return what the sink keeps if it computes them later. args, options: those of the call,
        with values.
        """
        keeps = ops.row(self.operation).sink
        assert keeps is not None
        return keeps(*args, **options)


class Emitter:
    """Builds one function. Call ``arguments`` first, then ``add`` for each node, then ``finish``.

    The code that torch.fx generates frees each value after its last use.

    device: on which factory ops create tensors, in place of the CPU that the graph was captured on.
    sink:   whether the function takes a ``WeightGradientSink`` as its last argument.
    others: what nodes call, with the sink, in place of their target.
    """

    def __init__(
        self,
        flow: Flow,
        device: torch.device,
        sink: bool = False,
        others: Mapping[Node, Callable[..., Any]] = MappingProxyType({}),
    ):
        self.flow = flow
        self.device = device
        self._graph = Graph()
        self._emitted: dict[Node, Node] = {}
        self._modules: dict[str, GraphModule] = {}
        self._has_sink = sink
        self._others = others
        self._sink: Node | None = None

    def arguments(self, groups: Sequence[tuple[str, Iterable[Node]]]) -> None:
        """Add one argument per (name, nodes that read as this argument), and ``sink`` last if there
        is one.
        """
        for name, nodes in groups:
            argument = self._graph.placeholder(name)
            self._emitted.update((node, argument) for node in nodes)
        if self._has_sink:
            self._sink = self._graph.placeholder("sink")

    def add(self, node: Node) -> None:
        args = self._translated(node.args)
        kwargs = self._translated(node.kwargs)
        target, args, kwargs = self._with_sink(node, args, kwargs)
        # A fused operation may return other strides than the one that was captured.
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        self._emitted[node] = self._graph.call_function(target, args, kwargs)
        if "nn_module_stack" in node.meta:  # names the module in messages
            self._emitted[node].meta["nn_module_stack"] = node.meta["nn_module_stack"]

    def finish(self, results: Sequence[Node]) -> Callable[..., tuple[torch.Tensor, ...]]:
        self._graph.output(tuple(self._emitted[self.flow.resolve(node)] for node in results))
        return GraphModule(self._modules, self._graph).forward

    def _translated(self, arguments: Argument) -> Any:
        def translate(value: Any) -> Any:
            if isinstance(value, Node):
                return self._value(self.flow.resolve(value))
            if isinstance(value, torch.device) and value.type == "cpu":
                return self.device
            return value

        return map_aggregate(arguments, translate)

    def _value(self, node: Node) -> Node:
        if node not in self._emitted and self.flow.is_module(node):
            self._modules[str(node.target)] = self.flow.constants[str(node.target)]
            self._emitted[node] = self._graph.get_attr(str(node.target))
        return self._emitted[node]

    def _with_sink(self, node: Node, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
        """Replace a call by the one that passes the gradient of its weight to the sink, if there is
        such a call.
        """
        if node in self._others:
            return self._others[node], args, {**kwargs, "sink": self._sink}
        if self._sink is None:
            return called(node), args, kwargs
        ranks = {"ranks": self._sink} if ops.row(node.target).shares_scales else {}
        call = call_with_sink(self.flow, node)
        if call is None:
            return called(node), args, kwargs | ranks
        options = {**self._translated(call.options), "sink": self._sink, **ranks}
        return call.operation, self._translated(call.args), options


def call_with_sink(flow: Flow, node: Node) -> SinkCall | None:
    """Return the call that computes ``node`` and passes the gradient of its weight to a sink.

    None if there is no such operation, if a trained weight is not directly a parameter, of two
    dimensions or of a matrix for each group, if no weight is trained (the plain operation then does
    not save its input), or if the result is written in place (autograd forbids writing to a view that
    a custom Function returns).
    """
    if node in flow.written:
        return None
    call: SinkCall | None = None
    if ops.row(node.target).sink is not None:
        call = SinkCall(called(node), node.args, dict(node.kwargs))
    elif node.target in _AS_SINK_CALL and not node.kwargs:
        call = _AS_SINK_CALL[node.target](node.args)
    if call is None:
        return None
    dims = 3 if ops.row(call.operation).grouped else 2
    trained = [weight for weight in call.weights if flow.trains(weight)]
    return call if trained and all(_is_stored(flow, weight, dims) for weight in trained) else None


def _is_stored(flow: Flow, weight: object, dims: int) -> bool:
    """Whether a weight is directly a parameter of so many dimensions."""
    if not isinstance(weight, Node) or not flow.is_parameter(flow.resolve(weight)):
        return False
    return _dims(weight) == dims


def _dims(node: Node) -> int:
    return node.meta["val"].dim()


def _linear(operands: tuple) -> SinkCall:
    return SinkCall(ops.linear, operands)


def _product(operands: tuple) -> SinkCall | None:
    input, weight = operands
    return SinkCall(ops.linear, (input, weight), {"transposed": True}) if _dims(input) > 1 else None


def _addmm(operands: tuple) -> SinkCall | None:
    bias, input, weight = operands
    return (
        SinkCall(ops.linear, (input, weight, bias), {"transposed": True})
        if _dims(bias) == 1
        else None
    )


def _embedding(operands: tuple) -> SinkCall | None:
    weight, index = operands[:2]
    given = operands[2:]
    padding, by_frequency, sparse = given + (-1, False, False)[len(given) :]
    if by_frequency or sparse:
        return None
    return SinkCall(ops.embedding, (index, weight), {"padding": padding} if padding >= 0 else {})


# ATen's operators that an operation with a sink computes: function of their args that returns the
# call; None: keep it.
_AS_SINK_CALL: dict[object, Callable[[tuple], SinkCall | None]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.mm.default: _product,
    torch.ops.aten.matmul.default: _product,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.embedding.default: _embedding,
}
