"""A captured graph as a chain of units, cut where the fewest values cross."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf
from os.path import commonprefix

from torch.fx import Graph, Node

from ...errors import PlanError
from ..capture.captured import Captured
from ..ir.names import layer_of, module_path, unit_names
from ..ir.nodes import EMBEDDINGS, classify, is_op, nbytes, op_name
from .farthest import farthest_dependency
from .line import Line

ALGORITHMS = ("cut", "farthest-dependency")
ABOUT = 1.5  # bytes that differ by less than this factor do not decide where to cut
REMEDY = "Train and evaluate with batches for which the model runs the same layers in the same order"
SMALL = 8  # a value of at most 1/8 of the largest that crosses does not count towards the limit


@dataclass(frozen=True, eq=False)
class Chain:
    """A model as units that run one after the other, each reading only what the one before hands on.

    units: the main and side nodes of the captured graph, each in one unit, in its order; the outputs are ready behind
    the last. names: unique, from module paths. crossing: the main and side values that unit k hands on, made by it or
    by one before; one entry less than units. kinds: of every node, see ``nodes.classify``. parameters: the names that
    each unit reads, in the order of their first use.
    """

    units: tuple[tuple[Node, ...], ...]
    names: tuple[str, ...]
    crossing: tuple[tuple[Node, ...], ...]
    kinds: Mapping[Node, str]
    parameters: tuple[tuple[str, ...], ...]


def cut(captured: Captured, algorithm: str = "cut", max_crossing: int = 2) -> Chain:
    """The chain of a captured model.

    "cut" cuts wherever the number of main values that cross has a minimum of at most ``max_crossing``;
    "farthest-dependency" is the rule of the Merak paper, which knows no limit. A model without any such place is one
    unit. Raises PlanError for an unknown algorithm.
    """
    graph = captured.module.graph
    line = Line(graph, classify(graph, captured.shapes))
    if algorithm == "cut":
        cuts = fewest_crossing(line, max_crossing)
    elif algorithm == "farthest-dependency":
        cuts = farthest_dependency(line, captured.shapes)
    else:
        reason = f"the algorithms are {' and '.join(ALGORITHMS)}"
        raise PlanError("graph sharding", algorithm, reason, f"Use {' or '.join(ALGORITHMS)}")
    return _chain(line, cuts)


def fewest_crossing(line: Line, max_crossing: int) -> list[int]:
    """Between two matrix products the cheapest place; of these places the local minima of the number of main values,
    as far as at most ``max_crossing`` of them are not small.

    A plateau is a minimum if it rises on both sides. One beside lower ground (a branch beside a residual) is cut only
    inside, and only where a layer begins or ends.
    """
    places = [cheapest(line, range(first, last)) for first, last in _gaps(line)]
    counts = [inf if place is None else len(line.main(place)) for place in places]
    beside = [inf, *counts, inf]
    cuts, end = [], 0
    for count, plateau in groupby(counts):
        begin, end = end, end + len(list(plateau))
        falls, drops = beside[begin] < count, beside[end + 1] < count
        for place in places[begin + falls : end - drops]:
            if place is None or _large(line, place) > max_crossing:
                continue
            if not (falls or drops) or _between_layers(line, place):
                cuts.append(place)
    return cuts


def _gaps(line: Line) -> list[tuple[int, int]]:
    """From one matrix product to the next; the lookups before the first product count as one."""
    products = [i for i, flops in enumerate(line.flops) if flops]
    first = products[0] if products else len(line.nodes)
    lookups = [i for i in range(first) if is_op(line.nodes[i], *EMBEDDINGS)]
    return list(pairwise(lookups[-1:] + products))


def cheapest(line: Line, places: range) -> int | None:
    """The legal place where the fewest main values cross; of those that send about the fewest bytes the one where a
    layer begins or ends, else the one between the largest modules, else the last."""
    legal = [place for place in places if line.legal[place]]
    fewest = min((len(line.main(place)) for place in legal), default=0)
    legal = [place for place in legal if len(line.main(place)) == fewest]
    least = min((line.bytes(place) for place in legal), default=0)
    legal = [place for place in legal if line.bytes(place) <= ABOUT * least]
    return min(legal, key=lambda place: (_nature(line, place), -place), default=None)


def _nature(line: Line, place: int) -> tuple[bool, int]:
    together = commonprefix([module_path(line.nodes[place]), module_path(line.nodes[place + 1])])
    return not _between_layers(line, place), len(together)


def _between_layers(line: Line, place: int) -> bool:
    return layer_of(line.nodes[place]) != layer_of(line.nodes[place + 1])


def _large(line: Line, place: int) -> int:
    sizes = [nbytes(node) for node in line.main(place)]
    return sum(SMALL * size > max(sizes) for size in sizes)


def _chain(line: Line, cuts: Sequence[int]) -> Chain:
    bounds = [0, *(place + 1 for place in cuts), len(line.nodes)]
    units = tuple(line.nodes[first:last] for first, last in pairwise(bounds))
    read = [line.parameters(i) for i in range(len(line.nodes))]
    parameters = tuple(
        tuple(dict.fromkeys(name for names in read[first:last] for name in names)) for first, last in pairwise(bounds)
    )
    crossing = tuple(line.live[place] if place >= 0 else () for place in cuts)
    return Chain(units, unit_names(units), crossing, line.kinds, parameters)


def align(chain: Chain, reference: Chain) -> Chain:
    """``chain``, of another capture of the same model (another shape, evaluation), cut as ``reference`` is: unit k of
    both has the same name and reads the same parameters, or fewer of them where this capture does without (what only
    training uses); one of which it reads none is empty. Raises PlanError where that is impossible."""
    line = Line(_graph(chain), chain.kinds)
    marks, expected = _landmarks(line), _landmarks(Line(_graph(reference), reference.kinds))
    where = {node: k for k, unit in enumerate(reference.units) for node in unit}
    if [mark for _, mark in marks] == [mark for _, mark in expected]:
        homes = [where[node] for node, _ in expected]
    else:
        homes = _homes([names for _, (_, names) in marks], reference)
    last = [-1] * len(reference.units)
    first = [len(line.nodes) - 1] * len(reference.units)
    for (node, _), home in zip(marks, homes, strict=True):
        last[home] = max(last[home], line.index[node])
        first[home] = min(first[home], line.index[node])
    cuts: list[int] = []
    for k in range(len(reference.units) - 1):
        if last[k] < 0 and reference.parameters[k]:
            cuts.append(cuts[-1] if cuts else -1)
            continue
        begin = max([*(place + 1 for place in cuts[-1:]), *last[: k + 1], 0])
        place = cheapest(line, range(begin, min(first[k + 1 :])))
        if place is None:
            raise _misfit(reference.names[k], "the values behind it cannot be parted there")
        cuts.append(place)
    made = replace(_chain(line, cuts), names=reference.names)
    for name, mine, theirs in zip(made.names, made.parameters, reference.parameters, strict=True):
        if extra := [key for key in mine if key not in theirs]:
            raise _misfit(name, f"it reads {', '.join(extra[:3])} there, which the first capture does not")
    return made


def _graph(chain: Chain) -> Graph:
    return next(iter(chain.kinds)).graph


def _landmarks(line: Line) -> list[tuple[Node, tuple[str, tuple[str, ...]]]]:
    """The nodes that read parameters or are matrix products, with what is the same of them in every capture."""
    found = []
    for i, node in enumerate(line.nodes):
        names = line.parameters(i)
        if names or line.flops[i]:
            found.append((node, (op_name(node) if line.flops[i] else "", names)))
    return found


def _homes(read: Sequence[tuple[str, ...]], reference: Chain) -> list[int]:
    """The unit of each landmark, given the parameters it reads: the first one that has them, never one before."""
    homes, k = [], 0
    for names in read:
        found = next((j for j in range(k, len(reference.units)) if set(names) <= set(reference.parameters[j])), None)
        if found is None:
            raise _misfit(reference.names[k], f"{', '.join(names)} is read after it in this capture, not in the first")
        k = found
        homes.append(k)
    return homes


def _misfit(unit: str, reason: str) -> PlanError:
    return PlanError("unit", unit, f"another capture of the model does not fit it: {reason}", REMEDY)
