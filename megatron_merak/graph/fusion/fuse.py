"""Groups of aten operations -> operations of ``ops``: the same value within rounding, fewer passes over memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..ir.aliases import changing
from . import attention, linear, loss, pointwise
from .patterns import Found, match


@dataclass(frozen=True)
class Rule:
    """``build(graph, root, found)`` makes what takes the place of ``root``, or returns None: it does not fit after all.

    New nodes go before ``root``. ``pattern`` is matched backwards from ``root``.
    """

    name: str
    pattern: object
    build: Callable[[Graph, Node, Found], Node | None]


def _rules(loss_chunk: int, recompute_activations: bool) -> tuple[Rule, ...]:
    """In the order of preference: a longer piece before a shorter one that it contains."""
    tables = (loss.rows(loss_chunk), attention.ROWS, pointwise.ROWS, linear.ROWS)
    tables += (linear.RECOMPUTED_ROWS,) if recompute_activations else ()
    return tuple(Rule(*row) for rows in tables for row in rows)


def fuse(graph: Graph, loss_chunk: int = 0, recompute_activations: bool = False) -> Counter[str]:
    """Replace every piece that a rule knows inside one unit; returns how many of each kind.

    ``loss_chunk``: rows whose logits a fused loss computes at a time, 0 for all. ``recompute_activations``: linear
    layers behind an activation do not keep their input.

    Works on a rewritten graph (local shapes, ``meta["unit"]``), in place. A piece stays as it is when something else
    reads a value in its middle, or when memory that it reads is written in place.
    """
    counts: Counter[str] = Counter()
    barred = changing(graph)
    for rule in _rules(loss_chunk, recompute_activations):
        for root in reversed(list(graph.nodes)):
            if root.op == "call_function" and root.users and _apply(rule, graph, root, barred):
                counts[rule.name] += 1
    if groups := linear.share_inputs(graph, barred):
        counts["linears of one input"] = groups
    graph.lint()
    return counts


def _apply(rule: Rule, graph: Graph, root: Node, barred: set[Node]) -> bool:
    for found in match(rule.pattern, root):
        if not _is_one_piece(found, root, barred):
            continue
        with graph.inserting_before(root):
            made = rule.build(graph, root, found)
        if made is None:
            continue
        shape, dtype = root.meta["val"].shape, root.meta["val"].dtype
        assert (made.meta["val"].shape, made.meta["val"].dtype) == (shape, dtype), f"{rule.name} at {root.name}"
        root.replace_all_uses_with(made)
        _erase(graph, root)
        return True
    return False


def _is_one_piece(found: Found, root: Node, barred: set[Node]) -> bool:
    """Its nodes belong to one unit, to one side of the collectives, and only the root is read elsewhere."""
    home = (root.meta.get("unit"), root.meta.get("sharded", False))
    for node in found.nodes:
        if (node.meta.get("unit"), node.meta.get("sharded", home[1])) != home or node in barred:
            return False
        if node is not root and any(user not in found.nodes for user in node.users):
            return False
    values = [value for value in found.values.values() if isinstance(value, Node)]
    return home[0] is not None and not any(value in barred for value in values)


def _erase(graph: Graph, node: Node) -> None:
    """Erase a node that nothing reads, and what only it read."""
    above = node.all_input_nodes
    graph.erase_node(node)
    for each in above:
        if not each.users and each.op == "call_function":
            _erase(graph, each)
