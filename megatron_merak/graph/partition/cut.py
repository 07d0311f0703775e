"""Cuts a captured graph into a chain of units, where the fewest values cross."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import inf
from os.path import commonprefix

from torch.fx import Graph, Node

from ...errors import PlanError
from ..capture.captured import Captured
from ..ir.names import layer_of, module_path, unit_names
from ..ir.nodes import classify, nbytes, op_name
from ..ir.operators import facts
from .farthest import farthest_dependency
from .node_sequence import NodeSequence

ALGORITHMS = ("cut", "farthest-dependency")
ABOUT = 1.5  # cuts whose bytes differ by less than this factor count as equal
REMEDY = (
    "Train and evaluate with batches for which the model runs the same layers in the same order"
)
SMALL = 8  # a value of at most 1/8 of the largest that crosses does not count towards the limit


@dataclass(frozen=True, eq=False)
class Chain:
    """A model as units that run one after the other, each reading only values that the previous one
    passes on.

    units:      the main and side nodes of the captured graph in its order, each in one unit.
    names:      unique names of the units, from module paths.
    crossing:   for each unit but the last, the main and side values that it passes on, computed by
                it or before it.
    kinds:      the kind of every node, see ``ir.nodes.classify``.
    parameters: for each unit, the names of the parameters that it reads, in order of first use.
    """

    units: tuple[tuple[Node, ...], ...]
    names: tuple[str, ...]
    crossing: tuple[tuple[Node, ...], ...]
    kinds: Mapping[Node, str]
    parameters: tuple[tuple[str, ...], ...]


def cut(captured: Captured, algorithm: str = "cut", max_crossing: int = 2) -> Chain:
    """Cut a captured model into a chain of units; a model that cannot be cut is one unit.

    algorithm:    "cut" cuts wherever the number of main values that cross has a minimum of at most
                  ``max_crossing``; "farthest-dependency" is the rule of the Merak paper, which has
                  no such limit.
    max_crossing: values that are small beside the largest one do not count.

    Raises PlanError for an unknown algorithm.
    """
    graph = captured.module.graph
    sequence = NodeSequence(graph, classify(graph, captured.shapes))
    if algorithm == "cut":
        cuts = fewest_crossing(sequence, max_crossing)
    elif algorithm == "farthest-dependency":
        cuts = farthest_dependency(sequence, captured.shapes)
    else:
        reason = f"the algorithms are {' and '.join(ALGORITHMS)}"
        raise PlanError("graph sharding", algorithm, reason, f"Use {' or '.join(ALGORITHMS)}")
    return _chain(sequence, cuts)


def cut_layers(captured: Captured, names: Sequence[str]) -> Chain:
    """Cut a captured model where a layer begins or ends, into units of these names."""
    graph = captured.module.graph
    sequence = NodeSequence(graph, classify(graph, captured.shapes))
    cuts = [
        cut
        for cut in range(len(sequence.nodes) - 1)
        if sequence.legal[cut] and _between_layers(sequence, cut)
    ]
    assert len(cuts) + 1 == len(names), "the model names its units"
    return replace(_chain(sequence, cuts), names=tuple(names))


def fewest_crossing(sequence: NodeSequence, max_crossing: int) -> list[int]:
    """Return the cuts at local minima of the number of main values that cross.

    The candidates are the cheapest cut between each two matrix products. A run of candidates with
    equal counts is a minimum if the counts on both sides are larger. Next to a smaller count (as
    with a branch beside a residual) it is cut only in its interior, and only where a layer begins
    or ends. Cuts that more than ``max_crossing`` values cross, small ones not counted, are left
    out.
    """
    candidates = [
        cheapest_cut(sequence, range(first, last)) for first, last in _product_gaps(sequence)
    ]
    counts = [inf if cut is None else len(sequence.main(cut)) for cut in candidates]
    beside = [inf, *counts, inf]
    cuts = []
    end = 0
    for count, plateau in groupby(counts):
        begin = end
        end = end + len(list(plateau))
        falls = beside[begin] < count
        drops = beside[end + 1] < count
        for cut in candidates[begin + falls : end - drops]:
            if cut is None or _count_large(sequence, cut) > max_crossing:
                continue
            if not (falls or drops) or _between_layers(sequence, cut):
                cuts.append(cut)
    return cuts


def _product_gaps(sequence: NodeSequence) -> list[tuple[int, int]]:
    """Return (first, last) of the gaps between matrix products; the last embedding before the first
    counts as one.
    """
    products = [i for i, flops in enumerate(sequence.flops) if flops]
    first = products[0] if products else len(sequence.nodes)
    lookups = [i for i in range(first) if facts(sequence.nodes[i]).looks_up]
    return list(pairwise(lookups[-1:] + products))


def cheapest_cut(sequence: NodeSequence, candidates: range) -> int | None:
    """Return the legal cut that the fewest main values cross; None if no cut is legal.

    Of those that send about the fewest bytes, it prefers one where a layer begins or ends, then one
    between the largest modules, then the last.
    """
    legal = [cut for cut in candidates if sequence.legal[cut]]
    fewest = min((len(sequence.main(cut)) for cut in legal), default=0)
    legal = [cut for cut in legal if len(sequence.main(cut)) == fewest]
    least = min((sequence.bytes(cut) for cut in legal), default=0)
    legal = [cut for cut in legal if sequence.bytes(cut) <= ABOUT * least]
    return min(legal, key=lambda cut: (_tie_break(sequence, cut), -cut), default=None)


def _tie_break(sequence: NodeSequence, cut: int) -> tuple[bool, int]:
    common_module = commonprefix(
        [module_path(sequence.nodes[cut]), module_path(sequence.nodes[cut + 1])]
    )
    return not _between_layers(sequence, cut), len(common_module)


def _between_layers(sequence: NodeSequence, cut: int) -> bool:
    return layer_of(sequence.nodes[cut]) != layer_of(sequence.nodes[cut + 1])


def _count_large(sequence: NodeSequence, cut: int) -> int:
    sizes = [nbytes(node) for node in sequence.main(cut)]
    return sum(SMALL * size > max(sizes) for size in sizes)


def _chain(sequence: NodeSequence, cuts: Sequence[int]) -> Chain:
    bounds = [0, *(cut + 1 for cut in cuts), len(sequence.nodes)]
    units = tuple(sequence.nodes[first:last] for first, last in pairwise(bounds))
    read = [sequence.parameters(i) for i in range(len(sequence.nodes))]
    parameters = tuple(
        tuple(dict.fromkeys(name for names in read[first:last] for name in names))
        for first, last in pairwise(bounds)
    )
    crossing = tuple(sequence.live[cut] if cut >= 0 else () for cut in cuts)
    return Chain(units, unit_names(units), crossing, sequence.kinds, parameters)


def align(chain: Chain, reference: Chain) -> Chain:
    """Cut another capture of the same model (another shape, or evaluation) as ``reference`` is cut.

    Unit k of both has the same name and reads the same parameters, or fewer if this capture does
    not use some of them (those that only training uses). A unit none of whose parameters are used
    is empty.

    Raises PlanError if that is impossible.
    """
    sequence = NodeSequence(_graph(chain), chain.kinds)
    landmarks = _landmarks(sequence)
    expected = _landmarks(NodeSequence(_graph(reference), reference.kinds))
    unit_of = {node: k for k, unit in enumerate(reference.units) for node in unit}
    if [landmark for _, landmark in landmarks] == [landmark for _, landmark in expected]:
        landmark_units = [unit_of[node] for node, _ in expected]
    else:
        landmark_units = _landmark_units([names for _, (_, names) in landmarks], reference)
    last = [-1] * len(reference.units)
    first = [len(sequence.nodes) - 1] * len(reference.units)
    for (node, _), unit in zip(landmarks, landmark_units, strict=True):
        last[unit] = max(last[unit], sequence.index[node])
        first[unit] = min(first[unit], sequence.index[node])
    cuts: list[int] = []
    for k in range(len(reference.units) - 1):
        if last[k] < 0 and reference.parameters[k]:
            cuts.append(cuts[-1] if cuts else -1)
            continue
        begin = max([*(cut + 1 for cut in cuts[-1:]), *last[: k + 1], 0])
        cut = cheapest_cut(sequence, range(begin, min(first[k + 1 :])))
        if cut is None:
            raise _cannot_align(reference.names[k], "the graph cannot be cut after it")
        cuts.append(cut)
    aligned = replace(_chain(sequence, cuts), names=reference.names)
    for name, actual, expected_names in zip(
        aligned.names, aligned.parameters, reference.parameters, strict=True
    ):
        if extra := [key for key in actual if key not in expected_names]:
            raise _cannot_align(name, f"in this capture it reads {', '.join(extra[:3])} too")
    return aligned


def _graph(chain: Chain) -> Graph:
    return next(iter(chain.kinds)).graph


def _landmarks(sequence: NodeSequence) -> list[tuple[Node, tuple[str, tuple[str, ...]]]]:
    """Return the nodes that read parameters or are matrix products, each with (op name, parameters)
    to identify it.
    """
    landmarks = []
    for i, node in enumerate(sequence.nodes):
        names = sequence.parameters(i)
        if names or sequence.flops[i]:
            landmarks.append((node, (op_name(node) if sequence.flops[i] else "", names)))
    return landmarks


def _landmark_units(read: Sequence[tuple[str, ...]], reference: Chain) -> list[int]:
    """Return the unit of each landmark, given the parameters that it reads.

    It is the first unit with these parameters that is not before the unit of the previous landmark.
    """
    units = []
    k = 0
    for names in read:
        unit = next(
            (
                j
                for j in range(k, len(reference.units))
                if set(names) <= set(reference.parameters[j])
            ),
            None,
        )
        if unit is None:
            raise _cannot_align(
                reference.names[k],
                f"{', '.join(names)} is read after it in this capture, not in the first",
            )
        k = unit
        units.append(k)
    return units


def _cannot_align(unit: str, reason: str) -> PlanError:
    return PlanError(
        "unit", unit, f"another capture of the model does not fit it: {reason}", REMEDY
    )
