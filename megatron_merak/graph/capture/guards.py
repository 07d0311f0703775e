"""Guards: conditions on the values of a batch under which a captured graph does what the model
would do.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.unlift import RawGraph
from megatron_merak.graph.capture.values import GUARD, shape_only_argument
from megatron_merak.graph.ir.aliases import aliased, mutation_deps
from megatron_merak.graph.ir.nodes import is_random, operand

_MARK = torch.ops.aten._assert_async.msg


class Guards:
    """Conditions on a batch, computed on the CPU from the batch and constants.

    lines: the lines of the model that branch on these values.
    """

    def __init__(self, module: GraphModule):
        self.module = module
        self.lines = tuple(
            dict.fromkeys(
                node.args[1].removeprefix(GUARD) for node in module.graph.nodes if is_guard(node)
            )
        )
        self._reads = tuple(str(node.target) for node in module.graph.find_nodes(op="placeholder"))
        self._writes = any(aliased(node)[1] for node in module.graph.nodes)

    @torch.no_grad()
    def broken(self, batch: Mapping[str, Tensor]) -> str:
        """Return the first line of the model that branches otherwise for ``batch``; "" if the graph
        is right for it.
        """
        values = (batch[name].cpu() for name in self._reads)
        try:
            _Check(self.module).run(*(value.clone() if self._writes else value for value in values))
        except _GuardFailedError as broken:
            return str(broken)
        return ""


class _GuardFailedError(Exception):
    pass


class _Check(Interpreter):
    """Checks the conditions in the order of the model's lines, up to the first that does
    not hold.
    """

    def call_function(self, target, args, kwargs):
        if target is not _MARK:
            return super().call_function(target, args, kwargs)
        if not args[0]:
            raise _GuardFailedError(args[1].removeprefix(GUARD))


def is_guard(node: Node) -> bool:
    """Whether a node is the assertion that marks a value that the model read."""
    return node.target is _MARK and str(node.args[1]).startswith(GUARD)


def take_guards(raw: RawGraph) -> Guards | None:
    """Move the guard assertions, with a copy of what they depend on, out of the graph; None if
    there are none.

    Raises TraceError for a guard that depends on a parameter or on random numbers.
    """
    graph = raw.module.graph
    after = mutation_deps(raw.module.graph)
    needed: dict[Node, str] = {}
    seen: set[tuple[Node, object]] = set()
    for mark in [node for node in graph.nodes if is_guard(node)]:
        dependencies = value_dependencies(mark, after)
        if _compared(mark) not in seen and any(node.op == "placeholder" for node in dependencies):
            seen.add(_compared(mark))
            needed = dict.fromkeys(dependencies, str(mark.args[1]).removeprefix(GUARD)) | needed
    guards = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed:
            _check_guardable(node, raw, needed[node])
            copies[node] = guards.node_copy(
                node, lambda x: copies[x] if x in copies else _empty_like(guards, x)
            )
    guards.output(())
    for mark in [node for node in graph.nodes if is_guard(node)]:
        graph.erase_node(mark)
    return Guards(GraphModule(raw.module, guards)) if needed else None


def value_dependencies(node: Node, after: Mapping[Node, tuple[Node, ...]]) -> dict[Node, None]:
    """Return all nodes whose values a node depends on, itself included; not those of which only the
    shape matters.
    """
    nodes: dict[Node, None] = {}
    pending = [node]
    while pending:
        node = pending.pop()
        if node not in nodes:
            nodes[node] = None
            shape_only = shape_only_argument(node.target)
            inputs = [x for i, x in enumerate(node.args) if i != shape_only]
            pending += [x for x in tree_leaves((inputs, node.kwargs)) if isinstance(x, Node)] + [
                *after.get(node, ())
            ]
    return nodes


def _empty_like(graph: Graph, node: Node) -> Node:
    value = node.meta["val"]
    return graph.call_function(torch.empty, (tuple(value.shape),), {"dtype": value.dtype})


def _compared(mark: Node) -> tuple[Node, object]:
    """Return the tensor and the value that a guard compares."""
    compared, value = operand(mark).args
    assert isinstance(compared, Node)
    return operand(
        compared
    ) if compared.target is torch.ops.aten.reshape.default else compared, value


def _check_guardable(node: Node, raw: RawGraph, line: str) -> None:
    parameter = node.op == "get_attr" and node.target in raw.parameters
    if parameter or is_random(node):
        what = f"the parameter {node.target}" if parameter else "random numbers"
        reason = f"{line} decides by a value that depends on {what}, and a graph has no branches"
        raise TraceError("model", raw.model, reason, "Rewrite that line with tensor operations")
