"""Entries that tell where the documents of a packed row lie: left out of batches where the model does not read them.

Collators that flatten samples to one row add them for kernels of variable length. They differ from batch to batch, in
shape or as plain numbers, so that each would be captured anew. Whether they are read shows in two captures of the first
batch, with and without them: then both are the same graph.
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
    """The entries of a batch that tell where documents lie, beside its positions."""
    return tuple(name for name in DOCUMENTS if batch.get(name) is not None)


def without(batch: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: value for name, value in batch.items() if name not in names} if names else batch


def same_work(one: Captured, other: Captured) -> bool:
    """Whether two captures compute the same, by the same operations of the same values in the same order."""
    if one.guards or other.guards or one.outputs != other.outputs or one.shapes != other.shapes:
        return False
    nodes, others = _work(one), _work(other)
    if len(nodes) != len(others):
        return False
    here, there = ({node: f"%{n}" for n, node in enumerate(each)} for each in (nodes, others))
    pairs = list(zip(nodes, others, strict=True))
    constants = [(a, b) for a, b in pairs if a.op == "get_attr" and a.target not in one.shapes]
    told = all(_told(a, here, one) == _told(b, there, other) for a, b in pairs)
    return told and all(_same_constant(one, other, a, b) for a, b in constants)


def _work(captured: Captured) -> list[Node]:
    """All nodes but entries that nothing reads."""
    return [node for node in captured.module.graph.nodes if node.users or node.op != "placeholder"]


def _told(node: Node, places: dict[Node, str], captured: Captured) -> str:
    target = "" if node.op == "get_attr" and node.target not in captured.shapes else node.target
    return f"{node.op} {target} {map_arg((node.args, node.kwargs), places.__getitem__)}"


def _same_constant(one: Captured, other: Captured, a: Node, b: Node) -> bool:
    x, y = (_attribute(c, str(n.target)) for c, n in ((one, a), (other, b)))
    return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y


def _attribute(captured: Captured, path: str) -> Any:
    value: Any = captured.module
    for name in path.split("."):
        value = getattr(value, name)
    return value
