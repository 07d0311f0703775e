"""What hides the collectives of a unit: in its backward the weight gradients of the segment that
launches them, which are computed while they are under way; and products behind exchanges of rows, in
both directions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from .. import ops
from .ir.kinds import kinds
from .ir.marks import copy_in
from .ir.nodes import values
from .ir.operators import filled
from .lowering.emit import call_with_sink
from .lowering.flow import Flow
from .lowering.levels import segment_levels
from .more_flops import ProductFlops, product_flops, values_of_row


@dataclass(frozen=True)
class Hiding:
    """Of the backward of one unit.

    bare:  marks that are launched by segments without weight gradients, so that nothing hides what
           is done with their gradients.
    flops: of the weight gradients of the other segments that launch something.
    """

    bare: tuple[Node, ...]
    flops: int


@dataclass(frozen=True)
class Meanwhile:
    """What a unit computes behind exchanges of rows, see ``behind``.

    marks:  of these exchanges.
    flops:  of the products.
    hiding: those of their weight gradients that hide what their own segments launch, too.
    """

    marks: tuple[Node, ...]
    flops: ProductFlops
    hiding: int


def hiding(nodes: Sequence[Node], flow: Flow, marks: Sequence[Node]) -> Hiding:
    """Return what hides the collectives of a unit's backward.

    nodes: of the unit.
    marks: of which gradients are communicated.
    """
    if not marks:
        return Hiding((), 0)
    segment = _segments(nodes, flow)
    weights: dict[object, int] = {}
    for node in nodes:
        if node in segment:
            weights[segment[node]] = weights.get(segment[node], 0) + _weight_flops(node, flow)
    launched_by = _launched_by(marks, segment)
    busy = {segment[reader]: None for reader in launched_by.values() if reader is not None}
    bare = [
        mark
        for mark, reader in launched_by.items()
        if reader is not None and not weights[segment[reader]]
    ]
    return Hiding(tuple(bare), sum(weights[each] for each in busy))


def meanwhile(nodes: Sequence[Node], flow: Flow, marks: Sequence[Node]) -> Meanwhile:
    """Return what a unit computes behind exchanges. For arguments see ``hiding``."""
    behind = [node for node in nodes if "behind" in node.meta]
    if not behind:
        return Meanwhile((), ProductFlops(0, 0, 0), 0)
    segment = _segments(nodes, flow)
    launches = {segment[x] for x in _launched_by(marks, segment).values() if x is not None}
    found = [product_flops(node) for node in behind]
    busy = [flops for flops, x in zip(found, behind, strict=True) if segment[x] in launches]
    return Meanwhile(
        tuple(dict.fromkeys(node.meta["behind"] for node in behind)),
        ProductFlops(*(sum(each) for each in zip(*found, strict=True))),
        sum(flops.weights for flops in busy),
    )


def _segments(nodes: Sequence[Node], flow: Flow) -> dict[Node, object]:
    """Return the segment of each node of a unit."""
    levels = segment_levels(flow, flow.unit[nodes[0]])
    return {node: (level, kinds(node)) for node, level in levels.items()}


def _launched_by(marks: Sequence[Node], segment: Mapping[Node, object]) -> dict[Node, Node | None]:
    """Return a node of the segment that launches the collective of each mark's gradient."""
    return {mark: _reader(mark, segment.__contains__) for mark in marks}


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
    rows = round(filled(node) * x.numel() / x.shape[-1])
    return sum(2 * rows * values_of_row(call.operation, values(weight)[0]) for weight in trained)
