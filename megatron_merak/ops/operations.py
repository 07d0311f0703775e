"""What graphs know of the operations that they call: one row for each of which there is something
to know.

Other ideas have tables of their own:
- the kernels that operations call: their schemas are in `schemas.py`; `register.operation`, at the
  reference implementation, takes shapes for fake tensors and the gradient.
- ATen's operators: `graph/ir/operators.py`, and for tensor parallelism the rules of
  `graph/sharding/`. A graph is sharded before it is fused. So an operation has no rule: it gets the
  shards of the operators that it replaces, and the FLOPs of its products are theirs.
- which operators an operation replaces: the patterns of `graph/fusion/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .adapted import adapted_linear, adapted_linears
from .attention import attention, causal_attention, causal_chunks
from .cross_entropy import linear_cross_entropy, linear_cross_entropy_stats
from .fp8 import fp8_linear, fp8_linears
from .grouped import grouped_linear
from .linear import embedding, embedding_part, linear
from .linears import joined_linear, linears
from .recomputed import gated_grouped_linear, gated_linear, gelu_linear
from .residual import bias_dropout_add, dropout_of_parts
from .ring import Span, ring_part


@dataclass(frozen=True)
class Kept:
    """What a sink that computes the weight gradients of a call later keeps until then.

    input:     whether the first argument.
    gradients: whether the gradients of the results that have a trained weight.
    own:       bytes of tensors that the backward makes for it, or the tape has for it alone.
    results:   those with a trained weight, by number; None: as many as weights, each of its own.
    arguments: places of other arguments, which several calls may share.
    """

    input: bool = False
    gradients: bool = False
    own: int = 0
    results: tuple[int, ...] | None = field(default=None, compare=False)
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scores:
    """The products of attention: queries with keys, and probabilities with values.

    flops:    of the forward; of causal attention for half of the scores.
    queries:  number of queries of a head.
    features: of a head.
    """

    flops: int
    queries: int
    features: int
    causal: bool


@dataclass(frozen=True)
class Operation:
    """What is known of an operation. A column that is a function takes the arguments of a call,
    except for ``sink``.

    sink:          what a sink keeps. None: the operation takes no sink. Those that take one have
                   their input as first argument, and as second the weight, or a list of weights.
    scores:        of attention; None: the operation is something else.
    recomputed:    FLOPs of products of the forward that the backward computes again.
    dropout:       position of the argument that is the rate of dropout; None: the operation draws
                   no random numbers.
    result_unread: no backward reads the result.
    shares_scales: takes ``ranks``, over which it may make scales the same.
    grouped:       its weight has a matrix for each group of rows, and each row is multiplied with
                   one of these.
    """

    sink: Callable[..., Kept] | None = None
    scores: Callable[..., Scores] | None = None
    recomputed: Callable[..., int] | None = None
    dropout: int | None = None
    result_unread: bool = False
    shares_scales: bool = False
    grouped: bool = False


# ---- what a sink keeps ---------------------------------------------------------------------------
def _operands(*arguments: Any, **options: Any) -> Kept:
    return Kept(input=True, gradients=True)


def _of_groups(*arguments: Any, **options: Any) -> Kept:
    """Operands, and where groups end."""
    return Kept(input=True, gradients=True, arguments=(2,))


def _of_adapters(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    hiddens: Sequence[Tensor],
    places: Sequence[int],
    *others: Any,
    **options: Any,
) -> Kept:
    """Operands, among them x A^T and, where there is an A, its gradient."""
    ranks = sum(up.shape[1] for up in weights[-len(places) :])
    own = input[..., 0].numel() * ranks * input.element_size()
    results = tuple(sorted({*places}))
    if hiddens:
        return Kept(gradients=True, own=own, results=results)
    return Kept(input=True, gradients=True, own=2 * own, results=results)


def _of_fp8_layer(input: Tensor, weight: Tensor, *others: Any, **options: Any) -> Kept:
    return _of_fp8_layers(input, [weight], *others, **options)


def _of_fp8_layers(input: Tensor, weights: Sequence[Tensor], *others: Any, **options: Any) -> Kept:
    """Operands in fp8."""
    transposed = bool(options.get("transposed")) or len(others) > 4 and bool(others[4])
    features = sum(weight.shape[transposed] for weight in weights if weight.requires_grad)
    return Kept(own=input.numel() + input.numel() // input.shape[-1] * features)


def _of_gate(gate_up: Tensor, *others: Any, **options: Any) -> Kept:
    """The activation is computed again."""
    return Kept(gradients=True, own=gate_up.nbytes // 2)


def _of_gate_and_groups(gate_up: Tensor, *others: Any, **options: Any) -> Kept:
    """The activation is computed again; and where groups end."""
    return replace(_of_gate(gate_up), arguments=(2,))


def _of_gelu(x: Tensor, *others: Any, **options: Any) -> Kept:
    """The activation is computed again."""
    return Kept(gradients=True, own=x.nbytes)


def _rows(index: Tensor, weight: Tensor, padding: int | None = None) -> Kept:
    return Kept(gradients=True) if padding is None else _masked_rows(index, weight)


def _masked_rows(index: Tensor, weight: Tensor, *others: Any, **options: Any) -> Kept:
    """A copy of the gradient, with zeros for rows that get none."""
    return Kept(own=index.numel() * weight.shape[1] * weight.element_size())


def _of_logits(
    x: Tensor, weight: Tensor, target: Tensor, classes: int | None = None, chunk: int = 0
) -> Kept:
    """The gradient of the logits but for a factor per row, and the input times that. Nothing of
    chunks.
    """
    return Kept() if chunk else Kept(own=len(x) * len(weight) * x.element_size() + x.nbytes)


def _nothing(*arguments: Any, **options: Any) -> Kept:
    """Its weight gradient is computed at once."""
    return Kept()


# ---- products ------------------------------------------------------------------------------------
def _causal_scores(
    query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> Scores:
    return Scores(
        _all_scores(query, key.shape[1], value) // 2,
        queries=query.shape[1],
        features=query.shape[-1],
        causal=True,
    )


def _scores_of_chunks(
    query: Tensor, key: Tensor, value: Tensor, starts: Sequence[int], *others: Any, **options: Any
) -> Scores:
    """Of each chunk all keys before it, and half of its own."""
    size = query.shape[2] // len(starts)
    flops = sum(
        _all_scores(chunk, 2 * start + size, value) // 2
        for start, chunk in zip(starts, query.split(size, 2), strict=True)
    )
    return Scores(flops, queries=key.shape[2], features=query.shape[-1], causal=False)


def _scores_of_part(
    query: Tensor, both: Tensor, mask: object, before: object, span: Span, *others: Any
) -> Scores:
    """Of the queries and keys that see one another."""
    start, stop, begin, end, causal = span
    value = both[..., query.shape[-1] :]
    flops = _all_scores(query[:, :, start:stop], end - begin, value)
    return Scores(
        flops // 2 if causal else flops,
        queries=query.shape[2],
        features=query.shape[-1],
        causal=causal,
    )


def _scores(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Scores:
    return Scores(
        _all_scores(query, key.shape[2], value),
        queries=query.shape[2],
        features=query.shape[-1],
        causal=False,
    )


def _all_scores(query: Tensor, keys: int, value: Tensor) -> int:
    return 2 * query.numel() // query.shape[-1] * keys * (query.shape[-1] + value.shape[-1])


def _logits(x: Tensor, weight: Tensor, *others: Any, **options: Any) -> int:
    return 2 * x.numel() * len(weight)


def _logits_of_chunks(
    x: Tensor, weight: Tensor, target: Tensor, classes: int | None = None, chunk: int = 0
) -> int:
    return _logits(x, weight) if chunk else 0


OPERATIONS: Mapping[object, Operation] = {
    linear: Operation(sink=_operands, result_unread=True),
    linears: Operation(sink=_operands),
    joined_linear: Operation(sink=_operands, result_unread=True),
    adapted_linear: Operation(sink=_of_adapters, result_unread=True),
    adapted_linears: Operation(sink=_of_adapters),
    fp8_linear: Operation(sink=_of_fp8_layer, result_unread=True, shares_scales=True),
    fp8_linears: Operation(sink=_of_fp8_layers, shares_scales=True),
    grouped_linear: Operation(sink=_of_groups, result_unread=True, grouped=True),
    gated_grouped_linear: Operation(sink=_of_gate_and_groups, result_unread=True, grouped=True),
    gated_linear: Operation(sink=_of_gate, result_unread=True),
    gelu_linear: Operation(sink=_of_gelu, result_unread=True),
    embedding: Operation(sink=_rows, result_unread=True),
    embedding_part: Operation(sink=_masked_rows, result_unread=True),
    linear_cross_entropy: Operation(sink=_of_logits, recomputed=_logits_of_chunks),
    linear_cross_entropy_stats: Operation(sink=_nothing, recomputed=_logits),
    causal_attention: Operation(scores=_causal_scores, dropout=3),
    causal_chunks: Operation(scores=_scores_of_chunks, dropout=4),
    attention: Operation(scores=_scores, dropout=4),
    ring_part: Operation(scores=_scores_of_part),
    bias_dropout_add: Operation(dropout=3),
    dropout_of_parts: Operation(dropout=1),
}
_OTHER = Operation()


def row(function: object) -> Operation:
    """Return the row of an operation; of any other function, a row that says nothing."""
    return OPERATIONS.get(function, _OTHER)
