"""Context parallelism: every rank computes its part of each sequence, and attention of its heads.

Weights are replicated. A rank takes its part of the tokens, and what is computed position by
position stays on parts. Where positions meet, which is in attention as a rule, ranks exchange
pieces: each gives away all heads but its own, and gets its own heads of all positions. This is
Ulysses, found in a graph in place of written into a model:

    tokens -- embedding -- norm -- q, k, v --exchange-- attention --exchange-- product -- loss
              parts of sequences             parts of heads           parts of sequences

What an operator can do with parts, its sharding rule says, as in ``sequence``. One that cannot work
on parts of sequences is tried on parts of another dimension, and one that cannot work on these, such
as a product of all features, on parts of sequences again. What dimensions mean is only a matter of
which is tried first: an attempt is exact, or impossible. What nothing allows, every rank computes.

That is the first of three kinds, which exchanges (a2a). The other gathers (all_gather), as Llama 3 was
trained: attention is of a rank's own queries, of all heads, and what they attend to is gathered. It
is used where it is asked for, and where ranks cannot share the heads:

    tokens -- embedding -- norm -- q ------------------- attention -- product -- loss
                                -- k, v --all-gather---/
              parts of sequences throughout

The third is the second without what is gathered: keys and values go round from rank to rank (p2p), a
rank has those of two at a time, and attention is the sum of its parts, see ``ring_writer``. What has
no such parts gathers.

The first and the third make a hierarchy (a2a+p2p): groups of neighbours exchange heads, and the ranks
at the same place of each group are a ring, of its heads. All that is outside of attention is that of
the third, since what a group has of a sequence is what one rank of as few would have.

Of a causal mask the rank with the last positions would have most, so then each has chunks from both
ends of a sequence, see ``local.take_ends``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from ...config.parallel import A2A, ALL_GATHER, P2P, RINGS
from ...errors import PlanError
from ...segment import LayerAxis
from ..capture.captured import Captured
from ..ir.kinds import kind
from ..ir.marks import rotate
from ..ir.names import place
from ..ir.nodes import is_random, op_name, operand, values
from ..ir.operators import facts, flops, is_causal
from ..sharding import local
from ..sharding.history import Table
from ..sharding.placement import CannotShard, Decision, Layout
from ..sharding.rules_local import MEAN, SUM
from ..sharding.rules_positions import attention_of_positions, ring_of_positions
from ..sharding.rules_value import argument
from .ring_writer import RingWriter
from .routed import Routed, find_routed
from .sequence import OnParts, finish_parts, samples_of

aten = torch.ops.aten

SETTING = "--context-parallel-size"
_LIKE = ("view_as", "expand_as", "reshape_as", "type_as")  # of the second only shape or dtype
_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")
REPEATED = 0.05  # share of the FLOPs from which on it is said that every rank computes them


def shard_contexts(
    graph: Graph,
    captured: Captured,
    rank: int,
    ranks: int,
    mode: FakeTensorMode,
    cp_comm_type: str | None = None,
    inner: int = 1,
) -> str:
    """Divide the work of one rank's graph along the sequence; return the kind of exchange that
    this takes.

    ranks:        number of context-parallel ranks.
    mode:         of the fake values in the graph.
    cp_comm_type: "a2a", "a2a+p2p", "all_gather" or "p2p"; None: the first, where it divides all that the
                  third does.
    inner:        with "a2a+p2p", the number of neighbours that exchange heads.
    """
    _sum_losses(graph, mode)
    found = _divided(
        graph, captured, rank=rank, ranks=ranks, cp_comm_type=cp_comm_type, inner=inner
    )
    writer = RingWriter(
        graph,
        found.layouts,
        found.decisions,
        (),
        axis=LayerAxis.CP,
        parameters=captured.shapes,
        rank=rank,
        tp=ranks,
        mode=mode,
        turned=found.turned,
        exchanges=found.exchanges,
        from_ends=found.from_ends,
        rings=found.rings,
        inner=inner,
    )
    writer.run()
    finish_parts(graph, LayerAxis.CP, found.decisions)
    return found.exchange


def _divided(
    graph: Graph,
    captured: Captured,
    *,
    rank: int,
    ranks: int,
    cp_comm_type: str | None,
    inner: int,
) -> "OnContexts":
    """Return what computes on parts by the kind that is asked for, or by the one that divides more."""
    routed = find_routed(graph)
    kinds = (A2A, ALL_GATHER) if cp_comm_type is None else (cp_comm_type,)
    best: OnContexts | None = None
    for each in kinds:
        found = OnContexts(graph, captured, ranks, routed, rank=rank, exchange=each, inner=inner)
        if best is None or found.whole < best.whole:
            best = found
        if best.whole <= REPEATED * best.total:
            break
    assert best is not None
    return best


def repeated(graph: Graph) -> dict[Node, int]:
    """Return the nodes that every context-parallel rank computes in full, with their FLOPs.

    graph: after ``shard_contexts``.
    """
    counts = {
        node: flops(node)
        for node in graph.nodes
        if node.op == "call_function" and node.meta["unit"] is not None
    }
    return {node: count for node, count in counts.items() if count and not kind(node, LayerAxis.CP)}


def check_contexts(
    graph: Graph, ranks: int, tp: int = 1, cp_comm_type: str | None = None, inner: int = 1
) -> None:
    """Raise PlanError where ranks repeat more than a little, and other settings let them divide it;
    if they divide nothing; or if nothing goes round as was asked for.

    graph:        after ``shard_contexts``.
    tp:           tensor-parallel degree: a rank has as much less of the heads.
    cp_comm_type: the kind that was asked for.
    inner:        with a hierarchy, the number of neighbours that exchange heads.
    """
    whole = repeated(graph)
    total = sum(flops(node) for node in graph.nodes if node.op == "call_function")
    much = sum(whole.values()) > REPEATED * total
    odd = _odd_length(graph, whole, ranks) if much else None
    if odd is not None:
        reason = f"sequences of {odd} positions cannot be shared evenly by {ranks} ranks"
        raise PlanError(SETTING, ranks, reason, f"Pad them to a multiple of {ranks}")
    image = _image_of(graph) if much else None
    if image is not None:
        shape = " x ".join(map(str, values(image)[0].shape))
        reason = f"{image.name}, which is {shape}, is no sequence that ranks could share"
        raise PlanError(SETTING, ranks, reason, "Use 1")
    if cp_comm_type in RINGS:
        _check_ring(graph, cp_comm_type, inner)
    divided = any(flops(node) and kind(node, LayerAxis.CP) for node in graph.nodes)
    if not much or (divided and cp_comm_type != A2A):
        return
    node = next(iter(whole))
    reason = f"{op_name(node)} in {place(node)} can be divided neither by positions nor by heads"
    heads = "the number of heads" + (" of a tensor-parallel rank" if tp > 1 else "")
    remedy = f"Use a size that divides {heads}, or 1"
    if cp_comm_type == A2A:
        remedy = f"Use --cp-comm-type {ALL_GATHER}, or a size that divides {heads}, or 1"
    raise PlanError(SETTING, ranks, reason, remedy)


def _check_ring(graph: Graph, cp_comm_type: str | None, inner: int) -> None:
    """Raise PlanError if no keys and values go round, as without them a ring is nothing but a gather."""
    if graph.find_nodes(op="call_function", target=rotate):
        return
    reason = "this model has no scaled_dot_product_attention whose keys and values could go round"
    remedy = (
        f"Use {ALL_GATHER}, which has memory for those of all ranks, or attn_implementation sdpa"
    )
    attention = next((node for node in graph.nodes if facts(node).attends), None)
    if attention is not None:
        why = "dropout" if is_random(attention) else "keys, values or a mask that cannot go round"
        remedy = f"Use {ALL_GATHER}, which has memory for those of all ranks"
        heads = values(operand(attention))[0].shape[1]
        if heads % inner:
            why = f"{heads} heads, which {inner} ranks cannot share evenly"
            remedy = f"Use {P2P}, or a first size that divides them"
        reason = f"attention in {place(attention)} has {why}"
    if attention is not None and is_random(attention):
        remedy += ", or an attention dropout of 0"
    raise PlanError("--cp-comm-type", cp_comm_type, reason, remedy)


def lengths_of(graph: Graph) -> tuple[int, ...]:
    """Return the lengths of the sequences of a batch: second extents of its whole numbers, or of
    its tensors where there are none.
    """
    inputs = [value for node in graph.find_nodes(op="placeholder") for value in values(node)]
    inputs = [value for value in inputs if value.dim() > 1]
    numbers = [value for value in inputs if not value.is_floating_point()]
    return tuple(dict.fromkeys(value.shape[1] for value in numbers or inputs))


def _odd_length(graph: Graph, whole: Iterable[Node], ranks: int) -> int | None:
    """Return a length of sequences that ranks cannot share evenly, and that is one of what every
    rank computes; None without any.
    """
    if _image_of(graph) is not None:
        return None
    samples = samples_of(graph)
    extents = {
        extent
        for node in whole
        for x in (node, *node.all_input_nodes)
        for value in values(x)
        for extent in value.shape
    }
    for length in lengths_of(graph):
        if length % ranks and extents & {length, samples * length}:
            return length
    return None


def _image_of(graph: Graph) -> Node | None:
    """Return the first input with images, [samples, channels, height, width] or more, of a batch
    without tokens; None if there are tokens, or none is.
    """
    images = []
    for node in graph.find_nodes(op="placeholder"):
        for value in values(node):
            if value.dim() > 1 and not value.is_floating_point():
                return None
            if value.dim() > 3:
                images.append(node)
    return images[0] if images else None


class Reading(NamedTuple):
    """How a node reads an operand.

    layout: how it is sharded; None: all of it is gathered.
    turned: whether it is sharded along another dimension than the sequence.
    """

    layout: Layout | None
    turned: bool = False


_GATHERED = Reading(None)


class OnContexts(OnParts):
    """What computes on parts of sequences or, where that does not do, of another dimension.

    exchange:     how ranks exchange.
    inner:        number of neighbours that exchange heads beside a ring.
    gathers:      whether attention is of a rank's queries, and what they attend to comes to them.
    rings:        attention to what goes round.
    from_ends:    whether ranks have chunks from both ends of sequences, see ``local.take_ends``.
    turned:       nodes of which a rank has a part along another dimension than the sequence.
    exchanges:    node -> how operands are sharded for it, where it reads them otherwise.
    total, whole: FLOPs that a rank computes, and those of them that every rank does.
    """

    def __init__(
        self,
        graph: Graph,
        captured: Captured,
        ranks: int,
        routed: Mapping[Node, Routed],
        *,
        rank: int,
        exchange: str,
        inner: int = 1,
    ):
        self.inner = inner
        self.samples = samples_of(graph)
        self.lengths = [length for length in lengths_of(graph) if length % ranks == 0]
        self.rank = rank
        self.exchange = exchange
        self.gathers = exchange != A2A
        calls = graph.find_nodes(
            op="call_function", target=aten.scaled_dot_product_attention.default
        )
        causal = self.gathers and any(map(is_causal, calls))
        self.from_ends = causal and all(length % (2 * ranks) == 0 for length in self.lengths)
        self._parameters = {
            x for x in graph.find_nodes(op="get_attr") if x.target in captured.shapes
        }
        self._read: Mapping[Node, Reading] = {}
        super().__init__(graph, captured, LayerAxis.CP, ranks, starts={}, routed=routed)
        work = {x: flops(x) for x in graph.nodes if x.meta.get("unit") is not None}
        self.whole = sum(count for x, count in work.items() if not self._is_divided(x))
        self.total = self.whole + (sum(work.values()) - self.whole) // ranks

    def _is_divided(self, node: Node) -> bool:
        decision = self.decisions.get(node)
        divided = decision is not None and (decision.layout is not None or decision.reduce)
        return divided or bool(kind(node, LayerAxis.CP))

    def _add_tables(self) -> None:
        self.turned: Table[Node, None] = Table(self.history)
        self.rings: Table[Node, None] = Table(self.history)
        self.exchanges: Table[Node, Mapping[Node, Layout]] = Table(self.history)

    def layout(self, node: object) -> Layout | None:
        """Return how an operand is sharded for the node that is decided about."""
        if isinstance(node, Node) and node in self._read:
            return self._read[node].layout
        return super().layout(node)

    def _visit(self, node: Node) -> None:
        """Decide about a node; every rank computes all of it where nothing else is possible."""
        if is_random(node) and op_name(node) != "dropout" and not facts(node).attends:
            return  # of other random numbers a rank cannot draw its part
        sharded = [x for x in node.all_input_nodes if self.layouts[x] is not None]
        if not sharded:
            self._begin(node)
            return
        scattered: Mapping[Node, Reading] | None = None
        for way in self._ways(node, sharded):
            start = self.history.mark()
            if self._goes(node, sharded, way):
                if not self._scatters(node):
                    return
                scattered = way if scattered is None else scattered
            self.history.undo(start)
        if scattered is not None:
            self._goes(node, sharded, scattered)

    def _goes(self, node: Node, sharded: list[Node], way: Mapping[Node, Reading]) -> bool:
        """Whether a node can read its operands in a way, which is then decided."""
        if not self._decides(node, way):
            return False
        values_of = sharded[:1] if op_name(node) in _LIKE else sharded
        read = [x for x in values_of if x not in way or way[x].layout is not None]
        turned = [self._turns(x, way) for x in read]
        if any(turned):
            self.turned[node] = None
        if self.from_ends and any(turned) and not all(turned):
            return False  # the parts of a sequence are not those of another dimension
        if not self._suits(node, sharded):
            return False
        exchanged = {x: reading.layout for x, reading in way.items() if reading.layout}
        if exchanged:
            self.exchanges[node] = exchanged
        return True

    def _scatters(self, node: Node) -> bool:
        """Whether a rank has heads of each position, one position after the other: nothing that is
        divided by positions can be combined with that.
        """
        layout = self.layouts[node]
        several = isinstance(layout, Layout) and len(layout.blocks) > self.samples
        return node in self.turned and several

    def _begin(self, node: Node) -> None:
        """Let a node that reads the batch and parameters read its part of the batch."""
        for x in node.all_input_nodes:
            shape = self.shape(x) if values(x) else ()
            if x.meta["unit"] is not None or x in self._parameters or len(shape) < 2:
                continue
            if shape[1] not in self.lengths or shape[0] not in (1, self.samples):
                continue
            layout = Layout(1, (shape[1],))
            if op_name(node) == "embedding" and x is argument(node, "indices"):
                self._settle(node, layout, Decision(layout, {x: layout.spec()}))
                return
            start = self.history.mark()
            self.layouts[x] = layout
            if self._decides(node, {}) and self._suits(node, [x]):
                decision = self.decisions[node]
                taken = {**decision.to_shard, x: layout.spec()}
                self.decisions[node] = replace(decision, to_shard=taken)
                self.layouts[x] = None
                return
            self.history.undo(start)

    def _decides(self, node: Node, way: Mapping[Node, Reading]) -> bool:
        self._read = way
        self.gathered = {x: None for x, reading in way.items() if reading.layout is None}
        try:
            self.decide(node)
        except CannotShard:
            return False
        finally:
            self._read = {}
            self.gathered = {}
        return True

    def _suits(self, node: Node, sharded: list[Node]) -> bool:
        """Whether what was decided divides the work of a node, and the writer can write it."""
        decision = self.decisions.get(node)
        if decision is None:
            return True
        if decision.write or decision.fills or not self.shares_evenly(node):
            return False
        if decision.gathered and decision.layout is None:
            return False
        # A sum over all ranks costs its size, and what follows it is computed by all of them.
        operands = max(prod(self.shape(x)) for x in sharded if values(x))
        return not decision.reduce or prod(self.shape(node)) * self.tp <= operands

    def shares_evenly(self, node: Node) -> bool:
        if not super().shares_evenly(node):
            return False
        if not self.from_ends or node in self.turned:
            return True
        layout = self.layouts[node]
        layouts = layout if isinstance(layout, tuple) else (layout,)
        return all(block % (2 * self.tp) == 0 for each in layouts if each for block in each.blocks)

    def _by_rule(self, node: Node) -> Decision | None:
        if self.gathers and facts(node).attends:
            query = operand(node)
            layout = self.layout(query)
            by_position = layout is not None and layout.dim == len(self.shape(query)) - 2
            if layout is not None and by_position and not self._turns(query, self._read):
                if self.exchange in RINGS and self.layout(operand(node, 1)) is not None:
                    return self._ring(node)
                return attention_of_positions(self, node, self._starts(layout))
        return super()._by_rule(node)

    def _ring(self, node: Node) -> Decision:
        if any(self._turns(operand(node, place), self._read) for place in (1, 2)):
            raise self.cannot_shard(node, "has keys that are not those of positions")
        decision = ring_of_positions(self, node)
        mask = argument(node, "attn_mask")
        if self.inner > 1 and self.shape(operand(node))[1] % self.inner:
            raise self.cannot_shard(node, "has heads that neighbours cannot share")
        if self.inner > 1 and isinstance(mask, Node) and self.layout(mask) is not None:
            raise self.cannot_shard(node, "has a mask of which each rank computes its rows")
        self.rings[node] = None
        return decision

    def _turns(self, x: Node, way: Mapping[Node, Reading]) -> bool:
        """Whether an operand that is read in a way is sharded along another dimension."""
        return way[x].turned if x in way else x in self.turned

    def _route(self, routed: Routed) -> bool:
        """Rows of a rank are those of its tokens, in their order."""
        turned = any(x in self.turned for x in (operand(routed.sort), *routed.reads))
        return not (self.from_ends and turned) and super()._route(routed)

    def _starts(self, layout: Layout) -> tuple[int, ...]:
        """Return the first positions of the chunks that this rank has of a sequence."""
        length = sum(layout.blocks)
        if not self.from_ends:
            return (self.rank * (length // self.tp),)
        size = length // (2 * self.tp)
        return tuple(chunk * size for chunk in local.ends_of(self.rank, self.tp))

    def _ways(self, node: Node, sharded: list[Node]) -> Iterator[Mapping[Node, Reading]]:
        """Yield what is tried: operands as they are, along sequences again, along heads."""
        yield {}
        if self.gathers and (facts(node).attends or op_name(node) in _PRODUCTS):
            yield from self._gathering(node, sharded)
        movable = [x for x in sharded if self._moves(x)]
        turned = [x for x in movable if x in self.turned]
        if turned:
            yield from self._together({x: list(self._along_sequence(x)) for x in turned})
        straight = [x for x in movable if x not in self.turned]
        if straight:
            readings = {x: list(self._along_others(x)) for x in straight}
            yield from self._together(readings)
            if facts(node).attends:
                yield from self._attending(sharded, readings)

    def _attending(
        self, sharded: list[Node], readings: Mapping[Node, list[Reading]]
    ) -> Iterator[Mapping[Node, Reading]]:
        """Yield more ways for attention: a mask that the model computes is gathered, and so are keys
        and values of fewer heads than ranks, of which a rank takes those that it reads.
        """
        masks = {x: _GATHERED for x in sharded if x not in readings}
        if masks:
            yield from ({**way, **masks} for way in self._together(readings))
        first = next(iter(readings))
        others = {x: _GATHERED for x in sharded if x is not first}
        yield from ({**way, **others} for way in self._together({first: readings[first]}))

    def _gathering(self, node: Node, sharded: list[Node]) -> Iterator[Mapping[Node, Reading]]:
        """Yield that one operand is read as it is, and others are gathered. Of attention that is
        its queries, beside a mask that is sharded as they are.
        """
        movable = [x for x in sharded if self._moves(x)]
        for own in [operand(node)] if facts(node).attends else movable:
            others = [x for x in movable if x is not own]
            if own in movable and own not in self.turned and others:
                mask = argument(node, "attn_mask") if facts(node).attends else None
                yield {x: _GATHERED for x in others if x is not mask}
                if mask in sharded:
                    yield dict.fromkeys([*others, mask], _GATHERED)

    def _moves(self, x: Node) -> bool:
        """Whether ranks can exchange pieces of a value."""
        layout = self.layouts[x]
        return (
            isinstance(layout, Layout)
            and len(dict.fromkeys(layout.blocks)) == 1
            and values(x)[0].is_floating_point()
        )

    def _together(self, ways: Mapping[Node, list[Reading]]) -> Iterator[Mapping[Node, Reading]]:
        """Yield the first way to read each of some operands, then the second, and so on."""
        most = max(map(len, ways.values()))
        if all(ways.values()):
            for k in range(most):
                yield {x: readings[min(k, len(readings) - 1)] for x, readings in ways.items()}

    def _along_sequence(self, x: Node) -> Iterator[Reading]:
        shape = self.shape(x)
        layout = self.sharded_layout(x)
        for length in self.lengths:
            dims = [d for d, n in enumerate(shape) if d != layout.dim and n == length]
            if shape[0] == self.samples:
                dims.sort(key=lambda dim: dim == 0)  # of as many samples as positions
            for dim in dims:
                yield Reading(Layout(dim, (length,)))
            if layout.dim != 0 and self.samples > 1 and shape[0] == self.samples * length:
                yield Reading(Layout(0, (length,) * self.samples))

    def _along_others(self, x: Node) -> Iterator[Reading]:
        """Yield heads first: the third dimension from the end, in attention, or the second."""
        shape = self.shape(x)
        rank = len(shape)
        here = self.sharded_layout(x).dim
        near = [dim for dim in (rank - 3, rank - 2, rank - 1) if 0 <= dim != here]
        for dim in [*near, *(dim for dim in range(rank - 3) if dim != here)]:
            extent = shape[dim]
            if dim == 0 and rank == 3 and self.samples > 1 and extent % self.samples == 0:
                heads = extent // self.samples  # of each sample, one after the other
                if heads % self.tp == 0:
                    yield Reading(Layout(0, (heads,) * self.samples), True)
            elif extent % self.tp == 0:
                yield Reading(Layout(dim, (extent,)), True)


def _sum_losses(graph: Graph, mode: FakeTensorMode) -> None:
    """Write means of cross entropies as sums over counts, so that a rank adds up its own rows."""
    for node in list(graph.nodes):
        if op_name(node) == "cross_entropy_loss" and argument(node, "reduction") == MEAN:
            names = ("self", "target", "weight", "ignore_index", "label_smoothing")
            logits, target, weight, ignored, smoothing = (argument(node, name) for name in names)
            if weight is None:
                summed = (logits, target, weight, SUM, ignored, smoothing)
                _divide_sum(graph, node, summed, target, ignored, mode=mode)
        elif node.target is local.loss_of_stats and node.args[3] == MEAN:
            stats, target, ignored, _, smoothing, dtype = node.args
            summed = (stats, target, ignored, SUM, smoothing, dtype)
            _divide_sum(graph, node, summed, target, ignored, mode=mode)


def _divide_sum(
    graph: Graph,
    node: Node,
    summed: tuple[Any, ...],
    target: Any,
    ignored: Any,
    *,
    mode: FakeTensorMode,
) -> None:
    """Replace a mean of losses by what the same function returns for ``summed``, over their number.

    target, ignored: of the losses; those whose target is ``ignored`` do not count.
    """
    if target.meta["unit"] is not None:
        return
    common = {"unit": None, "grad": False}
    with graph.inserting_before(node):
        valid = graph.call_function(aten.ne.Scalar, (target, ignored))
        count = graph.call_function(aten.sum.default, (valid,))
        total = graph.call_function(cast(Callable, node.target), summed)
        mean = graph.call_function(aten.div.Tensor, (total, count))
    with torch.no_grad(), mode:
        valid.meta = {"val": target.meta["val"] != ignored, **common}
        count.meta = {"val": valid.meta["val"].sum(), **common}
    total.meta = dict(node.meta)
    mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
