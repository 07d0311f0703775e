"""Facts about the nodes of a captured graph: values, randomness, and their kind when the graph is
cut.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import FunctionSchema
from torch._ops import OpOverload
from torch.fx import Graph, Node

from ... import ops
from .aliases import mutation_deps, storages, writers
from .opaque import CustomFunction


def op_name(node: Node) -> str:
    """Return the name of what a node calls, without overload; "" if it calls nothing.

    That is "linear" for an aten operator, "namespace.name" for other operators, and the name of a
    Python function.
    """
    if node.op != "call_function":
        return ""
    target = node.target
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__name__", target))
    name = target.overloadpacket.__name__
    return name if target.namespace == "aten" else f"{target.namespace}.{name}"


def is_op(node: object, *names: str) -> bool:
    """Whether ``node`` is a node that calls one of ``names`` (see ``op_name``)."""
    return isinstance(node, Node) and op_name(node) in names


def operand(node: Node, position: int = 0) -> Node:
    """Return the value that a node takes at ``position`` of its arguments."""
    value = node.args[position]
    assert isinstance(value, Node), f"{node.format_node()} takes no value at {position}"
    return value


def operands(node: Node, *positions: int) -> tuple[Node, ...]:
    """Return the values that a node takes at ``positions`` of its arguments."""
    return tuple(operand(node, position) for position in positions)


def constant(node: Node, position: int) -> Any:
    """Return what a node takes at ``position`` of its arguments where that is a number, or a list
    of numbers or values.

    What an operator takes there is in its schema, which no type knows.
    """
    return node.args[position]


def schema(node: Node) -> FunctionSchema:
    """Return the schema of a node's operator."""
    assert isinstance(node.target, OpOverload)
    return node.target._schema


def called(node: Node) -> Callable[..., Any]:
    """Return what a node of a call calls."""
    assert callable(node.target)
    return node.target


def values(node: Node) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a node returns: one, those of a tuple or list, or none."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    return (
        tuple(x for x in value if isinstance(x, torch.Tensor))
        if isinstance(value, list | tuple)
        else ()
    )


def nbytes(node: Node) -> int:
    """Return the bytes of all tensors that a node returns."""
    return sum(value.numel() * value.element_size() for value in values(node))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers; dropout with probability 0 or in evaluation does not."""
    target = node.target
    rate = ops.row(target).dropout
    if rate is not None:
        return bool(constant(node, rate) > 0)
    if isinstance(target, CustomFunction):
        return target.random
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = {
        argument.name: value
        for argument, value in zip(target._schema.arguments, node.args, strict=False)
    }
    defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
    arguments = defaults | arguments | dict(node.kwargs)
    if (
        arguments.get("train") is False
        or arguments.get("training") is False
        or arguments.get("dropout_p") == 0
    ):
        return False
    return not ("dropout" in op_name(node) and arguments.get("p") == 0)


def classify(graph: Graph, parameters: Container[str]) -> dict[Node, str]:
    """Return the kind of every node, which decides where it is computed when the graph is cut.

    - "param": reads one of ``parameters`` (names); "leaf": a placeholder or a constant; "output":
      the output.
    - "common": depends on no parameter (masks, positions, rotary tables); every stage recomputes
      it.
    - "side": depends on parameters, but neither on the batch nor on random numbers (a relative
      position bias).
    - "main": all else, computed by one stage only. This includes whatever draws random numbers, and
      whatever shares a
      storage that a main node writes to in place, or that is written to after a main or side node
      has read it.
    """
    after = mutation_deps(graph)
    root = storages(graph)
    written = writers(graph)
    required: dict[Node, str] = {}  # storage -> the kind that all its nodes must have: main or side
    while True:
        kinds = _classify_once(graph, parameters, after, root, required=required)
        forced = dict(required)
        for storage, nodes in written.items():
            if kinds[storage] in ("common", "side") and "main" in (kinds[x] for x in nodes):
                forced[storage] = "main"
            elif kinds[storage] == "common" and "side" in (kinds[x] for x in nodes):
                forced[storage] = "side"
            elif kinds[storage] == "common" and _read_before(storage, nodes[-1], root, kinds):
                forced[storage] = "main"
        if forced == required:
            return kinds
        required = forced


def _read_before(
    storage: Node, writer: Node, root: dict[Node, Node], kinds: dict[Node, str]
) -> bool:
    """Whether a main or side node reads a storage that ``writer`` changes later."""
    for node in kinds:
        if node is writer:
            return False
        if kinds[node] in ("main", "side") and any(
            root[x] is storage for x in node.all_input_nodes
        ):
            return True
    return False


def _classify_once(
    graph: Graph,
    parameters: Container[str],
    after: dict[Node, tuple[Node, ...]],
    root: dict[Node, Node],
    required: dict[Node, str],
) -> dict[Node, str]:
    kinds: dict[Node, str] = {}
    varies: dict[Node, bool] = {}  # whether it depends on the batch or on random numbers
    for node in graph.nodes:
        above = [*node.all_input_nodes, *after.get(node, ())]
        above_kinds = {kinds[x] for x in above}
        varies[node] = node.op == "placeholder" or is_random(node) or any(varies[x] for x in above)
        if node.op == "get_attr":
            kinds[node] = "param" if node.target in parameters else "leaf"
        elif node.op in ("placeholder", "output"):
            kinds[node] = "leaf" if node.op == "placeholder" else "output"
        elif is_random(node) or required.get(root[node]) == "main" or "main" in above_kinds:
            kinds[node] = "main"
        elif required.get(root[node]) == "side" or not above_kinds.isdisjoint(("param", "side")):
            kinds[node] = "main" if varies[node] else "side"
        else:
            kinds[node] = "common"
    return kinds
