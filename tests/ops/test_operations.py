"""The rows of operations against what the operations do: what a sink is given, what is computed
again, what is read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_merak import ops
from megatron_merak.planner.attention import causal_more

BATCH, LENGTH, WIDTH, OUT, ROWS, HEADS = 2, 8, 6, 4, 16, 2
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Example(NamedTuple):
    """A call of an operation."""

    operation: Callable[..., Any]
    args: tuple
    options: dict[str, Any] = {}

    @property
    def row(self) -> ops.Operation:
        return ops.OPERATIONS[self.operation]


def examples(dtype: torch.dtype = torch.float32) -> list[Example]:
    def some(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype).requires_grad_()

    def layer(rows: int = OUT, columns: int = WIDTH) -> Tensor:
        return some(rows, columns)

    x = some(BATCH, LENGTH, WIDTH)
    tokens = some(BATCH * LENGTH, WIDTH)
    ends = torch.tensor([5, BATCH * LENGTH], dtype=torch.int32)
    index = torch.randint(ROWS, (BATCH, LENGTH))
    target = torch.randint(ROWS, (BATCH * LENGTH,))
    heads = [some(BATCH, LENGTH, HEADS, WIDTH) for _ in range(3)]
    whole = [some(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]
    both = some(BATCH, HEADS, LENGTH, 2 * WIDTH)
    seen = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    return [
        Example(ops.linear, (x, layer(), some(OUT))),
        Example(ops.linear, (x, layer(WIDTH, OUT)), {"transposed": True}),
        Example(ops.linears, (x, [layer(), layer(OUT + 1)], [some(OUT), None])),
        Example(ops.joined_linear, (x, [layer(), layer(OUT + 1)])),
        Example(
            ops.adapted_linear,
            (x, [layer(), layer(), layer(2), layer(OUT, 2)], [some(OUT), None], [], [1], [0.5]),
        ),
        Example(
            ops.adapted_linear,
            (x, [layer(), layer(OUT, 2)], [None], [some(BATCH, LENGTH, 2)], [0], [0.5]),
        ),
        Example(
            ops.adapted_linears,
            (
                x,
                [layer(), layer(), layer(2), layer(3), layer(OUT, 2), layer(OUT, 3)],
                *([None, None], [], [0, 1], [0.5, 0.25]),
            ),
        ),
        Example(ops.fp8_linear, (x, layer(), some(OUT), "hybrid", "tensorwise")),
        Example(
            ops.fp8_linear, (x, layer(WIDTH, OUT), None, "e4m3", "blockwise"), {"transposed": True}
        ),
        Example(
            ops.fp8_linears,
            (x, [layer(), layer(OUT + 1)], [some(OUT), None], "hybrid", "tensorwise", True, False),
        ),
        Example(ops.grouped_linear, (tokens, some(2, OUT, WIDTH), ends)),
        Example(ops.grouped_linear, (tokens, some(2, WIDTH, OUT), ends, True)),
        Example(
            ops.gated_grouped_linear,
            (
                some(BATCH * LENGTH, 2 * WIDTH),
                some(2, OUT, WIDTH),
                *(ends, some(BATCH * LENGTH, 1), "silu"),
            ),
        ),
        Example(
            ops.gated_grouped_linear,
            (some(BATCH * LENGTH, 2 * WIDTH), some(2, WIDTH, OUT), ends, None, "gelu", True),
        ),
        Example(ops.gated_linear, (some(BATCH, LENGTH, 2 * WIDTH), layer(), some(OUT), "silu")),
        Example(
            ops.gated_linear,
            (some(BATCH, LENGTH, 2 * WIDTH), layer(WIDTH, OUT), some(OUT), "gelu", True),
        ),
        Example(ops.gelu_linear, (x, layer(), None, some(WIDTH), "gelu_tanh")),
        Example(ops.embedding, (index, layer(ROWS))),
        Example(ops.embedding, (index, layer(ROWS)), {"padding": 3}),
        Example(ops.embedding_part, (index, layer(ROWS // 2), ROWS // 2)),
        Example(ops.embedding_part, (index, layer(ROWS // 2), ROWS // 2), {"padding": ROWS - 1}),
        Example(ops.linear_cross_entropy, (tokens, layer(ROWS), target)),
        Example(ops.linear_cross_entropy, (tokens, layer(ROWS), target), {"chunk": 5}),
        Example(ops.linear_cross_entropy_stats, (tokens, layer(ROWS), target, 0, ROWS, 5)),
        Example(ops.causal_attention, (*heads, 0.0, None)),
        Example(ops.attention, (*whole, seen, 0.0, None)),
        Example(ops.causal_chunks, (*whole, (0, LENGTH // 2), 0.0, None)),
        Example(ops.ring_part, (whole[0], both, None, (), (0, LENGTH, 0, LENGTH, False), None)),
        Example(ops.bias_dropout_add, (x, some(WIDTH), some(BATCH, LENGTH, WIDTH), 0.0, True)),
        Example(ops.dropout_of_parts, (x, 0.0, True, (BATCH, (0,), 2))),
    ]


def of(column: str) -> Any:
    """Examples of the operations that have something in a column."""
    places = [
        place
        for place, each in enumerate(examples())
        if getattr(each.row, column) not in (None, False)
    ]
    return pytest.mark.parametrize(
        "place", places, ids=lambda place: f"{examples()[place].operation.__name__}-{place}"
    )


def results_of(example: Example, **options: Any) -> list[Tensor]:
    made = example.operation(*example.args, **example.options, **options)
    return [made] if isinstance(made, Tensor) else list(made)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Sink:
    """Keeps what it is given for later."""

    def __init__(self):
        self.kept: list[Tensor] = []

    def matmul(self, weight: Tensor, grad_output: Tensor, input: Tensor, now: bool = False) -> None:
        self.kept += [] if now else [grad_output, input]

    def product(self, weight: Tensor, product: Callable) -> None:
        self.kept += [product.rows.values, product.columns.values]

    def grouped(self, weight: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
        self.kept += [left, right, ends]

    def rows(self, weight: Tensor, index: Tensor, grad_output: Tensor) -> None:
        self.kept += [grad_output]

    def getter(self, input: Tensor) -> None:
        return None


def test_every_row_has_an_example():
    assert {each.operation for each in examples()} == ops.OPERATIONS.keys()
    assert ops.row(ops.rotary) == ops.row("x") == ops.Operation()


@TYPES
@of("sink")
def test_what_a_sink_keeps(place, dtype):
    example = examples(dtype)[place]
    sink = Sink()
    results = results_of(example, sink=sink)
    upstream = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, upstream)
    kept = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in sink.kept}
    input = kept.pop(storage(example.args[0]), None)
    gradients = [kept.pop(storage(grad), None) for grad in upstream]
    assert len({*map(bool, gradients)}) == 1
    tensors = {at: x for at, x in enumerate(example.args) if at and isinstance(x, Tensor)}
    shared = tuple(at for at, x in tensors.items() if kept.pop(storage(x), None))
    own = sum(kept.values())
    found = ops.Kept(input is not None, gradients[0] is not None, own=own, arguments=shared)
    assert found == example.row.sink(*example.args, **example.options)


@of("sink")
def test_weights_are_the_second_argument(place):
    example = examples()[place]
    given = example.args[1]
    weights = given if isinstance(given, list) else [given]
    for result in results_of(example, sink=Sink()):
        result.sum().backward(retain_graph=True)
    others = [
        each
        for each in example.args
        if isinstance(each, Tensor) and each.requires_grad and each is not given
    ]
    assert all(weight.grad is None for weight in weights)
    assert all(each.grad is not None for each in others)


@of("recomputed")
def test_products_that_are_computed_again(place):
    example = examples()[place]
    with FlopCounterMode(display=False) as forward:
        (result,) = results_of(example)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    extra = example.row.recomputed(*example.args, **example.options)
    assert backward.get_total_flops() == 2 * forward.get_total_flops() + extra


@of("scores")
def test_products_of_attention(place):
    example = examples()[place]
    with FlopCounterMode(display=False) as counter:
        results_of(example)
    scores = example.row.scores(*example.args, **example.options)
    assert scores.queries == LENGTH
    more = 0
    if scores.causal:
        more = causal_more(scores.flops, scores.queries, fused=False, dropout=False)[0]
    if example.operation is ops.causal_chunks:  # with a mask, of full rows
        query, key, value, starts = example.args[:4]
        own = query.numel() * query.shape[2] // len(starts)
        more = own // query.shape[-1] * (key.shape[-1] + value.shape[-1])
    assert counter.get_total_flops() == scores.flops + more > 0


@of("dropout")
def test_random_numbers_are_drawn_for_dropout_alone(place):
    example = examples()[place]
    for rate in (0.0, 0.5):
        args = list(example.args)
        args[example.row.dropout] = rate
        before = torch.get_rng_state()
        example.operation(*args)
        assert torch.equal(before, torch.get_rng_state()) == (rate == 0)


@of("result_unread")
def test_results_that_no_backward_reads(place):
    example = examples()[place]
    for options in ({"sink": Sink()}, {}):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(storage(x)) or x, lambda x: x
        ):
            results = results_of(example, **options)
        assert not {*saved} & {storage(result) for result in results}
