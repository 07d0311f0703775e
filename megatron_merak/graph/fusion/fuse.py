"""Replaces groups of aten operations by operations of ``ops`` that are equal within rounding but
access less memory.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch.fx import Graph, Node

from ...ops import FourBit
from ..ir.aliases import changing
from . import adapters, attention, heads, linear, loss, pointwise, routed
from .four_bit import to_four_bit
from .fp8 import Fp8Weights, to_fp8
from .patterns import Match, matches


@dataclass(frozen=True)
class Rule:
    """One fusion.

    pattern:        matched backwards from its last node, ``root``.
    build:          build(graph, root, match) adds nodes before ``root`` and returns the one that
                    replaces it, or returns None if the match does not qualify, because of shapes
                    or dtypes.
    reads_four_bit: whether what it builds multiplies by weights in 4 bits, too.
    """

    name: str
    pattern: object
    build: Callable[[Graph, Node, Match], Node | None]
    reads_four_bit: bool = False


def _rules(
    loss_chunk: int,
    recompute_activations: bool,
    continued: Collection[int],
    written: Collection[Node],
    in_fp8: bool,
) -> tuple[Rule, ...]:
    """Return the rules in order of preference: a longer pattern before a shorter one that it
    contains.
    """
    tables: list[Sequence[tuple]] = [
        loss.rows(loss_chunk),
        attention.ROWS,
        pointwise.ROWS,
        routed.ROWS,
        pointwise.norms_of_sums(continued, written),
    ]
    if not in_fp8:  # where gate and up have a scale each, and frozen layers another type
        tables = [adapters.ROWS, *tables, linear.ROWS]
    if recompute_activations:
        tables.append(linear.RECOMPUTED_ROWS)
    return tuple(Rule(*row) for rows in tables for row in rows)


def fuse(
    graph: Graph,
    loss_chunk: int = 0,
    recompute_activations: bool = False,
    continued: Collection[int] = (),
    fp8: Fp8Weights | None = None,
    four_bit: Mapping[str, FourBit] = MappingProxyType({}),
) -> Counter[str]:
    """Apply every fusion to a rewritten graph in place; return how often each was applied, by name.

    Fusions stay inside one unit, but for the sum that ends one and that the next begins with. A
    match is left as it is if another node reads one of its intermediate values, or if memory that
    it reads is written in place.

    loss_chunk:            rows whose logits a fused loss computes at a time; 0 for all.
    recompute_activations: whether linear layers after an activation recompute it in the backward
                           instead of saving it.
    continued:             units that may begin with the sum that ends the one before.
    fp8:                   the linear layers that compute in fp8; None: none does.
    four_bit:              how frozen weights in 4 bits are stored, by name.
    """
    counts: Counter[str] = Counter()
    written = changing(graph)
    packed = {node for node in graph.find_nodes(op="get_attr") if node.target in four_bit}
    in_fp8 = fp8 is not None
    for rule in _rules(loss_chunk, recompute_activations, continued, written, in_fp8):
        apart = written if rule.reads_four_bit else written | packed
        for root in reversed(list(graph.nodes)):
            if root.op == "call_function" and root.users and _apply(rule, graph, root, apart):
                counts[rule.name] += 1
    # in fp8 each of them has a scale of its own
    joined = 0 if in_fp8 else heads.join_heads(graph, written)
    if joined:
        counts["query, key and value as one"] = joined
    if groups := linear.share_inputs(graph, written, fp8):
        counts["linears of one input"] = groups
    if fp8 is not None:
        counts["linear layers in fp8"] = to_fp8(graph, fp8)
    if four_bit and (found := to_four_bit(graph, four_bit)):
        counts["weights in 4 bits"] = found
    graph.lint()
    return counts


def _apply(rule: Rule, graph: Graph, root: Node, apart: set[Node]) -> bool:
    for match in matches(rule.pattern, root):
        if not _can_replace(match, root, apart):
            continue
        with graph.inserting_before(root):
            replacement = rule.build(graph, root, match)
        if replacement is None:
            continue
        shape = root.meta["val"].shape
        dtype = root.meta["val"].dtype
        assert (replacement.meta["val"].shape, replacement.meta["val"].dtype) == (shape, dtype), (
            f"{rule.name} at {root.name}"
        )
        root.replace_all_uses_with(replacement)
        pointwise.erase_unread(graph, root)
        return True
    return False


def _can_replace(match: Match, root: Node, apart: set[Node]) -> bool:
    """Whether all nodes are in one unit, all sharded or all replicated, and only the root is read
    by other nodes.

    apart: values that must not be among these, nor be read by them.
    """
    home = (root.meta.get("unit"), root.meta.get("sharded", False))
    for node in match.nodes:
        if (node.meta.get("unit"), node.meta.get("sharded", home[1])) != home or node in apart:
            return False
        if node is not root and any(user not in match.nodes for user in node.users):
            return False
    values = [value for value in match.values.values() if isinstance(value, Node)]
    return home[0] is not None and not any(value in apart for value in values)
