"""What hides the collectives of a unit's backward: the weight gradients of the segment that launches
them, which are computed while they are under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from .. import ops
from .ir.kinds import kinds
from .ir.marks import copy_in
from .ir.nodes import values
from .lowering.emit import call_with_sink
from .lowering.flow import Flow
from .lowering.levels import segment_levels


@dataclass(frozen=True)
class Hiding:
    """Of the backward of one unit.

    bare:  marks that are launched by segments without weight gradients, so that nothing hides what
           is done with their gradients.
    flops: of the weight gradients of the other segments that launch something.
    """

    bare: tuple[Node, ...]
    flops: int


def hiding(nodes: Sequence[Node], flow: Flow, marks: Sequence[Node]) -> Hiding:
    """Return what hides the collectives of a unit's backward.

    nodes: of the unit.
    marks: of which gradients are communicated.
    """
    if not marks:
        return Hiding((), 0)
    levels = segment_levels(flow, flow.unit[nodes[0]])

    def segment(node: Node) -> object:
        return levels.get(node), kinds(node)

    weights: dict[object, int] = {}
    for node in nodes:
        weights[segment(node)] = weights.get(segment(node), 0) + _weight_flops(node, flow)
    launched_by = {mark: _reader(mark, levels.__contains__) for mark in marks}
    busy = {segment(reader): None for reader in launched_by.values() if reader is not None}
    bare = [
        mark
        for mark, reader in launched_by.items()
        if reader is not None and not weights[segment(reader)]
    ]
    return Hiding(tuple(bare), sum(weights[each] for each in busy))


def _reader(mark: Node, inside: Callable[[Node], bool]) -> Node | None:
    """Return a node of the segment that reads a mark."""
    if mark.target is copy_in:
        return mark if inside(mark) else None
    return next(filter(inside, mark.users), None)


def _weight_flops(node: Node, flow: Flow) -> int:
    """Return the FLOPs of the weight gradients that a sink computes for a node."""
    call = call_with_sink(flow, node)
    if call is None or call.operation in (ops.embedding, ops.embedding_part):
        return 0
    (x, *_) = values(call.args[0])
    trained = [weight for weight in call.weights if flow.trains(weight)]
    rows = x.numel() // x.shape[-1]
    return sum(2 * rows * values(weight)[0].numel() for weight in trained)
