"""The farthest-dependency rule of the Merak paper: a node belongs with the farthest node that it depends on."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod

from torch.fx import Node

from ..ir.aliases import aliased
from ..ir.names import module_path
from ..ir.nodes import EMBEDDINGS, is_op
from .line import Line

COMMON_USERS = 5


def farthest_dependency(
    line: Line, shapes: Mapping[str, Sequence[int]], count: int | None = None, common_users: int = COMMON_USERS
) -> list[int]:
    """The cuts that divide a line into about ``count`` pieces of equal parameters (default: 2 per layer + 4).

    Nodes join the newest piece one by one. One that depends on an older piece, by more than the value that piece handed
    on, merges all pieces since: a border survives only if nothing reaches back over it. Once a piece holds its share
    of the parameters, it ends behind every node, to see which of these borders survives. Values with more than
    ``common_users`` users do not count as dependencies; they are handed on from piece to piece.
    """
    nodes = line.nodes
    count = count or 2 * _layers(nodes) + 4
    embeddings = {name for i, node in enumerate(nodes) if is_op(node, *EMBEDDINGS) for name in line.parameters(i)}
    share = sum(prod(shape) for name, shape in shapes.items() if name not in embeddings) / count
    end = max((i for i, flops in enumerate(line.flops) if flops), default=0)
    starts, sizes = [0], [0]
    seen: set[str] = set()
    for i, node in enumerate(nodes):
        far = _farthest(line, starts, i, common_users)
        sizes[far:] = [sum(sizes[far:])]
        del starts[far + 1 :]
        for name in line.parameters(i):
            sizes[-1] += prod(shapes[name]) if name not in seen else 0
            seen.add(name)
        if sizes[-1] > share and not is_op(node, *EMBEDDINGS) and i < end:
            starts.append(i + 1)
            sizes.append(0)
    return [start - 1 for start in starts[1:]]


def _farthest(line: Line, starts: list[int], i: int, common_users: int) -> int:
    """The oldest piece that ``nodes[i]`` must share, given where each piece starts; the newest if it is free."""
    node, newest = line.nodes[i], len(starts) - 1
    far = newest
    while far and not line.legal[starts[far] - 1]:
        far -= 1
    written = aliased(node)[1]
    for value in node.all_input_nodes:
        place = line.index.get(value)
        if place is None or (len(value.users) > common_users and value not in written):
            continue
        piece = bisect_right(starts, place) - 1
        handed_on = piece < newest and place == starts[piece + 1] - 1 and value not in written
        far = min(far, piece + 1 if handed_on else piece)
    return far


def _layers(nodes: Sequence[Node]) -> int:
    """How many layers the modules of a model name: repeated modules that lie in no other."""
    layers = {}
    for node in nodes:
        path = module_path(node)
        if (first := next((depth for depth, part in enumerate(path) if part.isdigit()), None)) is not None:
            layers[path[: first + 1]] = True
    return len(layers)
