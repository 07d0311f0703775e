"""Linear layers that read the same input: the backward adds up the gradient of the input in one buffer.

separate            grad_x = g1 W1  +  g2 W2  +  g3 W3      three buffers, and two passes that add them
here                grad_x = g1 W1,  += g2 W2,  += g3 W3    one buffer, to which products are added
merged weights      grad_x = [g1 g2 g3] W                   one product, if the weights are adjacent in memory
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .four_bit import FourBit, matrices, row_counts
from .linear import WeightGradientSink


class _Linears(torch.autograd.Function):
    """Linear layers of one input.

    parameters: ``count`` weights, then as many biases or None.
    together:   whether there is one output, not ``count``.
    views:      whether ``count`` outputs may be views of one.
    formats:    of frozen weights in 4 bits, see ``matrices``.
    """

    @staticmethod
    def forward(ctx, input, sink, together, views, formats, count, *parameters):
        weights = parameters[:count]
        biases = parameters[count:]
        trained = sink is not None or any(ctx.needs_input_grad[_FIRST : _FIRST + count])
        ctx.get_input = None if sink is None else sink.getter(input)
        ctx.save_for_backward(input if trained and not ctx.get_input else None, *weights)
        ctx.shape = input.shape
        ctx.sink = sink
        ctx.together = together
        ctx.count = count
        ctx.formats = formats
        ctx.set_materialize_grads(False)
        weights = matrices(weights, formats, input.dtype)
        if together:
            return side_by_side(input, weights, biases)
        if views and (product := in_one(input, weights, biases)) is not None:
            return product.split([len(weight) for weight in weights], -1)
        return tuple(
            F.linear(input, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx, *grads):
        input, *weights = ctx.saved_tensors
        count = ctx.shape[:-1].numel()
        rows = [None if grad is None else grad.reshape(count, -1) for grad in grads]
        grad_input = None
        widths = row_counts(weights, ctx.formats)
        whole = rows[0] if ctx.together else None
        if ctx.together:
            rows = columns_of(whole, widths)
        given = [grad for grad in rows if grad is not None]
        if ctx.needs_input_grad[0] and given:
            values = matrices(weights, ctx.formats, given[0].dtype, backward=True)
            grad_input = gradient_of_input(whole, rows, values)
            del values
        input = ctx.get_input() if ctx.get_input else input
        inputs = None if input is None else input.reshape(-1, input.shape[-1])
        grad_parameters = [None] * (2 * ctx.count)
        of_biases = ctx.needs_input_grad[_FIRST + ctx.count :]
        if ctx.together and grads[0] is not None and any(of_biases):
            sums = grads[0].reshape(count, -1).sum(0).split(widths)
            grad_parameters[ctx.count :] = sums
            of_biases = [False] * ctx.count
        for place, (grad, weight) in enumerate(zip(rows, weights, strict=True)):
            if grad is None:
                continue
            if ctx.sink is not None:
                ctx.sink.matmul(weight, grad, inputs)
            elif ctx.needs_input_grad[_FIRST + place]:
                grad_parameters[place] = grad.t() @ inputs
            if of_biases[place]:
                grad_parameters[ctx.count + place] = grad.sum(0)
        return (
            None if grad_input is None else grad_input.view(ctx.shape),
            *[None] * (_FIRST - 1),
            *grad_parameters,
        )


_FIRST = 6  # of the parameters among the arguments of ``_Linears``


def columns_of(whole: Tensor | None, widths: Sequence[int]) -> Sequence[Tensor | None]:
    """Return the gradients of results side by side, [t, o] each; None each where there is none."""
    return [None] * len(widths) if whole is None else whole.split(widths, 1)


def gradient_of_input(
    whole: Tensor | None, rows: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of the input of layers. whole: the gradients of all results as one."""
    merged = None if whole is None else joined(weights)
    if whole is not None and merged is not None:
        return whole @ merged
    pairs = zip(rows, weights, strict=True)
    return sum_of_products([(grad, weight) for grad, weight in pairs if grad is not None])


def sum_of_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum of products of matrices, added up in one buffer."""
    (grad, weight), *others = pairs
    total = grad @ weight
    for grad, weight in others:
        total.addmm_(grad, weight)
    return total


def side_by_side(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Tensor:
    """Return the products with all weights, concatenated: [..., sum of o]. biases: all, or None
    each.
    """
    if (product := in_one(input, weights, biases)) is not None:
        return product
    sizes = [len(weight) for weight in weights]
    out = input.new_empty((*input.shape[:-1], sum(sizes)))
    rows = input.reshape(-1, input.shape[-1])
    parts = out.view(len(rows), -1).split(sizes, 1)
    for part, weight, vector in zip(parts, weights, biases, strict=True):
        if vector is None:
            torch.mm(rows, weight.t(), out=part)
        else:
            torch.addmm(vector, rows, weight.t(), out=part)
    return out


def in_one(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Tensor | None:
    """Return all outputs side by side, by one product; None where that takes copies of weights."""
    added = [bias for bias in biases if bias is not None]
    merged = joined(weights)
    bias = joined(added) if added else None
    fits = len(added) in (0, len(weights)) and (bias is not None) == bool(added)
    return F.linear(input, merged, bias) if merged is not None and fits else None


def joined(weights: Sequence[Tensor]) -> Tensor | None:
    """Return weights, or biases, as one tensor, if each begins in memory where the one before
    ends; else None.
    """
    first = weights[0]
    storage = first.untyped_storage()._cdata
    end = first.storage_offset()
    for weight in weights:
        if (
            weight.untyped_storage()._cdata != storage
            or weight.storage_offset() != end
            or not weight.is_contiguous()
        ):
            return None
        end += weight.numel()
    shape = (sum(map(len, weights)), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())


def linears(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    views: bool = False,
    sink: WeightGradientSink | None = None,
    formats: Sequence[FourBit | None] = (),
) -> tuple[Tensor, ...]:
    """input [..., i] @ weight [o, i]^T + bias [o] -> [..., o] for each weight and its bias.

    With a ``sink`` autograd has no gradients of weights.

    views:   whether results may be views of one product, of weights that are adjacent in memory,
             like those of a flat buffer: all of it is kept as long as one of them is.
    formats: of each frozen weight that is in 4 bits, uint8 [bytes], how; None for others; none: no
             weight is.
    """
    how = (False, views, tuple(formats), len(weights))
    return _Linears.apply(input, sink, *how, *weights, *biases)


def joined_linear(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    sink: WeightGradientSink | None = None,
    formats: Sequence[FourBit | None] = (),
) -> Tensor:
    """input [..., i] @ weight [o, i]^T + bias [o] for each weight, concatenated in one tensor [...,
    sum of o].

    Weights that are adjacent in memory, like those of a flat buffer, are multiplied at once.

    biases:  one for each weight, or none.
    formats: see ``linears``.
    """
    given: Sequence[Tensor | None] = biases or [None] * len(weights)
    how = (True, False, tuple(formats), len(weights))
    return _Linears.apply(input, sink, *how, *weights, *given)
