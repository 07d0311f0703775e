"""Find the module inside a segment whose output is the first one that is not finite, by running the
segment again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ..graph.ir.names import place
from ..segment import Common, Segment


def all_finite(values: Sequence[Any]) -> bool:
    """Whether all numbers in tensors are finite; other values are not looked at."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@torch.no_grad()
def module_inside(segment: Segment, common: Common, values: Sequence[Tensor]) -> str:
    """Return the name of the first module of a segment whose output is not finite while its inputs
    are.

    values: what the segment reads, all finite.

    "" if that cannot be told.
    """
    if segment.random:
        common.seed(segment)
    return _inside_graph(segment.fn, common, values)


class _Watch(Interpreter):
    """Runs generated code node by node; remembers which nodes computed what is not finite."""

    def __init__(self, module: GraphModule):
        super().__init__(module)
        self.bad: dict[Node, None] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        values = result if isinstance(result, tuple | list) else (result,)
        if n.op == "call_function" and not all_finite(values):
            self.bad[n] = None
        return result


def _inside_graph(fn: Callable, common: Common, values: Sequence[Tensor]) -> str:
    """Interpret the code of a captured segment, which is partial(run, code, parameters, common
    names, sink).
    """
    arguments: tuple[Any, ...] = getattr(fn, "args", ())
    if len(arguments) != 4:
        return ""
    code, parameters, names, _ = arguments
    numbers = code.args if isinstance(code, partial) else ()
    module = getattr(code.func if isinstance(code, partial) else code, "__self__", None)
    if not isinstance(module, GraphModule):
        return ""
    watch = _Watch(module)
    watch.run(*numbers, *parameters, *[common[name] for name in names], *values, None)
    (output,) = module.graph.find_nodes(op="output")
    pending = [node for node in output.all_input_nodes if node in watch.bad]
    # From the result back through what is not finite: masks of -inf that a softmax took are not on
    # the way.
    reached: dict[Node, None] = {}
    while pending:
        node = pending.pop()
        if node not in reached:
            reached[node] = None
            pending += [each for each in node.all_input_nodes if each in watch.bad]
    first = next((node for node in module.graph.nodes if node in reached), None)
    return "" if first is None else place(first)
