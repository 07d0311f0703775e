"""Frozen linear layers of one input to which adapters of low rank are added (LoRA, Hu et al., 2021).

                     y  = x W^T + s (x A^T) B^T       W [o, i] frozen; A [r, i], B [o, r]; r is small
separate             x W^T, x A^T, (..) B^T, s (..), y + ..    six passes over values as large as y
here                 h = s x A^T, added to y in the product h B^T, which reads and writes y once

The layers are side by side in y, and the A of all of them one product if they are adjacent in memory.
The backward adds s (dy B) A to dy W in the product as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .four_bit import FourBit, matrices, row_counts
from .linear import WeightGradientSink
from .linears import columns_of, gradient_of_input, in_one, joined, side_by_side


@dataclass(frozen=True)
class _Factors:
    """The tensors of a call: of frozen layers, then those of adapters.

    downs:   of each adapter A; empty where the products with them are given.
    hiddens: of each adapter what is given in place of x A^T; empty where there is an A.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    downs: Sequence[Tensor]
    ups: Sequence[Tensor]
    hiddens: Sequence[Tensor]

    @property
    def ranks(self) -> list[int]:
        return [up.shape[1] for up in self.ups]


class _Adapted(torch.autograd.Function):
    """sizes:   number of layers, and of adapters.
    given:   whether the products with A are.
    formats: of frozen layers in 4 bits, see ``matrices``.
    """

    @staticmethod
    def forward(ctx, input, sink, sizes, given, together, views, places, scales, formats, *tensors):
        ctx.sizes = sizes
        ctx.formats = formats
        ctx.given = given
        ctx.together = together
        ctx.places = places
        ctx.scales = scales
        ctx.shape = input.shape
        ctx.sink = sink
        ctx.set_materialize_grads(False)
        factors = _split(sizes, given, tensors)
        widths = row_counts(factors.weights, formats)
        weights = matrices(factors.weights, formats, input.dtype)
        product = None
        if together:
            product = side_by_side(input, weights, factors.biases)
        elif views:
            product = in_one(input, weights, factors.biases)
        if product is None:
            pairs = zip(weights, factors.biases, strict=True)
            products = [F.linear(input, weight, bias) for weight, bias in pairs]
        else:
            products = [*product.split(widths, -1)]
        del weights
        scaled = _scaled_hiddens(input, factors, scales)
        columns = scaled.split(factors.ranks, 1)
        for place, hidden, up in zip(places, columns, factors.ups, strict=True):
            products[place].view(len(hidden), -1).addmm_(hidden, up.t())
        kept = None if given else input
        ctx.get_input = None if given or sink is None else sink.getter(input)
        ctx.save_for_backward(
            None if ctx.get_input else kept,
            scaled,
            *factors.weights,
            *factors.downs,
            *factors.ups,
        )
        return product if together else tuple(products)

    @staticmethod
    def backward(ctx, *grads):
        layers, adapters = ctx.sizes
        input, scaled, *tensors = ctx.saved_tensors
        weights = tensors[:layers]
        downs = tensors[layers:-adapters]
        ups = tensors[-adapters:]
        ranks = [up.shape[1] for up in ups]
        needs = ctx.needs_input_grad
        empty = [None] * len(needs)
        count = ctx.shape[:-1].numel()
        whole = grads[0].reshape(count, -1) if ctx.together and grads[0] is not None else None
        parts = [None if grad is None else grad.reshape(count, -1) for grad in grads]
        if ctx.together:
            parts = columns_of(whole, row_counts(weights, ctx.formats))
        if all(part is None for part in parts):
            return tuple(empty)
        grad_scaled = scaled.new_empty(scaled.shape)
        columns = grad_scaled.split(ranks, 1)
        for place, column, scale, up in zip(ctx.places, columns, ctx.scales, ups, strict=True):
            if parts[place] is None:
                column.zero_()
            else:
                column.addmm_(parts[place], up, beta=0, alpha=scale)
        grad_input = None
        if needs[0]:
            values = matrices(weights, ctx.formats, scaled.dtype, backward=True)
            grad_input = gradient_of_input(whole, parts, values)
            del values
        if grad_input is not None:
            _add_down(grad_input, grad_scaled, ranks, downs)
        of_biases = [
            part.sum(0) if wanted and part is not None else None
            for part, wanted in zip(parts, needs[_FIRST + layers :], strict=False)
        ]
        of_downs = []
        if downs:
            input = ctx.get_input() if ctx.get_input else input
            inputs = input.reshape(count, -1)
            of_downs = [
                None if parts[place] is None else _of_weight(ctx.sink, down, column, inputs)
                for place, down, column in zip(ctx.places, downs, columns, strict=True)
            ]
        of_ups = [
            _of_weight(ctx.sink, up, parts[place], hidden)
            for place, up, hidden in zip(ctx.places, ups, scaled.split(ranks, 1), strict=True)
        ]
        of_hiddens = []
        if ctx.given:
            # each in memory of its own, since ranks may sum it up in place
            of_hiddens = [
                None if parts[place] is None else x.reshape(*ctx.shape[:-1], -1).contiguous()
                for place, x in zip(ctx.places, columns, strict=True)
            ]
        return (
            None if grad_input is None else grad_input.view(ctx.shape),
            *empty[1 : _FIRST + layers],
            *of_biases,
            *of_downs,
            *of_ups,
            *of_hiddens,
        )


_FIRST = 9  # of the tensors among the arguments of ``_Adapted``


def _split(sizes: tuple[int, int], given: bool, tensors: Sequence[Tensor]) -> _Factors:
    layers, adapters = sizes
    counts = [layers, layers, 0 if given else adapters, adapters, adapters if given else 0]
    groups = []
    for count in counts:
        groups.append(tensors[:count])
        tensors = tensors[count:]
    return _Factors(*groups)


def _scaled_hiddens(input: Tensor, factors: _Factors, scales: Sequence[float]) -> Tensor:
    """Return s x A^T of all adapters, side by side."""
    ranks = factors.ranks
    out = input.new_empty(input.shape[:-1].numel(), sum(ranks))
    columns = out.split(ranks, 1)
    if factors.hiddens:
        for column, hidden, scale in zip(columns, factors.hiddens, scales, strict=True):
            torch.mul(hidden.reshape(column.shape), scale, out=column)
        return out
    rows = input.reshape(-1, input.shape[-1])
    merged = joined(factors.downs)
    if merged is not None and len({*scales}) == 1:
        return out.addmm_(rows, merged.t(), beta=0, alpha=scales[0])
    for column, down, scale in zip(columns, factors.downs, scales, strict=True):
        column.addmm_(rows, down.t(), beta=0, alpha=scale)
    return out


def _add_down(
    total: Tensor, grad_scaled: Tensor, ranks: Sequence[int], downs: Sequence[Tensor]
) -> None:
    """Add the gradient of an input that comes through A, if there is one."""
    if not downs:
        return
    merged = joined(downs)
    if merged is not None:
        total.addmm_(grad_scaled, merged)
        return
    for column, down in zip(grad_scaled.split(ranks, 1), downs, strict=True):
        total.addmm_(column, down)


def _of_weight(
    sink: WeightGradientSink | None, weight: Tensor, grad: Tensor | None, input: Tensor
) -> Tensor | None:
    """Return a weight's gradient, or give its factors to the sink."""
    if grad is None:
        return None
    if sink is None:
        return grad.t() @ input
    sink.matmul(weight, grad, input)
    return None


def adapted_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    hiddens: Sequence[Tensor],
    places: Sequence[int],
    scales: Sequence[float],
    sink: WeightGradientSink | None = None,
    formats: Sequence[FourBit | None] = (),
) -> Tensor:
    """input [..., i] @ W [o, i]^T + bias [o] for each frozen layer, concatenated in one tensor
    [..., sum of o], with the products of adapters added: scale * (input @ A [r, i]^T) @ B [o, r]^T.

    With a ``sink`` autograd has no gradients of A and B; W has none in any case.

    weights: W of each layer, then A of each adapter unless ``hiddens`` are given, then B of each.
    biases:  one for each layer, or None.
    hiddens: of each adapter [..., r], in place of ``input`` @ A^T; none: there is an A.
    places:  of each adapter the layer that it is added to.
    formats: of each W that is in 4 bits, uint8 [bytes], how; None for others; none: no W is.
    """
    return _apply(
        input,
        weights,
        biases,
        hiddens,
        places,
        scales=scales,
        together=True,
        sink=sink,
        formats=formats,
    )


def adapted_linears(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    hiddens: Sequence[Tensor],
    places: Sequence[int],
    scales: Sequence[float],
    views: bool = False,
    sink: WeightGradientSink | None = None,
    formats: Sequence[FourBit | None] = (),
) -> tuple[Tensor, ...]:
    """``adapted_linear`` with a result for each layer. views: see ``linears``."""
    return _apply(
        input,
        weights,
        biases,
        hiddens,
        places,
        scales=scales,
        views=views,
        sink=sink,
        formats=formats,
    )


def _apply(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    hiddens: Sequence[Tensor],
    places: Sequence[int],
    *,
    scales: Sequence[float],
    together: bool = False,
    views: bool = False,
    sink: WeightGradientSink | None,
    formats: Sequence[FourBit | None],
) -> Any:
    sizes = (len(biases), len(places))
    given = bool(hiddens)
    factors = weights[sizes[0] :]
    assert len(factors) == (1 if given else 2) * sizes[1], (len(weights), sizes, given)
    tensors = (*weights[: sizes[0]], *biases, *factors, *hiddens)
    how = (sizes, given, together, views, tuple(places), tuple(scales), tuple(formats))
    return _Adapted.apply(input, sink, *how, *tensors)
