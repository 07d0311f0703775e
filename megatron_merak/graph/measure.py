"""Measure each unit for the planner: what one tensor-parallel rank stores, computes, saves for the
backward and sends.

The numbers come from the graph that the rank will run, rewritten and fused. To find what autograd
saves for the backward, a unit is run once on fake tensors. Units of equal structure are measured
once.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..config.parallel import A2A, A2A_P2P, ALL_GATHER, RINGS
from ..errors import PlanError
from ..ops import Kept, gated_grouped_linear, gated_linear, gelu_linear, row, stored_bytes
from ..plan import TensorSharding, Unit
from ..segment import LayerAxis
from .behind import put_behind_exchanges
from .capture.captured import Captured
from .fusion.bundles import bundle
from .fusion.four_bit import stored_as, unpacked_bytes
from .fusion.fp8 import Fp8Weights, check_shards, fp8_work
from .fusion.fuse import fuse
from .fusion.linear import RECOMPUTED
from .hiding import hiding, meanwhile
from .ir.kinds import LEVELS, over
from .ir.marks import (
    all_gather,
    copy_in,
    exchange,
    exchange_rows,
    reduce_scatter,
    reduce_sum,
    rotate,
    stack,
    turn_back,
)
from .ir.nodes import is_op, nbytes, operand, values
from .ir.operators import facts, filled, flops
from .kept_state import StateOf, kept_state
from .lowering.context import check_contexts, repeated
from .lowering.documents import known_documents
from .lowering.emit import SinkCall, call_with_sink
from .lowering.flow import REDUCTIONS, Flow
from .lowering.regathered import is_regathered
from .lowering.rewrite import rewrite
from .lowering.sequence import check_sequences
from .lowering.split import crossings
from .more_flops import attention_drops, attention_heads, more_flops, unneeded_flops
from .partition.cut import Chain
from .rehearsal import rehearse
from .replay import Replay, storage_of, tensors_of
from .sharding.shard import Sharding

# What is done with a gradient sends as much as what was done with the value.
_ROTATIONS = (rotate, turn_back)
_EXCHANGES = (exchange, exchange_rows, *_ROTATIONS)
_SAME_BACKWARD = (reduce_scatter, *_EXCHANGES)
# products of an activation that they compute again, and how many values it reads for one
_AGAIN = {gated_linear: 2, gated_grouped_linear: 2, gelu_linear: 1}
_BACKWARD_OPERATIONS = 2.3  # operations that the backward starts for each one of the forward


def measure(
    captured: Captured,
    chain: Chain,
    sharding: Sharding,
    tp: int,
    fused_attention: bool = False,
    loss_chunk: int = 0,
    recompute_activations: bool = False,
    fp8: Fp8Weights | None = None,
    positions: Tensor | None = None,
    state_of: StateOf | None = None,
    sequence_parallel: bool = False,
    cp: int = 1,
    cp_comm_type: str | None = None,
    cp_inner: int = 1,
    compile_pointwise: bool = False,
) -> tuple[Unit, ...]:
    """Return the units of a chain, with one tensor-parallel rank's numbers.

    fused_attention:       whether the device that will run them has fused attention, see
                           ``cluster.Device``.
    loss_chunk:            see ``fuse``.
    recompute_activations: see ``fuse``.
    fp8:                   see ``fuse``.
    positions:             those of packed rows on a CPU, see ``known_documents``.
    state_of:              bytes that the optimizer stores for each value of a parameter; None: as
                           the plan says.
    sequence_parallel:     see ``rewrite``.
    cp:                    number of ranks that divide sequences.
    cp_comm_type:          see ``rewrite``; likewise cp_inner.
    compile_pointwise:     whether groups of pointwise operations are compiled, see ``bundle``.

    Raises PlanError if there is no activation to recompute, or nothing to shard along a sequence.
    """
    rewritten = rewrite(
        captured,
        chain,
        sharding,
        0,
        tp=tp,
        sequence_parallel=sequence_parallel,
        cp_rank=cp - 1,  # of a causal mask it has most, unless all have as much
        cp=cp,
        cp_comm_type=cp_comm_type,
        cp_inner=cp_inner,
    )
    whole: Counter[int] = Counter()
    if cp > 1:
        check_contexts(rewritten.graph, cp, tp, cp_comm_type, inner=cp_inner)
        for node, count in repeated(rewritten.graph).items():
            whole[node.meta["unit"]] += count
    if sequence_parallel:
        check_sequences(rewritten.graph, tp)
    calls = [node for node in rewritten.graph.nodes if node.op == "call_function"]
    unfused = _by_unit(((node, node.meta.get("unit")) for node in calls), len(chain.units))
    products = [
        (sum(map(flops, nodes)), _product_sizes(nodes), unneeded_flops(nodes)) for nodes in unfused
    ]
    narrow = [fp8_work(nodes, fp8) for nodes in unfused]
    if fp8 is not None:
        check_shards(rewritten.graph, fp8, sharding.tensors, tp)
    counts = fuse(
        rewritten.graph, loss_chunk, recompute_activations, fp8=fp8, four_bit=captured.four_bit
    )
    if recompute_activations and not counts[RECOMPUTED]:
        reason = "the model has no linear layer behind an activation that is known"
        if captured.four_bit:
            reason += " whose weight is not in 4 bits"
        raise PlanError(
            "--recompute-granularity",
            "selective (recompute_activations)",
            reason,
            "Leave it out, or use full",
        )
    put_behind_exchanges(rewritten)
    if compile_pointwise:
        bundle(rewritten)
    documents = (
        {}
        if positions is None
        else known_documents(rewritten.graph, rewritten.constants, positions)
    )
    flow = Flow(rewritten, documents)
    measured: dict[Hashable, Unit] = {}
    costs = []
    for (total, sizes, unneeded), (in_fp8, rounded), nodes in zip(
        products, narrow, _by_unit(flow.unit.items(), len(chain.units)), strict=True
    ):
        key = (total, sizes, unneeded, in_fp8, rounded, signature(nodes, flow))
        if key not in measured:
            rest = unit_costs(nodes, flow, fused_attention)
            unit = replace(
                rest,
                flops=total,
                products=sizes,
                unneeded_flops=unneeded,
                fp8_flops=in_fp8,
                rounded_values=rounded,
            )
            measured[key] = replace(unit, **_hidden(nodes, flow, unit))
        costs.append(measured[key])
    units = _assembled(captured, chain, sharding, tp, costs=costs, state_of=state_of)
    if cp > 1:
        units = tuple(replace(unit, repeated_flops=whole[at]) for at, unit in enumerate(units))
        units = _with_exchanges(units, flow, rewritten.cp_comm_type, cp_inner)
    return _with_parts(units, flow) if sequence_parallel or cp > 1 else units


def _with_exchanges(
    units: tuple[Unit, ...], flow: Flow, cp_comm_type: str, inner: int
) -> tuple[Unit, ...]:
    """Return the units with what ranks that divide sequences exchange in each. What cannot gather
    may exchange all the same.

    inner: number of neighbours that exchange heads beside a ring.
    """
    marks: list[set[object]] = [set() for _ in units]
    for node, unit in flow.unit.items():
        if node.target in (exchange, all_gather, rotate) and over(node) in (LayerAxis.CP, *LEVELS):
            marks[unit].add(node.target)
    kinds = [_kind_of(found, cp_comm_type) for found in marks]
    return tuple(
        replace(unit, cp_comm_type=kind, cp_inner=inner if kind == A2A_P2P else 1)
        for unit, kind in zip(units, kinds, strict=True)
    )


def _kind_of(marks: set[object], cp_comm_type: str) -> str:
    if cp_comm_type in RINGS and rotate not in marks and all_gather in marks:
        return ALL_GATHER  # attention that has no parts
    return A2A if marks == {exchange} else cp_comm_type if marks else ""


def _hidden(nodes: Sequence[Node], flow: Flow, unit: Unit) -> dict[str, Any]:
    """Return the fields of a unit on what hides the collectives of its backward."""
    collectives = [node for node in nodes if _has_gradient_sent(node, flow)]
    found = hiding(nodes, flow, collectives)
    weights = unit.flops - unit.attention_flops - unit.unneeded_flops[1]
    routed = [node for node in found.bare if over(node) is LayerAxis.EP]
    bare = [node for node in found.bare if over(node) is LayerAxis.CP]
    beside = any(over(node) is LayerAxis.TP for node in collectives)
    sizes = [(_backward_collective(node)[1], _is_exchange(node, beside)) for node in bare]
    shared = meanwhile(nodes, flow, collectives)
    given_back = [mark for mark in shared.marks if flow.differentiable[mark]]
    return {
        "meanwhile_flops": (*shared.flops, shared.hiding),
        "meanwhile_bytes": (sum(map(nbytes, shared.marks)), sum(map(nbytes, given_back))),
        "hiding": min(1.0, found.flops / weights) if weights else 0.0,
        "bare_bytes": (
            sum(size for size, _ in sizes),
            sum(size for size, exchanged in sizes if exchanged),
            sum(map(nbytes, routed)),
        ),
        "inner_sent": _along(LayerAxis.INNER, nodes, collectives, found.bare),
        "outer_sent": _along(LayerAxis.OUTER, nodes, collectives, found.bare),
    }


def _along(
    axis: LayerAxis, nodes: Sequence[Node], back: Sequence[Node], bare: Sequence[Node]
) -> tuple[tuple[int, int], ...]:
    """Return (number, bytes) of the exchanges of a level, see ``Unit``.

    nodes: of a unit.
    back:  marks of these whose gradients are sent.
    bare:  those of these that nothing hides.
    """
    ahead = [node for node in nodes if node.target in _EXCHANGES and node.target is not turn_back]
    found = tuple(_number_and_bytes(marks, axis) for marks in (ahead, back, bare))
    return found if any(number for number, _ in found) else ()


def _number_and_bytes(marks: Sequence[Node], axis: LayerAxis) -> tuple[int, int]:
    """Return how many marks are of an axis, and the bytes of these."""
    own = [node for node in marks if over(node) is axis]
    return len(own), sum(map(nbytes, own))


def _with_parts(units: tuple[Unit, ...], flow: Flow) -> tuple[Unit, ...]:
    """Return the units with the bytes that cross between them, which may be of parts."""
    changed = []
    borders = crossings(flow)
    for index, unit in enumerate(units[:-1]):
        crossing = borders[index + 1]
        passed = sum(nbytes(node) for node in crossing if flow.unit[node] != index)
        changed.append(replace(unit, output_bytes=sum(map(nbytes, crossing)), passed_bytes=passed))
    return (*changed, units[-1])


def _product_sizes(nodes: Iterable[Node]) -> tuple[tuple[int, int, int], ...]:
    """Return (m, n, k) of each matrix product but those of attention; a batch of products counts as
    more rows m.
    """
    sizes = []
    for node in nodes:
        product_flops = 0 if facts(node).attends else flops(node)
        if product_flops and (results := values(node)):
            columns = results[0].shape[-1]
            count = round(results[0].numel() * filled(node))
            sizes.append((count // columns, columns, max(1, product_flops // (2 * count))))
    return tuple(sizes)


def _by_unit(units: Iterable[tuple[Node, int | None]], count: int) -> list[list[Node]]:
    """Return the nodes of each of ``count`` units, given (node, unit) pairs; None: of no unit."""
    nodes: list[list[Node]] = [[] for _ in range(count)]
    for node, unit in units:
        if unit is not None:
            nodes[unit].append(node)
    return nodes


def _assembled(
    captured: Captured,
    chain: Chain,
    sharding: Sharding,
    tp: int,
    costs: Sequence[Unit],
    state_of: StateOf | None,
) -> tuple[Unit, ...]:
    """Return the units: ``costs`` of each, completed by what the chain and the sharding say."""
    users: dict[str, int] = {}
    for names in chain.parameters:
        for parameter in names:
            users[parameter] = users.get(parameter, 0) + 1
    units = []
    for index, (nodes, name, names) in enumerate(
        zip(chain.units, chain.names, chain.parameters, strict=True)
    ):
        last = index == len(chain.units) - 1
        crossing = _outputs(captured) if last else chain.crossing[index]
        own_nodes = frozenset(nodes)
        tensors = [sharding.tensors[parameter] for parameter in names]
        sizes = {
            tensor.name: stored_values(tensor, sharding.ranks_of(tensor)) for tensor in tensors
        }
        own, shared = (
            [parameter for parameter in names if (users[parameter] > 1) == tied]
            for tied in (False, True)
        )
        frozen = [parameter for parameter in own if parameter not in captured.trainable]
        packed = [parameter for parameter in own if parameter in captured.four_bit]
        crossing_bytes = [(node, _local_bytes(node, sharding)) for node in crossing]
        units.append(
            replace(
                costs[index],
                name=name,
                kind=re.sub(r"\d+", "*", name),
                parameters=sum(sizes[parameter] for parameter in own),
                output_bytes=sum(size for _, size in crossing_bytes),
                tied=tuple((parameter, sizes[parameter]) for parameter in shared),
                passed_bytes=0
                if last
                else sum(size for node, size in crossing_bytes if node not in own_nodes),
                frozen=sum(sizes[parameter] for parameter in frozen),
                packed=sum(sizes[parameter] for parameter in packed),
                packed_bytes=sum(_packed_bytes(each, captured, sharding) for each in packed),
                experts=sum(
                    sizes[parameter]
                    for parameter in own
                    if sharding.tensors[parameter].experts and parameter in captured.trainable
                ),
                tied_frozen=tuple(
                    parameter for parameter in shared if parameter not in captured.trainable
                ),
                **kept_state(own, shared, sizes, captured, state_of=state_of),
            )
        )
    return tuple(units)


def _packed_bytes(name: str, captured: Captured, sharding: Sharding) -> int:
    """Return the bytes of a rank's shard of a weight in 4 bits."""
    tensor = sharding.tensors[name]
    shape = tensor.stored_shape(sharding.ranks_of(tensor))
    return stored_bytes(stored_as(captured.four_bit[name], shape))


def stored_values(tensor: TensorSharding, ranks: int) -> int:
    """Return how many values of a tensor one of ``ranks`` ranks stores, padding included."""
    return prod(tensor.stored_shape(ranks))


def _outputs(captured: Captured) -> tuple[Node, ...]:
    (output,) = captured.module.graph.find_nodes(op="output")
    return tuple(output.all_input_nodes)


def _local_bytes(node: Node, sharding: Sharding) -> int:
    """Return the bytes of one rank's shard of a value of the captured graph."""
    layout = sharding.layouts.get(node)
    if layout is None or isinstance(layout, tuple):
        return nbytes(node)
    return nbytes(node) // values(node)[0].shape[layout.dim] * layout.extent(sharding.tp)


def signature(nodes: Sequence[Node], flow: Flow) -> Hashable:
    """Return what is equal for units that cost the same: operations, where their operands come
    from, and literals.
    """
    positions = {node: index for index, node in enumerate(nodes)}
    outside: dict[Node, int] = {}

    def described(argument: Node) -> Any:
        source = flow.resolve(argument)
        if source in positions:
            return ("inner", positions[source])
        shapes = [(tuple(value.shape), value.dtype) for value in values(source)]
        number = outside.setdefault(source, len(outside))
        documents = flow.documents.get(source)
        return (
            "outer",
            number,
            shapes,
            flow.differentiable.get(source, False),
            flow.is_parameter(source),
            _is_only_reader(nodes, flow, source),
            _saved_by_earlier_unit(nodes, flow, source),
            None if documents is None else documents.tolist(),
        )

    return tuple(
        (node.target, repr(map_arg((node.args, node.kwargs), described))) for node in nodes
    )


def unit_costs(nodes: Sequence[Node], flow: Flow, fused_attention: bool = False) -> Unit:
    """Return what the operations of one unit cost, except for its matrix products; all else is for
    the caller.
    """
    collectives = [node for node in nodes if node.target in REDUCTIONS or node.target is copy_in]
    between_copies = [node for node in collectives if over(node) is LayerAxis.EP]
    sent_back_copies = [node for node in between_copies if flow.differentiable[node]]
    routed = (sum(map(nbytes, between_copies)), sum(map(nbytes, sent_back_copies)))
    inside = [node for node in collectives if over(node) in (LayerAxis.TP, LayerAxis.CP)]
    marks = [node for node in inside if _has_gradient_sent(node, flow)]
    regathered = [operand(node) for node in marks if is_regathered(flow, node, nodes)]
    ahead = [node for node in inside if node.target in REDUCTIONS and node.target is not turn_back]
    forward = [_forward_collective(node) for node in ahead]
    backward = [*map(_backward_collective, marks), *map(_forward_collective, regathered)]
    beside = any(over(node) is LayerAxis.TP for node in inside)
    exchanges = [node for node in inside if _is_exchange(node, beside)]
    sent_ahead, sent_back = _sent(exchanges)
    sent_again, _ = _sent([node for node in regathered if _is_exchange(node, beside)])
    of_context, _ = _sent([node for node in regathered if over(node) is LayerAxis.CP])
    rotations = [node for node in exchanges if node.target in _ROTATIONS]
    replay = Replay(nodes, flow, fused_attention)
    attention, more = more_flops(nodes, fused_attention)
    saved = sum(replay.saved.values())
    differentiable = any(flow.differentiable[node] for node in nodes)
    unread = sum(
        tensor.untyped_storage().nbytes()
        for node, value in replay.outside.items()
        for tensor in tensors_of(value)
        if _is_only_reader(nodes, flow, node) and storage_of(tensor) not in replay.saved_inputs
    )
    return Unit(
        name="",
        kind="",
        parameters=0,
        flops=0,
        output_bytes=0,
        attention_flops=attention,
        attention_drops=attention_drops(nodes),
        attention_heads=attention_heads(nodes),
        more_flops=more,
        saved_bytes=saved,
        transient_bytes=replay.transient,
        reduces=(_count(forward), _count(backward)),
        reduced_bytes=(sum(size for _, size in forward), sum(size for _, size in backward)),
        exchanged_bytes=(sent_ahead, sent_back + sent_again),
        ring_bytes=_sent(rotations),
        routed_bytes=routed,
        regathered_bytes=(of_context, sent_again),
        operations=(
            replay.operations,
            round(_BACKWARD_OPERATIONS * replay.operations) if differentiable else 0,
        ),
        backward=differentiable,
        weight_bytes=_weight_bytes(nodes, flow, replay),
        added_values=sum(_added_values(node, flow) for node in nodes),
        recomputed_bytes=_recomputed_bytes(nodes),
        unread_bytes=unread,
        unpacked_bytes=unpacked_bytes(nodes),
        running_bytes=rehearse(
            nodes,
            flow,
            fused_attention,
            saved,
            unread=unread,
            overlaps=len(collectives) > len(between_copies),
        ),
    )


def _recomputed_bytes(nodes: Sequence[Node]) -> tuple[int, int]:
    """Return the bytes of activations that a backward computes again, and those moved for that."""
    left_out = 0
    moved = 0
    for node in nodes:
        if node.target in _AGAIN:
            read = nbytes(operand(node))
            activation = read // _AGAIN[node.target]
            left_out += activation
            moved += read + activation
    return left_out, moved


def _is_exchange(mark: Node, beside: bool) -> bool:
    """Whether a mark is of an exchange, or is priced as one: a gather over context-parallel ranks,
    which is none between the tensor-parallel ones ``beside`` it.
    """
    gathers = mark.target is all_gather and over(mark) is LayerAxis.CP
    return mark.target in _EXCHANGES or beside and gathers


def _has_gradient_sent(node: Node, flow: Flow) -> bool:
    """Whether a node is a mark of a value whose gradient ranks send."""
    return node.target in (copy_in, *_SAME_BACKWARD) and flow.differentiable[node]


def _sent(marks: Sequence[Node]) -> tuple[int, int]:
    """Return the bytes that stand for exchanges, of (forward, backward)."""
    sizes = [(_forward_collective(node)[1], node.target is turn_back) for node in marks]
    return sum(size for size, late in sizes if not late), sum(size for size, _ in sizes)


def _count(collectives: Iterable[tuple[float, int]]) -> int:
    return ceil(sum(count for count, _ in collectives))


def _forward_collective(mark: Node) -> tuple[float, int]:
    """Return how many all-reduces cost as much, and the bytes of one that sends as much.

    An all-reduce is a reduce-scatter and an all-gather.
    """
    if mark.target is stack:
        return 1, nbytes(mark) // 2
    if mark.target is reduce_scatter:
        return 0.5, nbytes(operand(mark)) // 2
    if mark.target in _ROTATIONS:
        steps = 2 * (mark.meta["ranks"] - 1)  # of an all-reduce in a ring
        return 1 / steps, nbytes(mark) * mark.meta["ranks"] // steps
    half = mark.target in (all_gather, exchange, exchange_rows)
    return (0.5, nbytes(mark) // 2) if half else (1, nbytes(mark))


def _backward_collective(mark: Node) -> tuple[float, int]:
    """Return the same of what happens to the gradient of a mark."""
    if mark.target in _SAME_BACKWARD:
        return _forward_collective(mark)
    return (0.5, nbytes(mark) // 2) if operand(mark).target is all_gather else (1, nbytes(mark))


def _is_only_reader(nodes: Sequence[Node], flow: Flow, source: Node) -> bool:
    """Whether a value is computed by another unit and read by this one alone."""
    unit = flow.unit[nodes[0]]
    return flow.unit.get(source, unit) != unit and all(
        flow.unit.get(user) == unit for user in source.users
    )


def _weight_bytes(nodes: Sequence[Node], flow: Flow, replay: Replay) -> int:
    """Return the bytes that a sink keeps of a unit if it computes weight gradients later."""
    # by storage or node, so that what several layers need counts once
    sizes: dict[object, int] = {}
    for node in nodes:
        call = call_with_sink(flow, node)
        if call is None:
            continue
        args, options = map_arg((call.args, call.options), replay.value)
        kept = call.kept(*args, **options)
        sizes[node, "own"] = kept.own
        if kept.input and not _saved_by_earlier_unit(nodes, flow, flow.resolve(call.args[0])):
            sizes[storage_of(args[0])] = args[0].untyped_storage().nbytes()
        for place in kept.arguments:
            sizes[storage_of(args[place])] = args[place].untyped_storage().nbytes()
        if kept.gradients:
            sizes[_same_gradient(node)] = sum(
                result.nbytes for result in _trained_results(node, flow, call, kept)
            )
    return sum(sizes.values())


def _added_values(node: Node, flow: Flow) -> int:
    """Return the values of a weight gradient that a node makes in 16 bits, and which is then added."""
    call = call_with_sink(flow, node)
    if call is None or not row(call.operation).grouped:
        return 0
    trained = [values(weight)[0] for weight in call.weights if flow.trains(weight)]
    return sum(weight.numel() for weight in trained if weight.dtype.itemsize == 2)


def _trained_results(node: Node, flow: Flow, call: SinkCall, kept: Kept) -> Sequence[Tensor]:
    """Return the results of trained weights: a single one is of all weights, else there is one of
    each.
    """
    results = values(node)
    if len(results) == 1:
        return results
    if kept.results is not None:
        return [results[place] for place in kept.results]
    return [
        result for result, weight in zip(results, call.weights, strict=True) if flow.trains(weight)
    ]


def _saved_by_earlier_unit(nodes: Sequence[Node], flow: Flow, source: Node) -> bool:
    """Whether a unit before this one also needs a value for a weight gradient."""
    unit = flow.unit[nodes[0]]
    earlier = [user for user in source.users if flow.unit.get(user, unit) < unit]
    earlier += [user for copy in earlier if copy.target is copy_in for user in copy.users]
    return any(call_with_sink(flow, user) is not None for user in earlier)


def _same_gradient(node: Node) -> Node:
    """Return the last of the sums that a value is added to, one after the other: both have the same
    gradient.
    """
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is not reduce_sum and not is_op(user, "add"):
            break
        if values(user)[0].shape != values(node)[0].shape or user.kwargs:
            break
        node = user
    return node
