"""Finds routed experts in a graph: rows of tokens that are sorted by expert, and put back in order.

    expert ids [rows] -- sort -- order -- rows of x by expert -- grouped products -- rows by expert
                              |_ counts per expert ____________|                        |
                                                                 rows in their own order again

From the sort to the result every value is of rows in an order of the rows' own, or counts of them.
A rank that has some of the rows can so compute all of it with its own rows alone: what it sorts,
counts and multiplies are other numbers than those of one process, and the results are the same.
"""

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..ir.aliases import storages, writers
from ..ir.marks import copy_in, reduce_sum
from ..ir.nodes import constant, is_op, op_name, operand, operands, values
from ..sharding.experts import GROUPED, weight_of
from ..sharding.rules_value import POINTWISE, argument

aten = torch.ops.aten

_POINTWISE = frozenset(POINTWISE)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHER_DIMS = ("chunk", "split", "slice", "unsqueeze", "select", "split_with_sizes")


class RoutedKind(Enum):
    """What a value of routed experts is.

    ORDER:   numbers of the rows, by expert.
    INVERSE: where each row is in that order.
    ROWS:    something of each row, by expert.
    COUNTS:  something of each expert, from its number of rows.
    RESULT:  something of each row, in the rows' own order again.
    """

    ORDER = "order"
    INVERSE = "inverse"
    ROWS = "rows"
    COUNTS = "counts"
    RESULT = "result"


@dataclass(frozen=True, eq=False)
class Routed:
    """One sort and what depends on it.

    sort:  of expert ids, [rows].
    roles: node -> what its value is; the sort itself is not among them.
    reads: what is read of the rows in their own order: x -> rows per entry of its first dimension.
    """

    sort: Node
    roles: Mapping[Node, RoutedKind]
    reads: Mapping[Node, int] = field(default_factory=dict)

    @property
    def drops(self) -> bool:
        """Whether some rows may be of no expert, and behind those of the last one: a model has to
        compare the sorted ids to tell which, as their products may be any numbers.
        """
        compared = (node for node in self.roles if op_name(node) in _COMPARISONS)
        return any(operand(node) in self.roles for node in compared)

    def products(self) -> list[Node]:
        """Return the grouped products, in order."""
        return [node for node in self.roles if op_name(node) in GROUPED]


def find_routed(graph: Graph, weights: Container[str] | None = None) -> dict[Node, Routed]:
    """Return the routed experts of a graph, by their sort.

    weights: names of parameters: only those experts are wanted that read some; None: all.

    Where the inverse of an order is written by index, it is replaced by a sort of the order.
    """
    found = {}
    products = [node for node in graph.nodes if op_name(node) in GROUPED]
    if weights is not None and not any(weight_of(node) in weights for node in products):
        return {}
    for node in graph.nodes:
        if op_name(node) != "sort" or len(values(operand(node))[0].shape) != 1:
            continue
        if values(operand(node))[0].is_floating_point():
            continue
        sort_for_inverse(node)
        routed = _routed(node)
        if routed is not None:
            _read_first(routed)
            found[node] = routed
    return found


def _read_first(routed: Routed) -> None:
    """Move what is read of the rows in front of their sort, wherever a model computes it: a walk
    through the graph knows it then before it comes to the rows by expert.

    It stays where it is if it follows from the experts' results, or if its memory is written to
    behind the sort.
    """
    later: dict[Node, None] = {}
    node = routed.sort.next
    while node.op != "root":
        later[node] = None
        node = node.next
    wanted = {x for x in routed.reads if x in later}
    moved = []
    for node in reversed(later):
        if node in wanted:
            moved.append(node)
            wanted |= {x for x in node.all_input_nodes if x in later}
    if not moved or any(node in routed.roles for node in moved):
        return
    graph = routed.sort.graph
    home = storages(graph)
    writes = writers(graph)
    used = {home[x] for node in moved for x in (node, *node.all_input_nodes)}
    if any(write in later for storage in used for write in writes.get(storage, ())):
        return
    for node in reversed(moved):
        routed.sort.prepend(node)


def sort_for_inverse(sort: Node) -> None:
    """Replace index_put(empty, [order], 0 1 2 ...) by argsort(order), of the order of a sort."""
    graph = sort.graph
    for order in [user for user in sort.users if user.target is operator.getitem]:
        for node in list(order.users):
            if op_name(node) != "index_put" or list(constant(node, 1)) != [order]:
                continue
            numbers = operand(node, 2)
            if not is_op(numbers, "arange") or values(numbers)[0].shape != values(order)[0].shape:
                continue
            with graph.inserting_before(node):
                inverse = graph.call_function(aten.argsort.default, (order,))
            inverse.meta = dict(node.meta)
            node.replace_all_uses_with(inverse)
            graph.erase_node(node)


def _routed(sort: Node) -> Routed | None:
    roles: dict[Node, RoutedKind] = {}
    reads: dict[Node, int] = {}
    node = sort.next
    rows = values(operand(sort))[0].shape[0]
    while node.op != "root":
        if any(x is sort or _is_inside(roles.get(x)) for x in node.all_input_nodes):
            role = _role(node, sort, roles)
            if role is None:
                return None
            roles[node] = role
            x = node.args[0]
            if op_name(node) == "index" and isinstance(x, Node) and _is_read(x, roles):
                extent = values(x)[0].shape[0]
                if rows % extent:
                    return None
                reads[x] = rows // extent
        node = node.next
    multiplies = any(op_name(node) in GROUPED for node in roles)
    ends = RoutedKind.RESULT in roles.values()
    return Routed(sort, roles, reads) if multiplies and ends else None


def _is_inside(role: RoutedKind | None) -> bool:
    """Whether what reads a value depends on the order of the rows, too."""
    return role is not None and role is not RoutedKind.RESULT


def _is_read(x: Node, roles: Mapping[Node, RoutedKind]) -> bool:
    """Whether rows are picked from a value that is of the rows in their own order."""
    return x.op != "get_attr" and x not in roles


def _role(node: Node, sort: Node, roles: Mapping[Node, RoutedKind]) -> RoutedKind | None:
    """Return what the value of a node that reads some of ``roles`` is; None: it is not known."""
    name = op_name(node)
    inside = [roles[x] for x in node.all_input_nodes if _is_inside(roles.get(x))]
    if node.target in (copy_in, reduce_sum):  # where experts are divided by features
        return inside[0]
    if node.target is operator.getitem:
        if operand(node) is sort:
            return RoutedKind.ORDER if constant(node, 1) == 1 else RoutedKind.ROWS
        return inside[0]
    if name == "index":
        return _of_index(node, roles)
    if name in GROUPED:
        rows, weight, counts = operands(node, 0, 1, 2)
        fits = roles.get(rows) is RoutedKind.ROWS and roles.get(counts) is RoutedKind.COUNTS
        return RoutedKind.ROWS if fits and weight not in roles else None
    if name in ("histc", "bincount") and inside == [RoutedKind.ROWS]:
        return RoutedKind.COUNTS
    if name == "argsort" and inside == [RoutedKind.ORDER]:
        return RoutedKind.INVERSE
    if name == "cumsum" and inside == [RoutedKind.COUNTS]:
        return RoutedKind.COUNTS
    kinds = {RoutedKind.ROWS if role is RoutedKind.ORDER else role for role in inside}
    if len(kinds) != 1 or any(x not in roles and not _is_scalar(x) for x in node.all_input_nodes):
        return None
    (kind,) = kinds
    if kind not in (RoutedKind.ROWS, RoutedKind.COUNTS):
        return None
    keeps_rows = name in _OTHER_DIMS and argument(node, "dim", 0) % _rank(node) != 0
    return kind if keeps_rows or name in _POINTWISE else None


def _of_index(node: Node, roles: Mapping[Node, RoutedKind]) -> RoutedKind | None:
    indices = constant(node, 1)
    x = operand(node)
    if len(indices) != 1 or indices[0] not in roles:
        return None
    kind = roles[indices[0]]
    if x in roles:
        back = kind is RoutedKind.INVERSE and roles[x] is RoutedKind.ROWS
        return RoutedKind.RESULT if back else None
    return RoutedKind.ROWS if kind in (RoutedKind.ORDER, RoutedKind.ROWS) else None


def _is_scalar(node: Node) -> bool:
    return values(node)[0].dim() == 0


def _rank(node: Node) -> int:
    value = values(operand(node))[0]
    assert isinstance(value, Tensor)
    return value.dim() + (op_name(node) == "unsqueeze")
