"""What must hold of a batch for a captured graph to be right about it: the values that its model decided by."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.unlift import Raw
from megatron_merak.graph.capture.values import GUARD, only_like
from megatron_merak.graph.ir.aliases import aliased, mutation_deps
from megatron_merak.graph.ir.nodes import is_random

_MARK = torch.ops.aten._assert_async.msg


class Guards:
    """Conditions on a batch, computed from it and from constants on the CPU. lines: the model's, that ask for them."""

    def __init__(self, module: GraphModule):
        self.module = module
        self.lines = tuple(
            dict.fromkeys(node.args[1].removeprefix(GUARD) for node in module.graph.nodes if is_guard(node))
        )
        self._reads = tuple(str(node.target) for node in module.graph.find_nodes(op="placeholder"))
        self._writes = any(aliased(node)[1] for node in module.graph.nodes)

    @torch.no_grad()
    def broken(self, batch: Mapping[str, Tensor]) -> str:
        """The first of the model's lines that decides otherwise for ``batch``; nothing if the graph is right for it."""
        values = (batch[name].cpu() for name in self._reads)
        try:
            _Check(self.module).run(*(value.clone() if self._writes else value for value in values))
        except _BrokenError as broken:
            return str(broken)
        return ""


class _BrokenError(Exception):
    pass


class _Check(Interpreter):
    """Runs the conditions in the order of the model's lines, and no further than the first that does not hold."""

    def call_function(self, target, args, kwargs):
        if target is not _MARK:
            return super().call_function(target, args, kwargs)
        if not args[0]:
            raise _BrokenError(args[1].removeprefix(GUARD))


def is_guard(node: Node) -> bool:
    """Whether it is the mark of a value that the model asked for."""
    return node.target is _MARK and str(node.args[1]).startswith(GUARD)


def take_guards(raw: Raw) -> Guards | None:
    """Move the marks of asked values, with a copy of what they are computed from, out of the graph.

    Raises TraceError for a value that depends on a parameter or on chance.
    """
    graph, after = raw.module.graph, mutation_deps(raw.module.graph)
    needed: dict[Node, str] = {}
    asked: set[tuple[Node, object]] = set()
    for mark in [node for node in graph.nodes if is_guard(node)]:
        above = upstream(mark, after)
        if _asked(mark) not in asked and any(node.op == "placeholder" for node in above):
            asked.add(_asked(mark))
            needed = dict.fromkeys(above, str(mark.args[1]).removeprefix(GUARD)) | needed
    own, copies = Graph(), {}
    for node in graph.nodes:
        if node in needed:
            _check(node, raw, needed[node])
            copies[node] = own.node_copy(node, lambda x: copies[x] if x in copies else _like(own, x))
    own.output(())
    for mark in [node for node in graph.nodes if is_guard(node)]:
        graph.erase_node(mark)
    return Guards(GraphModule(raw.module, own)) if needed else None


def upstream(node: Node, after: Mapping[Node, tuple[Node, ...]]) -> dict[Node, None]:
    """What a node is computed from, itself included, but for what only lends its shape."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            like = only_like(node.target)
            matter = [x for i, x in enumerate(node.args) if i != like]
            waiting += [x for x in tree_leaves((matter, node.kwargs)) if isinstance(x, Node)] + [*after.get(node, ())]
    return found


def _like(graph: Graph, node: Node) -> Node:
    value = node.meta["val"]
    return graph.call_function(torch.empty, (tuple(value.shape),), {"dtype": value.dtype})


def _asked(mark: Node) -> tuple[Node, object]:
    """The tensor and the value that a mark compares."""
    compared, value = mark.args[0].args
    return compared.args[0] if compared.target is torch.ops.aten.reshape.default else compared, value


def _check(node: Node, raw: Raw, line: str) -> None:
    parameter = node.op == "get_attr" and node.target in raw.parameters
    if parameter or is_random(node):
        what = f"the parameter {node.target}" if parameter else "random numbers"
        reason = f"{line} decides by a value that depends on {what}, and a graph has no branches"
        raise TraceError("model", raw.model, reason, "Rewrite that line with tensor operations")
