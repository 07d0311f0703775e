"""Parameters, FLOPs and saved activations of each unit of the GPT of flags, and the time of any
unit on a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

from megatron_merak.cluster import Cluster, Device, Link, all_reduce
from megatron_merak.config import ModelConfig
from megatron_merak.plan import (
    DTYPE_BYTES,
    Grid,
    Unit,
    held_parameters,
    kind_of_unit,
    trained_parameters,
)
from megatron_merak.planner.arithmetic import Arithmetic, arithmetic
from megatron_merak.planner.attention import SHORT, causal_more
from megatron_merak.planner.links import reached_along, worst
from megatron_merak.planner.running import Running, stream_bytes, widths

# All-reduces over the tensor-parallel ranks in a unit's (forward, backward), each of one [tokens,
# hidden] activation; the head has one of statistics of its loss, too.
TENSOR_ALL_REDUCES = {"embedding": (1, 0), "layer": (2, 2), "head": (0, 1)}
# The same with sequence parallelism, where an all-gather and a reduce-scatter cost as much as an
# all-reduce. Both ends of the chain have one of the two in each direction. The backward all-gathers
# the inputs of matrix products again: two in a layer, one in the head, none if it computes in
# chunks.
SEQUENCE_ALL_REDUCES = {"embedding": (0.5, 0.5), "layer": (2, 3), "head": (0.5, 1)}
# Kernels that the host launches in a unit's (forward, backward).
OPERATIONS = {"embedding": (3, 6), "layer": (65, 150), "head": (25, 40)}
# Seconds between two kernels that depend on each other, on a device with ``practice``.
GAP = 1e-6
# The name of the tied embedding table in `Unit.tied`.
TIED_TABLE = "embedding.weight"
# Bytes that are kept of the dropout mask of a residual add: its seed.
SEED_BYTES = 8
# Bytes that rounding a 16-bit value to fp8 moves: it is read for the largest one, and to be rounded.
ROUNDED_BYTES = 5
# Bytes per token of the statistics of the loss that each rank with a shard of the classes sends.
STATISTICS_BYTES = 12


Group = tuple[int, Link]  # the number of ranks, and their link


class Groups(NamedTuple):
    """The groups of a rank that computes a layer with others.

    reduces:   of all-reduces.
    exchanges: of exchanges and gathers.
    inner:     of neighbours among the ranks that divide sequences, which exchange heads.
    ring:      of ranks that pass keys and values on.
    routes:    seconds that a byte of rows takes to the ranks of their experts.
    """

    reduces: Group
    exchanges: Group
    inner: Group
    ring: Group
    routes: float


class Sent(NamedTuple):
    """What is sent in a direction of a unit, see ``Unit``.

    number:    of all-reduces that cost as much, of ``message`` bytes together.
    exchanged: those of ``message`` that stand for exchanges.
    routed:    rows of tokens.
    """

    number: float
    message: int
    exchanged: int
    routed: int = 0


@dataclass(frozen=True)
class UnitCost:
    """Times of a unit in seconds, per micro-batch; pairs are of (forward, backward).

    forward:      without collectives.
    backward:     without collectives and recomputation.
    weight:       the part of ``backward`` that computes weight gradients.
    reduces:      all-reduces over the tensor-parallel ranks, one after the other.
    half_reduces: the same where the micro-batch is split into two halves.
    last_reduces: the last one of ``half_reduces``.
    bare:         those of ``reduces`` in the backward during which no weight gradient is computed.
    regathers:    those of ``reduces`` in the backward that a unit which is recomputed does without.
    hiding:       the part of ``weight`` that is computed during others of them.
    halving:      additional compute time where the micro-batch is split into halves.
    behind:       the part of ``reduces`` that goes on beside work which needs none of it, unless
                  nothing overlaps: attention, while keys and values are passed on, and a shared
                  expert, while rows are exchanged.
    behind_weights: the part of ``behind`` in the backward that goes on beside weight gradients, and
                  is waited for where these are computed later.
    """

    forward: float
    backward: float
    weight: float = 0.0
    reduces: tuple[float, float] = (0.0, 0.0)
    half_reduces: tuple[float, float] = (0.0, 0.0)
    last_reduces: tuple[float, float] = (0.0, 0.0)
    halving: tuple[float, float] = (0.0, 0.0)
    behind: tuple[float, float] = (0.0, 0.0)
    behind_weights: float = 0.0
    bare: float = 0.0
    regathers: float = 0.0
    hiding: float = 0.0

    @property
    def beyond(self) -> tuple[float, float]:
        """What is left of ``reduces`` without ``behind``."""
        return self.reduces[0] - self.behind[0], self.reduces[1] - self.behind[1]

    @property
    def bare_beyond(self) -> float:
        """What is left of ``bare``: no weight gradient of ``hiding`` hides what is ``behind``."""
        return max(0.0, self.bare - self.behind[1])


def gpt_units(
    model: ModelConfig,
    micro_batch_size: int,
    bytes_per_value: int,
    tp: int,
    fused_dropout: bool = True,
    sequence_parallel: bool = False,
    recompute_activations: bool = False,
) -> tuple[Unit, ...]:
    """Return the chain of the GPT of flags: "embedding", "layer.0" ... "layer.L-1", "head".

    All numbers are of one tensor-parallel rank: sharded weights count 1/tp, replicated ones in
    full, and the vocabulary with its padding. The head is final norm, output layer and loss. FLOPs
    are those of the matrix products, including the causal half of the attention scores.

    bytes_per_value:       of an activation; a value of an fp32 residual stream has 4.
    fused_dropout:         on GPUs: attention keeps no scores, and the embedding a mask of bytes;
                           otherwise see `_layer_saved_bytes`.
    sequence_parallel:     hidden states and inputs of parallel layers are sharded, except the input
                           of a head that computes in chunks.
    recompute_activations: the second matrix of the feed-forward network does not keep its input.
    """
    assert model.num_experts is None, "experts are priced from the graph"
    tokens = micro_batch_size * model.seq_length
    parts = tp if sequence_parallel else 1
    hidden = model.hidden_size
    vocabulary = model.padded_vocab_size(tp) // tp
    activation = tokens * hidden * bytes_per_value
    hidden_state = tokens // parts * hidden * stream_bytes(model, bytes_per_value)
    positions = (
        model.max_positions * hidden if model.position_embedding_type == "learned_absolute" else 0
    )
    output = vocabulary * hidden
    untied = model.untie_embeddings_and_output_weights
    tied = () if untied else ((TIED_TABLE, output),)
    work = {
        kind: _launched(kind, model, tokens, activation, tp, parts=parts) for kind in OPERATIONS
    }
    running = Running(model, tokens, bytes_per_value, tp, fused_dropout, parts)
    kept = _layer_saved_bytes(
        model, tokens, bytes_per_value, tp, fused_dropout=fused_dropout, parts=parts
    )
    recomputed = (0, 0)
    if recompute_activations:
        activation_of_mlp = tokens * model.ffn_size // tp * bytes_per_value
        read = activation_of_mlp * (2 if model.swiglu else 1)
        kept -= activation_of_mlp
        recomputed = (activation_of_mlp, read + activation_of_mlp)
    if model.hidden_dropout:
        # of parts of sequences, each sample has a mask of its own
        kept += 2 * SEED_BYTES * (micro_batch_size if parts > 1 else 1)
    chunk = model.cross_entropy_chunk_size
    entering = activation if chunk else activation // parts
    norm = tokens // parts * _norm_bytes(model) + _widened_norm(model, bytes_per_value)
    rows = _kept_of_loss(model, vocabulary * bytes_per_value, tp)
    logits = 2 * tokens * hidden * vocabulary
    head = Unit(
        name="head",
        kind="head",
        parameters=_norm_vectors(model) * hidden + (output if untied else 0),
        flops=logits,
        saved_bytes=entering + norm + tokens * rows,
        output_bytes=4,
        tied=tied,
        transient_bytes=min(chunk, tokens) * vocabulary * bytes_per_value,
        more_flops=(0, logits if chunk else 0),
        weight_bytes=0 if chunk else tokens * (hidden + vocabulary) * bytes_per_value,
        products=((min(chunk, tokens) if chunk else tokens, vocabulary, hidden),),
        running_bytes=running.head(vocabulary),
        **work["head"],
    )
    own = positions + (output if untied else 0)
    # row indices in this rank's shard of the table, and which tokens are in it
    looked_up = 9 * tokens if tp > 1 else 0
    if model.hidden_dropout:
        # fused kernels keep which values survive; others their factors, as of parts of a sequence
        survives = 1 if fused_dropout and parts == 1 else stream_bytes(model, bytes_per_value)
        looked_up += tokens // parts * hidden * survives
    # masking the tokens' gradients makes a copy
    learned = activation if positions and tp > 1 else 0
    table: dict[str, Any] = {"weight_bytes": activation + learned} | work["embedding"]
    inner = (
        _layer_work(model, tokens, bytes_per_value, tp, fused_dropout=fused_dropout, parts=parts)
        | work["layer"]
    )
    embedding = Unit(
        name="embedding",
        kind="embedding",
        parameters=own,
        flops=0,
        saved_bytes=looked_up,
        output_bytes=hidden_state,
        tied=tied,
        running_bytes=running.embedding(),
        **table,
    )
    layer = Unit(
        name="layer",
        kind="layer",
        parameters=_layer_parameters(model, tp),
        flops=_layer_flops(model, tokens, tp),
        saved_bytes=kept,
        recomputed_bytes=recomputed,
        output_bytes=hidden_state,
        running_bytes=running.layer(recompute_activations),
        **inner,
    )
    layers = (replace(layer, name=f"layer.{index}") for index in range(model.num_layers))
    return embedding, *layers, head


def _kept_of_loss(model: ModelConfig, logits: int, tp: int) -> int:
    """Return the bytes per token that the loss keeps.

    Unsharded rows of logits are replaced by exponentials in place, and their sum is kept. Sharded
    or recomputed rows keep three statistics, and their gradient those of all ranks; sharded rows
    are kept until their gradient replaces them, and which tokens count.
    """
    chunked = bool(model.cross_entropy_chunk_size)
    if tp == 1 and not chunked:
        return logits + 4
    counted = 1 if tp > 1 else 0
    return (0 if chunked else logits) + STATISTICS_BYTES * (1 + tp) + counted


def _launched(
    kind: str, model: ModelConfig, tokens: int, activation: int, tp: int, parts: int
) -> dict[str, Any]:
    """Return the fields of a `Unit` on kernel launches and tensor-parallel all-reduces."""
    hides = tp > 1 and kind != "embedding"
    operations = {"operations": OPERATIONS[kind], "hiding": float(hides)}
    if tp == 1:
        return operations
    forward, backward = (SEQUENCE_ALL_REDUCES if parts > 1 else TENSOR_ALL_REDUCES)[kind]
    statistics = 0
    if kind == "head":
        # all ranks get those of all, which costs half of an all-reduce
        statistics = STATISTICS_BYTES * tokens * tp // 2
        if parts > 1 and model.cross_entropy_chunk_size:
            backward -= 0.5
    return operations | {
        "reduces": (ceil(forward + (statistics > 0)), ceil(backward)),
        "reduced_bytes": (int(forward * activation) + statistics, int(backward * activation)),
    }


def _norm_vectors(model: ModelConfig) -> int:
    """Return the number of vectors of a norm (weight and bias, or weight); also of the statistics
    kept per row.
    """
    return 1 if model.normalization == "RMSNorm" else 2


def _norm_bytes(model: ModelConfig) -> int:
    """Return the bytes of the fp32 statistics that a norm keeps per row."""
    return 4 * _norm_vectors(model)


def _widened_norm(model: ModelConfig, bytes_per_value: int) -> int:
    """Return the bytes of the weight of a norm that is kept in the dtype of the residual stream."""
    stream = stream_bytes(model, bytes_per_value)
    return model.hidden_size * stream if stream > bytes_per_value else 0


def _layer_parameters(model: ModelConfig, tp: int) -> int:
    hidden = model.hidden_size
    norm = _norm_vectors(model)
    queries, keys, first, second = widths(model, tp)
    weights = hidden * (queries + 2 * keys) + queries * hidden + hidden * first + second * hidden
    norms = 2 * norm * hidden + (2 * norm * model.head_dim if model.qk_layernorm else 0)
    qkv_bias = queries + 2 * keys if model.add_qkv_bias or not model.disable_bias_linear else 0
    return (
        weights + norms + qkv_bias + (0 if model.disable_bias_linear else hidden + first + hidden)
    )


def _layer_flops(model: ModelConfig, tokens: int, tp: int) -> int:
    hidden = model.hidden_size
    queries, keys, first, second = widths(model, tp)
    products = 2 * tokens * hidden * (queries + 2 * keys + queries + first + second)
    return products + _attention_flops(model, tokens, tp)


def _attention_flops(model: ModelConfig, tokens: int, tp: int) -> int:
    """Return the FLOPs of the causal half of the scores, and of their product with the values."""
    return 2 * tokens * model.seq_length * widths(model, tp)[0]


def _layer_saved_bytes(
    model: ModelConfig, tokens: int, bytes_per_value: int, tp: int, fused_dropout: bool, parts: int
) -> int:
    """Return the bytes that a layer keeps for its backward.

    These are both norms' outputs, queries, keys, values, attention output, first residual sum and
    the MLP's two inner tensors. Rotary embeddings are applied in place to the queries and keys; with
    qk norms what enters those is kept as well. Of the residual sum, the norms' outputs and
    statistics a rank has 1 / ``parts`` of the sequence. Without ``fused_dropout``, as on CPUs,
    attention with dropout keeps its scores and a copy of every head, in fp32, and without dropout no
    softmax statistics of short sequences.
    """
    hidden = model.hidden_size
    heads = model.num_attention_heads // tp
    queries, keys, first, second = widths(model, tp)
    scored = model.attention_dropout and not fused_dropout
    values = first + second + queries + (0 if scored else queries + 2 * keys)
    if model.qk_layernorm:
        values += queries + keys
    sharded = hidden * (2 * bytes_per_value + stream_bytes(model, bytes_per_value))
    sharded += 2 * _norm_bytes(model)
    row = values * bytes_per_value
    if model.qk_layernorm:
        row += _norm_bytes(model) * (queries + keys) // model.head_dim
    if scored:
        # copies of queries, keys and values, one per head; probabilities before and after dropout,
        # and the mask
        row += 4 * 3 * (queries + heads * model.seq_length)
    elif fused_dropout or model.seq_length > SHORT:
        row += 4 * heads  # log-sum-exp
    norms = 2 * _widened_norm(model, bytes_per_value)
    return tokens * row + tokens // parts * sharded + norms


def _layer_work(
    model: ModelConfig, tokens: int, bytes_per_value: int, tp: int, fused_dropout: bool, parts: int
) -> dict[str, Any]:
    """Return the fields of a layer's `Unit` on its matrix products.

    weight_bytes is the size of inputs and output gradients of the four products; transient_bytes
    that of the gradient of the widest value and of the input that is all-gathered for a product
    under sequence parallelism.
    """
    hidden, (queries, keys, first, second) = model.hidden_size, widths(model, tp)
    scores = _attention_flops(model, tokens, tp)
    gathered = hidden * bytes_per_value if parts > 1 else 0
    widest = max(
        max(queries + 2 * keys, first) * bytes_per_value,
        hidden * stream_bytes(model, bytes_per_value),
    )
    sides = ((queries + 2 * keys, hidden), (hidden, queries), (first, hidden), (hidden, second))
    return {
        "products": tuple((tokens, leaving, entering) for leaving, entering in sides),
        "weight_bytes": tokens
        * (4 * hidden + 2 * queries + 2 * keys + first + second)
        * bytes_per_value,
        "transient_bytes": tokens * (widest + gathered),
        "attention_flops": scores,
        "attention_drops": model.attention_dropout > 0,
        "attention_heads": (model.seq_length, model.head_dim),
        "more_flops": causal_more(
            scores, model.seq_length, fused_dropout, model.attention_dropout > 0
        ),
    }


def model_flops(model: ModelConfig, batch_samples: int) -> int:
    """Return the FLOPs of forward and backward of ``batch_samples`` sequences, for MFU.

    Counts the matrix products and the causal half of attention, with the vocabulary padded as for
    one rank. The backward counts twice the forward; recomputation does not count. Of experts those
    count that a token is sent to, the shared one, and the router.
    """
    routing = 0
    if model.num_experts is not None:
        rows = batch_samples * model.seq_length * model.num_layers
        gates = model.num_experts + model.moe_shared_expert_gate
        routing = 2 * rows * model.hidden_size * gates
        width = model.moe_router_topk * model.expert_ffn_size
        width += model.moe_shared_expert_intermediate_size or 0
        model = replace(model, num_experts=None, ffn_hidden_size=width)
    units = gpt_units(model, batch_samples, bytes_per_value=4, tp=1)
    return 3 * (sum(unit.flops for unit in units) + routing)


def unit_costs(
    units: Sequence[Unit],
    cluster: Cluster,
    dtype: str,
    grid: Grid,
    expert_copies: int = 1,
    device: Device | None = None,
) -> tuple[UnitCost, ...]:
    """Return the times of each unit on one rank.

    expert_copies: see ``Plan``.
    device:        of the rank; None: the cluster's.

    Matrix products take the device's compute rates, element-wise work its memory bandwidth, both as
    far as training reaches them.

    Every saved or transient value is written once and read once in the forward, twice that in the
    backward, where a unit with matrix products also reads and writes its fp32 gradient, and what is
    made in 16 bits before that (``added_values``). The
    backward does twice the forward's FLOPs, half of them for weight gradients where there are
    weights; attention and the loss may compute more (``more_flops``). Below the first trained weight
    there is none. The host's time to launch the
    kernels is added. In halves, weights are read and their gradients written once more, and every
    kernel and collective is launched twice.

    Where ranks share both the weights and the sequences of a layer, the former are taken to reduce
    and the latter to exchange or gather.
    """
    summing = "tp" if grid.tp > 1 else "cp"
    exchanging = "cp" if grid.cp > 1 else "tp"
    reduces = (getattr(grid, summing), reached_along(cluster, grid, summing))
    exchanges = (
        getattr(grid, exchanging),
        reached_along(cluster, grid, exchanging, exchanges=True),
    )
    routes = _routes(cluster, grid, expert_copies)
    known: dict[object, UnitCost] = {}  # most units differ by their names alone
    costs = []
    for unit in units:
        kind = kind_of_unit(unit)
        if kind not in known:
            levels = (exchanges, exchanges)
            if unit.cp_inner > 1:
                levels = _levels(cluster, grid, unit.cp_inner)
            groups = Groups(reduces, exchanges, *levels, routes)
            known[kind] = _unit_cost(unit, device or cluster.device, dtype, groups)
        costs.append(known[kind])
    return tuple(costs)


def _levels(cluster: Cluster, grid: Grid, inner: int) -> tuple[Group, Group]:
    """Return the groups of ``inner`` context-parallel neighbours, and of the ranks at the same place of
    each.
    """
    neighbours = [tuple(range(first, first + inner)) for first in range(0, grid.cp, inner)]
    apart = [tuple(range(place, grid.cp, inner)) for place in range(inner)]

    def link(groups: list[tuple[int, ...]]) -> Link:
        along = [reached_along(cluster, grid, "cp", group, exchanges=True) for group in groups]
        return worst(along)

    return (inner, link(neighbours)), (grid.cp // inner, link(apart))


def _routes(cluster: Cluster, grid: Grid, copies: int) -> float:
    """Return the seconds that a byte of rows takes to the ranks of their experts, where so many copies
    of a layer divide these; with one copy, its tensor-parallel ranks.
    """
    ranks = grid.tp * copies
    if ranks == 1:
        return 0.0
    inside = copies == 1
    axis = "tp" if inside else "cp-dp"
    places = None if inside else tuple(range(copies))
    link = reached_along(cluster, grid, axis, places, exchanges=True)
    return (ranks - 1) / ranks / link.bandwidth


def _unit_cost(unit: Unit, device: Device, dtype: str, groups: Groups) -> UnitCost:
    # what is computed again is written and read all the same
    left_out, again = unit.recomputed_bytes
    moved = 2 * (unit.saved_bytes + left_out + unit.transient_bytes) + unit.output_bytes
    trained = trained_parameters([unit])
    gradient = 8 * trained + 4 * unit.added_values if unit.flops else 0
    reread = held_parameters([unit]) * DTYPE_BYTES[dtype] if unit.flops else 0
    halves = _reduce_times(unit, groups, 2)
    each = device.dispatch + (0.0 if device.practice is None else GAP)
    host = tuple(each * count for count in unit.operations)
    work = arithmetic(unit, device, dtype)
    passed = _behind_attention(unit, device, dtype, work, groups.ring)
    exchanged = _behind_shared(unit, device, dtype, groups)
    weight = work.weight + device.passes_time(gradient)
    rounded = [
        ROUNDED_BYTES * count + unpacked
        for count, unpacked in zip(unit.rounded_values, unit.unpacked_bytes, strict=True)
    ]
    back = device.passes_time(2 * moved + again + gradient + rounded[1]) if unit.backward else 0.0
    return UnitCost(
        forward=work.forward + device.passes_time(moved + rounded[0]) + host[0],
        backward=work.backward + back + host[1],
        weight=weight,
        reduces=_reduce_times(unit, groups, 1),
        half_reduces=halves,
        last_reduces=(
            halves[0] / (2 * max(_count(unit, 0), 1)),
            halves[1] / (2 * max(_count(unit, 1), 1)),
        ),
        halving=(
            device.passes_time(reread + unit.unpacked_bytes[0]) + host[0],
            device.passes_time(reread + gradient + unit.unpacked_bytes[1]) + host[1]
            if unit.backward
            else 0.0,
        ),
        behind=(passed[0] + exchanged[0], passed[1] + exchanged[1]),
        behind_weights=exchanged[2],
        bare=_part_of_backward(unit, groups, Sent(0, *unit.bare_bytes))
        + _level_times(unit, groups)[2],
        regathers=_part_of_backward(unit, groups, Sent(0, *unit.regathered_bytes)),
        hiding=unit.hiding * weight - _twice(unit, exchanged[2]),
    )


def _count(unit: Unit, direction: int) -> int:
    """Return the number of all-reduces of a unit's forward (0) or backward (1), and of exchanges of
    levels.
    """
    levels = (unit.inner_sent, unit.outer_sent) if unit.cp_inner > 1 else ()
    return unit.reduces[direction] + sum(sent[direction][0] for sent in levels)


def _behind_attention(
    unit: Unit, device: Device, dtype: str, work: Arithmetic, group: Group
) -> tuple[float, float]:
    """Return the seconds of (forward, backward) for which keys and values are passed on while parts
    of attention are computed: all but one part has a rotation beside it.

    work:  of the unit.
    group: the ranks of the ring, and their link.
    """
    ranks, link = group
    sent = [2 * (ranks - 1) / ranks * size / link.bandwidth for size in unit.ring_bytes]
    if unit.cp_inner > 1:
        sent = [size / link.bandwidth for _, size in unit.outer_sent[:2]]
    if sent == [0, 0]:
        return 0.0, 0.0
    rest = _without_attention(unit, device, dtype)
    share = (ranks - 1) / ranks
    attention = (work.forward - rest.forward, work.backward - rest.backward)
    return min(sent[0], share * attention[0]), min(sent[1], share * attention[1])


def _behind_shared(
    unit: Unit, device: Device, dtype: str, groups: Groups
) -> tuple[float, float, float]:
    """Return the seconds of (forward, backward) for which rows are exchanged while products are
    computed that need none of them, and how many of the latter are of weight gradients.
    """
    if not any(unit.meanwhile_bytes):
        return 0.0, 0.0, 0.0
    ranks, link = groups.exchanges
    between = any(unit.routed_bytes)
    each = groups.routes if between else (ranks - 1) / ranks / link.bandwidth
    rest = _without_attention(unit, device, dtype)
    ahead, inputs, weights, _ = unit.meanwhile_flops
    products = unit.flops - unit.attention_flops
    of_inputs, of_weights = (products - left for left in unit.unneeded_flops)
    forward = rest.forward * ahead / products
    of_input = (rest.backward - rest.weight) * inputs / max(of_inputs, 1)
    of_weight = rest.weight * weights / max(of_weights, 1)
    sent = [each * size for size in unit.meanwhile_bytes]
    backward = min(sent[1], of_input + of_weight)
    return min(sent[0], forward), backward, backward - min(sent[1], of_input)


def _twice(unit: Unit, seconds: float) -> float:
    """Return how many of the seconds of weight gradients that hide rows are among those that hide other
    collectives.
    """
    *_, weights, hiding = unit.meanwhile_flops
    return seconds * hiding / max(weights, 1)


def _without_attention(unit: Unit, device: Device, dtype: str) -> Arithmetic:
    """Return the time of a unit's other products."""
    products = unit.flops - unit.attention_flops
    without = replace(unit, flops=products, attention_flops=0, more_flops=(0, 0))
    return arithmetic(without, device, dtype)


def _reduce_times(unit: Unit, groups: Groups, parts: int) -> tuple[float, float]:
    """Return the seconds of the (forward, backward) all-reduces and exchanges of a unit, each split
    into ``parts``.
    """
    seconds = [
        _reduce_time(Sent(*each), groups, parts)
        for each in zip(
            unit.reduces, unit.reduced_bytes, unit.exchanged_bytes, unit.routed_bytes, strict=True
        )
    ]
    ahead, back, _ = _level_times(unit, groups, parts)
    return seconds[0] + ahead, seconds[1] + back


def _level_times(unit: Unit, groups: Groups, parts: int = 1) -> tuple[float, float, float]:
    """Return the seconds of what is sent between the levels of a hierarchy of context-parallel ranks, of
    (forward, backward, backward without weight gradients), each split into ``parts``.
    """
    if unit.cp_inner == 1:
        return 0.0, 0.0, 0.0
    inner, near = groups.inner
    _, far = groups.ring
    ahead, back, bare = (
        (inner - 1) * (parts * exchanges * near.latency + size / inner / near.bandwidth)
        + parts * turns * far.latency
        + passed / far.bandwidth
        for (exchanges, size), (turns, passed) in zip(unit.inner_sent, unit.outer_sent, strict=True)
    )
    return ahead, back, bare


def _part_of_backward(unit: Unit, groups: Groups, sent: Sent) -> float:
    """Return the seconds of a part of what a unit's backward sends, of as many all-reduces as it has
    of their bytes.
    """
    count = unit.reduces[1] * sent.message / max(unit.reduced_bytes[1], 1)
    return _reduce_time(sent._replace(number=count), groups)


def _reduce_time(sent: Sent, groups: Groups, parts: int = 1) -> float:
    ranks, link = groups.reduces
    others, direct = groups.exchanges
    each = (sent.message - sent.exchanged) / max(parts * sent.number, 1)
    exchanges = 2 * (others - 1) / others * sent.exchanged / direct.bandwidth
    routed = groups.routes * sent.routed
    return parts * sent.number * all_reduce(ranks, each, link) + exchanges + routed


def optimizer_bytes(dtype: str, state_bytes: float = 8.0) -> float:
    """Return the bytes that one optimizer step moves per parameter.

    The gradient is read for the norm and for the update, state and fp32 weight are read and
    written, and a 16-bit weight is written.

    state_bytes: of the optimizer's state per parameter.
    """
    return 16 + 2 * state_bytes + (0 if dtype == "float32" else DTYPE_BYTES[dtype])
