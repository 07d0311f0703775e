"""Batch entries with the document boundaries of packed rows: left out where the model does not read
them.

Collators that flatten samples into one row add them for variable-length attention kernels. Their
shapes, or their values as plain numbers, differ between batches, so that each batch would need a
capture of its own. To find out whether the model reads them, the first batch is captured with and
without them: if not, both graphs are the same.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..graph.capture.capture import DOCUMENTS
from ..graph.capture.captured import Captured


def documents_of(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of a batch with document boundaries, except its positions."""
    return tuple(name for name in DOCUMENTS if batch.get(name) is not None)


def without(batch: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: value for name, value in batch.items() if name not in names} if names else batch


def same_graph(one: Captured, other: Captured) -> bool:
    """Whether two captures run the same operations on the same values in the same order."""
    if one.guards or other.guards or one.outputs != other.outputs or one.shapes != other.shapes:
        return False
    nodes = _used_nodes(one)
    others = _used_nodes(other)
    if len(nodes) != len(others):
        return False
    numbers, other_numbers = (
        {node: f"%{n}" for n, node in enumerate(each)} for each in (nodes, others)
    )
    pairs = list(zip(nodes, others, strict=True))
    constants = [(a, b) for a, b in pairs if a.op == "get_attr" and a.target not in one.shapes]
    same = all(
        _description(a, numbers, one) == _description(b, other_numbers, other) for a, b in pairs
    )
    return same and all(_same_constant(one, other, a, b) for a, b in constants)


def _used_nodes(captured: Captured) -> list[Node]:
    """All nodes but inputs that no node reads."""
    return [node for node in captured.module.graph.nodes if node.users or node.op != "placeholder"]


def _description(node: Node, numbers: dict[Node, str], captured: Captured) -> str:
    target = "" if node.op == "get_attr" and node.target not in captured.shapes else node.target
    return f"{node.op} {target} {map_arg((node.args, node.kwargs), numbers.__getitem__)}"


def _same_constant(one: Captured, other: Captured, a: Node, b: Node) -> bool:
    x, y = (_attribute(c, str(n.target)) for c, n in ((one, a), (other, b)))
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y


def _attribute(captured: Captured, path: str) -> Any:
    value: Any = captured.module
    for name in path.split("."):
        value = getattr(value, name)
    return value
