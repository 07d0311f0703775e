"""Expert parallelism: each rank has some of the experts, and gets the rows that are theirs.

    rows of a rank, by expert --exchange--> rows of its experts, of all ranks -- grouped products
    rows of a rank, by expert <--exchange-- rows of its experts, of all ranks -----------|

The rows of routed experts (see ``routed``) are exchanged before the first grouped product, and back
after the last one. How many rows each rank gets from each is exchanged first: the only numbers that
the host has to know. Rows of no expert stay where they are, and zeros take their place.

With room for so many rows of each rank (``_Padded``) all exchange equal numbers, and the host has to
know none.

Where several neighbours shard each expert, rows are sent to all of them, and what they send back is
added up.

Ranks of one layer have rows of their own where sequence parallelism gives them some, and pick their
experts' of all rows where it cannot. Copies of a layer always have rows of their own.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import ops
from ...errors import PlanError
from ...segment import LayerAxis
from ..ir.kinds import NodeKind, kind, kinds_like
from ..ir.marks import copy_in, exchange, exchange_rows, reduce_sum
from ..ir.names import place
from ..ir.nodes import called, op_name, operand, values
from ..ir.operators import facts
from ..sharding import local
from ..sharding.expert_features import SETTING as SETTING_OF_SHARDS
from ..sharding.expert_features import ExpertFeatures, features_of, is_row_of_parameter
from ..sharding.experts import GROUPED, RESHAPES, weight_of, weights_of
from .routed import Routed, RoutedKind

aten = torch.ops.aten

_SETTING = "--expert-model-parallel-size"


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that divide experts, along ``axis``; this one is number ``rank`` of ``count``.

    shards: neighbours among them that shard each expert.
    room:   see ``Sharding``.
    """

    rank: int
    count: int
    axis: LayerAxis = LayerAxis.TP
    shards: int = 1
    room: float | None = None

    @property
    def divided(self) -> int:
        """Number of parts of the experts."""
        return self.count // self.shards

    def refused(self, reason: str, remedy: str) -> PlanError:
        if self.shards > 1:
            return PlanError(SETTING_OF_SHARDS, self.shards, reason, remedy)
        return PlanError(_SETTING, self.count, reason, remedy)


def divide_experts(
    graph: Graph,
    found: Mapping[Node, Routed],
    divided: Container[str],
    ranks: ExpertRanks,
    mode: FakeTensorMode,
    features: ExpertFeatures | None = None,
) -> None:
    """Exchange the rows of experts that ranks divide.

    graph:    of one rank, which computes routed experts with its own rows, or with all of them.
    found:    the routed experts.
    divided:  names of the weights of which a rank has those of its experts.
    mode:     of the fake values in the graph.
    features: what ranks that shard each expert have of rows; None: no ranks do.

    Raises PlanError for a product with such weights that belongs to no routed experts.
    """
    for routed in found.values():
        if any(weight_of(node) in divided for node in routed.products()):
            own_rows = ranks.axis is LayerAxis.EP or kind(routed.sort, LayerAxis.TP)
            exchanged = _Exchanged if ranks.room is None else _Padded
            way = exchanged if own_rows else _Picked
            way(graph, routed, ranks, mode, features=features or ExpertFeatures()).run()
    for node in graph.nodes:
        if op_name(node) not in GROUPED or node.meta.get("dispatched", False):
            continue
        if weight_of(node) in divided:
            reason = f"the rows that {op_name(node)} in {place(node)} multiplies are not routed"
            raise ranks.refused(reason, "Leave it out")


def divide_over_copies(
    graph: Graph,
    found: Mapping[Node, Routed],
    divided: Container[str],
    ranks: ExpertRanks,
    mode: FakeTensorMode,
    shared: Iterable[LayerAxis],
) -> None:
    """Let the ranks of several copies of a layer divide its experts; a rank's weights become those of
    its own.

    shared: axes of more than one rank, which must have rows of their own.

    For the other arguments see ``divide_experts``. Raises PlanError as it does, and if the ranks of
    a layer have the same rows.
    """
    for routed in found.values():
        for axis in shared:
            if not kind(routed.sort, axis):
                reason = (
                    f"{op_name(routed.sort)} in {place(routed.sort)} is of a batch of which the ranks "
                    "of a layer cannot have even parts"
                )
                remedy = "Pad sequences to a multiple of these ranks"
                raise ranks.refused(reason, remedy)
    features = features_of(graph, ranks.shards) if ranks.shards > 1 else ExpertFeatures()
    weights = weights_of((node for node in graph.nodes if op_name(node) in GROUPED), ranks.divided)
    shapes = {node: list(values(node)[0].shape) for node in (*weights.parts, *weights.places)}
    for found_weights, share in (
        (weights, ranks.divided),
        (features.weights(ranks.shards), ranks.shards),
    ):
        dims = {node: spec.dim for node, spec in found_weights.parts.items()}
        for node, dim in (dims | found_weights.places).items():
            shapes[node][dim] //= share
    with torch.no_grad(), mode:
        for node in weights.parts:
            node.meta["val"] = node.meta["val"].new_empty(shapes[node])
        for node in weights.places:
            if op_name(node) in RESHAPES:
                node.target = aten.reshape.default
                node.args = (operand(node), shapes[node])
            _compute(node)
    divide_experts(graph, found, divided, ranks, mode=mode, features=features)


def _widens(node: Node) -> bool:
    """Whether a node converts rows to a wider type, which they are better sent without."""
    if not facts(node).converts:
        return False
    return values(node)[0].dtype.itemsize > values(operand(node))[0].dtype.itemsize


def _compute(node: Node) -> None:
    """Give a node the value that it has for those of its arguments."""
    args = map_arg(node.args, lambda x: x.meta["val"])
    options = map_arg(node.kwargs, lambda x: x.meta["val"])
    node.meta["val"] = called(node)(*args, **options)


class _Divided:
    """Lets ranks compute with the rows of their own experts."""

    def __init__(
        self,
        graph: Graph,
        routed: Routed,
        ranks: ExpertRanks,
        mode: FakeTensorMode,
        features: ExpertFeatures,
    ):
        self.axis = ranks.axis
        self.graph = graph
        self.routed = routed
        self.rank = ranks.rank
        self.ranks = ranks.count
        self.shards = ranks.shards
        # than the values of the captured graph have, of as many rows as a rank has of its own
        self.other_shapes = ranks.shards > 1 or ranks.room is not None
        self.features = features
        self.mode = mode
        self.experts = int(values(self._counts())[0].shape[0])
        self.share = self.experts // ranks.divided
        self.first_rows = operand(routed.products()[0])
        self.unit = routed.products()[0].meta["unit"]
        self._made: dict[Any, Node] = {}

    def run(self) -> None:
        there = self._computed_there()
        for node in there:
            self._move(node, there)
            if self.other_shapes:
                with torch.no_grad(), self.mode:
                    _compute(node)
        for node in there:
            here = [user for user in node.users if not user.meta.get("dispatched", False)]
            if not here:
                continue
            with self.graph.inserting_before(node.next):
                back = self._all_rows(self._back(node), node)
            for user in here:
                user.replace_input_with(node, back)

    def _counts(self) -> Node:
        roles = self.routed.roles
        return next(node for node, role in roles.items() if role is RoutedKind.COUNTS)

    def _computed_there(self) -> dict[Node, None]:
        """Return what is computed by the ranks of the experts: products, and what is between."""
        rows = [node for node, role in self.routed.roles.items() if role is RoutedKind.ROWS]
        needed: set[Node] = set()
        for node in reversed(rows):
            if op_name(node) in GROUPED or any(user in needed for user in node.users):
                needed.add(node)
        there: dict[Node, None] = {}
        for node in rows:
            if op_name(node) in GROUPED:
                there[node] = None
                continue
            inputs = [x for x in node.all_input_nodes if x in self.routed.roles]
            if not any(x in there for x in inputs):
                continue
            if node not in self.features.partial and any(
                x in self.features.partial for x in inputs
            ):
                continue
            if node in needed or (
                not _widens(node) and all(x in there or is_row_of_parameter(x) for x in inputs)
            ):
                there[node] = None
        return there

    def _move(self, node: Node, there: Mapping[Node, None]) -> None:
        """Let a node read what is on its experts' rank."""
        new: dict[Node, Node] = {}
        for x in node.all_input_nodes:
            role = self.routed.roles.get(x)
            if x in there or role is None:
                continue
            with self.graph.inserting_before(node):
                if role is RoutedKind.COUNTS:
                    new[x] = self._offsets()
                elif is_row_of_parameter(x):
                    new[x] = self._share_of(self._rows_of_parameter(x), node)
                else:
                    new[x] = self._sent(x)
        if self.shards > 1:
            node.args = self.features.local_args(node, self.shards)
        node.args = map_arg(node.args, lambda x: new.get(x, x))
        node.kwargs = map_arg(node.kwargs, lambda x: new.get(x, x))
        node.meta = {**node.meta, **self._meta(), "dispatched": True}

    # ---- what is inserted -------------------------------------------------------------------
    def _meta(self) -> dict[str, Any]:
        """Return what is said of nodes that compute with the rows of a rank's experts."""
        return {}

    def _sent(self, x: Node) -> Node:
        """Return the rows of ``x`` that are of a rank's experts, by expert."""
        raise NotImplementedError

    def _back(self, y: Node) -> Node:
        """Return the rows of ``y`` among all rows, by expert."""
        raise NotImplementedError

    def _all_rows(self, back: Node, like: Node) -> Node:
        """Return the rows of a rank with those of no expert."""
        if not self.routed.drops:
            return back
        return self._call(local.with_dropped_rows, (back, operand(self.routed.sort)), like)

    def _counts_here(self) -> Node:
        """Return how many rows a rank's experts have, [of how many ranks, experts / ranks]."""
        raise NotImplementedError

    def _call(self, target: Any, args: tuple[Any, ...], like: Node, **meta: Any) -> Node:
        node = self.graph.call_function(target, args)
        unit = like.meta["unit"]
        # experts that follow from the batch alone: what ranks exchange is common to none
        unit = self.unit if unit is None else unit
        node.meta = {"unit": unit, "grad": like.meta["grad"], **kinds_like(like)}
        node.meta |= {"dispatched": True, "over": self.axis, **meta}
        if "val" not in meta:
            with torch.no_grad(), self.mode:
                node.meta["val"] = target(*map_arg(args, lambda x: x.meta["val"]))
        return node

    def _once(self, key: object, make: Callable[[], Node]) -> Node:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _own_counts(self) -> Node:
        """Return how many of this rank's rows each rank's experts get, [ranks, experts of one]."""

        def make() -> Node:
            counts = self._counts()
            shape = [self.ranks // self.shards, self.share]
            numbers = self._call(aten.to.dtype, (counts, torch.int64), counts, grad=False)
            numbers = self._call(aten.reshape.default, (numbers, shape), numbers)
            if self.shards == 1:
                return numbers
            args = (numbers, self.shards, 0)
            return self._call(aten.repeat_interleave.self_int, args, numbers)

        return self._once("own", make)

    def _offsets(self) -> Node:
        args = (self._counts_here(),)
        return self._once("offsets", lambda: self._call(local.expert_offsets, args, args[0]))

    def _rows_of_parameter(self, x: Node) -> Node:
        """Return a row of a parameter for each row that is here, by its expert."""

        def make() -> Node:
            rows = self._sent(self.first_rows)
            args = (self._counts_here(), self.rank // self.shards * self.share, rows)
            ids = self._call(local.expert_ids, args, x, grad=False, **self._meta())
            found = self._call(aten.index.Tensor, (operand(x), [ids]), x, **self._meta())
            return self._filled(found)

        return self._once(("parameter", x), make)

    def _filled(self, rows: Node) -> Node:
        """Return rows of parameters, whose gradients must be those of rows that there are."""
        return rows

    def _share_of(self, rows: Node, reader: Node) -> Node:
        """Return what a rank adds of the rows of a parameter: its features, or of the neighbours that
        add up a row one has all of it.
        """
        if self.shards == 1:
            return rows
        shard = self.rank % self.shards
        if reader in self.features.partial:
            return self._call(local.on_first, (rows, shard), rows, **self._meta())
        blocks = self.features.columns[reader]
        if values(rows)[0].shape[-1] == 1:
            return rows
        args = (rows, 1, blocks, shard, self.shards)
        return self._call(local.take, args, rows, **self._meta())


class _Exchanged(_Divided):
    """Ranks have rows of their own, and exchange them."""

    def _counts_here(self) -> Node:
        own = self._own_counts()
        return self._once("got", lambda: self._call(exchange, (own,), own, val=own.meta["val"]))

    def _number(self, target: Any, args: tuple[Any, ...]) -> Node:
        return self._call(target, args, self._counts_here(), grad=False)

    def _sizes(self) -> Node:
        """Return the numbers of rows that are sent to each rank, and got, [2, ranks]."""
        args = (self._own_counts(), self._counts_here())
        return self._once("sizes", lambda: self._call(local.row_counts, args, args[0]))

    def _sent(self, x: Node) -> Node:
        def make() -> Node:
            select = local.counted_rows if self.routed.drops else local.rows_to_send
            if self.shards > 1:
                args = (x, self._sizes(), self.shards)
                given = self._call(local.rows_to_shards, args, x)
            else:
                given = self._call(select, (x, self._sizes()), x, val=x.meta["val"])
            val = given.meta["val"]
            rows = self._call(exchange_rows, (given, self._sizes()), x, val=val)
            order = self._order(rows)
            return self._call(ops.permuted, (rows, order, self._inverse(rows)), x)

        return self._once(("sent", x), make)

    def _order(self, rows: Node) -> Node:
        """Return the numbers by expert of rows as they arrive."""
        args = (self._counts_here(), rows)
        return self._once("order", lambda: self._number(local.order_by_expert, args))

    def _inverse(self, rows: Node) -> Node:
        """Return where each row that arrives is in that order."""
        order = self._order(rows)
        return self._once("inverse", lambda: self._number(ops.inverse_order, (order,)))

    def _back(self, y: Node) -> Node:
        order = self._made["order"]
        given = self._call(ops.permuted, (y, self._made["inverse"], order), y)
        sizes = self._call(aten.flip.default, (self._sizes(), [0]), self._sizes())
        sent = self._call(local.rows_to_send, (given, sizes), y)
        got = self._call(exchange_rows, (sent, sizes), y, val=sent.meta["val"])
        if self.shards == 1:
            return got
        return self._call(local.sums_of_shards, (got, self._sizes(), self.shards), y)


class _Padded(_Exchanged):
    """Ranks have rows of their own, and exchange equal numbers, of which the host reads none: there
    is room for so many of a rank, and zeros lie behind those that there are.
    """

    def __init__(
        self,
        graph: Graph,
        routed: Routed,
        ranks: ExpertRanks,
        mode: FakeTensorMode,
        features: ExpertFeatures,
    ):
        super().__init__(graph, routed, ranks, mode, features=features)
        assert ranks.room is not None
        self.parts = ranks.divided
        self.factor = ranks.room
        self.rows = len(values(self.first_rows)[0])
        room = local.room_for(self.rows, self.parts, self.factor)
        self.filled = self.rows * self.shards / (self.ranks * room)

    def _meta(self) -> dict[str, Any]:
        return {"filled": self.filled}

    def _source(self) -> Node:
        """Return the number of the row in each place of what is sent to one of several neighbours."""
        args = (self._own_counts(), self.shards, self.rows, self.factor)
        return self._once("source", lambda: self._number(local.padded_source, args))

    def _place(self) -> Node:
        """Return where each row is in there."""
        args = (self._own_counts(), self.shards, self.rows, self.factor)
        return self._once("place", lambda: self._number(local.padded_places, args))

    def _order(self, rows: Node) -> Node:
        args = (self._counts_here(), self.shards, self.rows, self.factor)
        return self._once("order", lambda: self._number(local.padded_order, args))

    def _sent(self, x: Node) -> Node:
        def make() -> Node:
            given = self._call(ops.placed, (x, self._source(), self._place()), x)
            if self.shards > 1:
                args = (given, self.parts, self.shards)
                given = self._call(local.copies_for_shards, args, given)
            rows = self._exchanged(given, "there")
            order = self._order(rows)
            return self._call(ops.permuted, (rows, order, self._inverse(rows)), x)

        return self._once(("sent", x), make)

    def _back(self, y: Node) -> Node:
        rows = self._call(ops.permuted, (y, self._made["inverse"], self._made["order"]), y)
        got = self._exchanged(rows, "back")
        if self.shards > 1:
            args = (got, self.parts, self.shards)
            got = self._call(local.sums_of_copies, args, got)
        return self._call(ops.placed, (got, self._place(), self._source()), y)

    def _exchanged(self, rows: Node, way: str) -> Node:
        """Exchange as many rows as there is room for."""
        value = values(rows)[0]
        # no number of places: it is not affine in the length of a sequence, see ``lengths``
        shape = [self.ranks, -1, *value.shape[1:]]
        parted = self._call(aten.reshape.default, (rows, shape), rows)
        marked = (self.routed.sort.name, way)
        got = self._call(exchange, (parted,), rows, val=parted.meta["val"], rows=marked)
        return self._call(aten.reshape.default, (got, [-1, *value.shape[1:]]), rows)

    def _all_rows(self, back: Node, like: Node) -> Node:
        return back

    def _filled(self, rows: Node) -> Node:
        args = (rows, self._offsets())
        return self._call(local.filled_rows, args, rows)


class _Picked(_Divided):
    """Ranks have all rows, as of a batch that they cannot share evenly: each picks its own."""

    def _meta(self) -> dict[str, Any]:
        return {LayerAxis.TP: NodeKind.SHARDS}

    def _counts_here(self) -> Node:
        own = self._own_counts()
        args = (own, 0, self.rank, self.rank + 1)
        return self._once("here", lambda: self._call(aten.slice.Tensor, args, own))

    def _sent(self, x: Node) -> Node:
        def make() -> Node:
            entered = x
            if x.meta["grad"]:
                entered = self._call(copy_in, (x,), x, val=x.meta["val"], **self._meta())
            args = (entered, self._own_counts(), self.rank)
            return self._call(local.pick_rows, args, x, val=x.meta["val"], **self._meta())

        return self._once(("sent", x), make)

    def _back(self, y: Node) -> Node:
        args = (y, self._own_counts(), self.rank)
        placed = self._call(local.place_rows, args, y, val=y.meta["val"], **self._meta())
        return self._call(
            reduce_sum, (placed,), y, val=y.meta["val"], **{LayerAxis.TP: NodeKind.FULL}
        )
