"""The farthest-dependency rule of the Merak paper: a node joins the piece of the farthest node that
it depends on.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod

from torch.fx import Node

from ..ir.aliases import aliased
from ..ir.names import module_path
from ..ir.operators import facts
from .node_sequence import NodeSequence

COMMON_USERS = 5


def farthest_dependency(
    sequence: NodeSequence,
    shapes: Mapping[str, Sequence[int]],
    count: int | None = None,
    common_users: int = COMMON_USERS,
) -> list[int]:
    """Return the cuts that divide a sequence into about ``count`` pieces with equally many
    parameters.

    Nodes join the newest piece one by one. A node that depends on an older piece, other than on its
    last value, merges all pieces from that one on, so a border survives only if nothing reaches
    back over it. Once a piece has its share of the parameters, a new piece begins after every node,
    to see which of these borders survive.

    shapes:       the shape of each parameter.
    count:        default 2 per layer + 4.
    common_users: values with more users than this do not count as dependencies; they are passed on
                  between pieces.
    """
    nodes = sequence.nodes
    count = count or 2 * _layers(nodes) + 4
    embeddings = {
        name
        for i, node in enumerate(nodes)
        if facts(node).looks_up
        for name in sequence.parameters(i)
    }
    share = sum(prod(shape) for name, shape in shapes.items() if name not in embeddings) / count
    end = max((i for i, flops in enumerate(sequence.flops) if flops), default=0)
    starts = [0]
    sizes = [0]
    seen: set[str] = set()
    for i, node in enumerate(nodes):
        far = _farthest(sequence, starts, i, common_users)
        sizes[far:] = [sum(sizes[far:])]
        del starts[far + 1 :]
        for name in sequence.parameters(i):
            sizes[-1] += prod(shapes[name]) if name not in seen else 0
            seen.add(name)
        if sizes[-1] > share and not facts(node).looks_up and i < end:
            starts.append(i + 1)
            sizes.append(0)
    return [start - 1 for start in starts[1:]]


def _farthest(sequence: NodeSequence, starts: list[int], i: int, common_users: int) -> int:
    """Return the oldest piece that ``nodes[i]`` must join, given where each piece starts; by
    default the newest.
    """
    node = sequence.nodes[i]
    newest = len(starts) - 1
    far = newest
    while far and not sequence.legal[starts[far] - 1]:
        far -= 1
    written = aliased(node)[1]
    for value in node.all_input_nodes:
        index = sequence.index.get(value)
        if index is None or (len(value.users) > common_users and value not in written):
            continue
        piece = bisect_right(starts, index) - 1
        passed_on = piece < newest and index == starts[piece + 1] - 1 and value not in written
        far = min(far, piece + 1 if passed_on else piece)
    return far


def _layers(nodes: Sequence[Node]) -> int:
    """Return the number of layers: outermost modules that are named by a number."""
    layers = {}
    for node in nodes:
        path = module_path(node)
        if (
            first := next((depth for depth, part in enumerate(path) if part.isdigit()), None)
        ) is not None:
            layers[path[: first + 1]] = True
    return len(layers)
