"""Linear layers whose three products are of fp8 operands.

Each operand is multiplied by a scale, rounded to 8 bits, and the product of what is left is added
up in fp32:

    forward          y  = x  W^T     e4m3, e4m3
    input gradient   dx = dy W       e5m2 (hybrid) or e4m3, e4m3
    weight gradient  dW = dy^T x     likewise

Scales are of the values that are multiplied, now, without a history:

    tensorwise   one of an operand: the largest value becomes the largest of the format
    blockwise    one of each 1 x 128 values along the summed dimension, of a weight of each 128 x 128;
                 powers of two

A sum runs over tokens in the weight gradient, and over features in the other two: blockwise, x and
dy are rounded in both ways.

CUDA has kernels of such products. Elsewhere the rounded operands are multiplied in fp32, which is
exact but for the order of sums.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import WeightGradientSink

BLOCK = 128
MULTIPLE = 16  # of the features of a weight that kernels multiply

E4M3 = torch.float8_e4m3fn
_GRADIENTS = {"e4m3": E4M3, "hybrid": torch.float8_e5m2}


class SharedScales(Protocol):
    """Makes scales those of all ranks that share the work of a layer."""

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each of ``values`` over the ranks."""


class Rounded(NamedTuple):
    """A matrix in fp8, and what its values are to be multiplied with.

    values:  fp8 [m, k], summed along k.
    inverse: fp32, of scales: of the whole matrix [], of rows of 128 [m, k / 128], or of blocks
             [m / 128, k / 128].
    """

    values: Tensor
    inverse: Tensor


class WeightProduct(NamedTuple):
    """The gradient of a weight, not computed yet: one matrix by the other transposed."""

    rows: Rounded
    columns: Rounded

    def __call__(self, dtype: torch.dtype) -> Tensor:
        return product(self.rows, self.columns, dtype)


# ---- rounding ------------------------------------------------------------------------------------
def largest(x: Tensor) -> Tensor:
    """Return the largest absolute value, fp32 []; 0 of an empty matrix."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def scales(amax: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """Return what makes the largest values ``amax`` the largest ones of a format; 1 where all
    are 0.

    What is not finite makes products that are not finite.
    """
    limit = torch.finfo(torch.float32).max
    scale = (torch.finfo(dtype).max / amax).clamp(max=limit)
    if power_of_two:
        exponent = torch.frexp(scale)[1] - 1
        scale = torch.where(
            scale.isfinite() & (scale > 0), torch.ldexp(torch.ones_like(scale), exponent), scale
        )
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def rounded(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Rounded:
    """Return a matrix in fp8, with one scale."""
    scale = scales(amax, dtype)
    return Rounded(_dense(_cast(x.float() * scale, dtype)), scale.reciprocal())


def rounded_blocks(x: Tensor, rows: int, dtype: torch.dtype) -> Rounded:
    """Return a matrix in fp8, with a scale of each ``rows`` x 128 values; a block at an edge has
    fewer.
    """
    m, k = x.shape
    wide = _dense(F.pad(x.float(), (0, -k % BLOCK, 0, -m % rows)))
    blocks = wide.view(wide.shape[0] // rows, rows, wide.shape[1] // BLOCK, BLOCK)
    scale = scales(blocks.abs().amax((1, 3)), dtype, power_of_two=True)
    values = _cast(blocks * scale.unsqueeze(1).unsqueeze(3), dtype).view(wide.shape)
    return Rounded(_dense(_first(values, m, k)), scale.reciprocal())


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def exact(x: Rounded, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values that a matrix was rounded to."""
    inverse = x.inverse
    values = x.values.to(dtype)
    if inverse.dim():
        m, k = values.shape
        rows = 1 if len(inverse) == m else BLOCK
        inverse = inverse.repeat_interleave(rows, 0)[:m].repeat_interleave(BLOCK, 1)[:, :k]
    return values * inverse


# ---- products ------------------------------------------------------------------------------------
def product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    """Return a [m, k] times b [n, k] transposed, added up in fp32, or in fp64 for that ``dtype``."""
    if a.values.is_cuda:
        return scaled_product(a, b, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if a.inverse.dim():
        return (exact(a, wide) @ exact(b, wide).t()).to(dtype)
    total = a.values.to(wide) @ b.values.to(wide).t()
    return (total * (a.inverse * b.inverse)).to(dtype)


def scaled_product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    """``product`` by the kernels of CUDA, which take multiples of 16, or whole blocks: zeros are
    added to others.
    """
    m, n = len(a.values), len(b.values)
    multiple = BLOCK if a.inverse.dim() else MULTIPLE
    result = torch._scaled_mm(
        _padded(a.values, 1, multiple),
        _padded(b.values, MULTIPLE, multiple).t(),
        _of_kernel(a.inverse, len(a.values)),
        _of_kernel(_padded_rows(b.inverse, n), n + -n % MULTIPLE).t(),
        out_dtype=dtype,
    )
    return _first(result, m, n)


def _dense(x: Tensor) -> Tensor:
    """``x.contiguous()``, which a fake of a device that is not here has not."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _first(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the first rows and columns, of fakes of a device that is not here, too."""
    return matrix.narrow(0, 0, rows).narrow(1, 0, columns)


def _padded(values: Tensor, rows: int, columns: int) -> Tensor:
    m, k = values.shape
    if m % rows == 0 and k % columns == 0:
        return values
    # as bytes, of which fewer operators are for fp8 than for these
    padded = F.pad(values.view(torch.uint8), (0, -k % columns, 0, -m % rows))
    return padded.view(values.dtype)


def _padded_rows(inverse: Tensor, rows: int) -> Tensor:
    """Scales of rows, for rows that were added."""
    if inverse.dim() == 0 or len(inverse) != rows or rows % MULTIPLE == 0:
        return inverse
    return torch.cat([inverse, inverse.new_ones(-rows % MULTIPLE, inverse.shape[1])])


def _of_kernel(inverse: Tensor, rows: int) -> Tensor:
    """Return scales in the layout that kernels read: those of rows along their columns, those of
    blocks with a distance of rows that is a multiple of 4.
    """
    if inverse.dim() == 0:
        return inverse
    if len(inverse) == rows:
        return _dense(inverse.t()).t()
    count = inverse.shape[1]
    return _first(F.pad(inverse, (0, -count % 4)), len(inverse), count)


# ---- one recipe ----------------------------------------------------------------------------------
class _Tensorwise:
    """One scale of an operand, rounded alike for whatever it is multiplied with."""

    @staticmethod
    def largest(operands: Sequence[Tensor], shared: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return list(shared(torch.stack([largest(x) for x in operands])).unbind())

    @staticmethod
    def along_features(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded(x, amax, dtype)

    along_rows = along_features

    @staticmethod
    def along_tokens(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded(x.t(), amax, dtype)


class _Blockwise:
    """A scale of each block; amaxes are not shared, as no block has values of two ranks."""

    @staticmethod
    def largest(operands: Sequence[Tensor], shared: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [x.new_zeros((), dtype=torch.float32) for x in operands]

    @staticmethod
    def along_features(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded_blocks(x, 1, dtype)

    @staticmethod
    def along_rows(weight: Tensor, amax: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded_blocks(weight, BLOCK, dtype)

    @staticmethod
    def along_tokens(x: Tensor, amax: Tensor, dtype: torch.dtype) -> Rounded:
        return rounded_blocks(x.t(), 1, dtype)


_RECIPES: dict[str, type[_Tensorwise] | type[_Blockwise]] = {
    "tensorwise": _Tensorwise,
    "blockwise": _Blockwise,
}


def _own(values: Tensor) -> Tensor:
    return values


class _Fp8Linears(torch.autograd.Function):
    """Linear layers of one input.

    parameters: ``count`` weights, then as many biases or None.

    What is kept of the input is in fp8: in the way that the weight gradient reads it. Weights are
    rounded again for the backward, instead of being kept for each micro-batch in flight.
    """

    @staticmethod
    def forward(ctx, input, form, recipe, transposed, sink, shared, count, *parameters):
        weights = parameters[:count]
        biases = parameters[count:]
        scheme = _RECIPES[recipe]
        rows = input.reshape(-1, input.shape[-1])
        trained = any(ctx.needs_input_grad[7 : 7 + count])
        amaxes = scheme.largest([rows, *weights], shared)
        operand = scheme.along_features(rows, amaxes[0], E4M3)
        outs = []
        for weight, bias, amax in zip(weights, biases, amaxes[1:], strict=True):
            matrix = scheme.along_rows(_stored(weight, transposed), amax, E4M3)
            out = product(operand, matrix, input.dtype)
            out = out if bias is None else out + bias
            outs.append(out.view(*input.shape[:-1], out.shape[-1]))
        ctx.get_input = sink.getter(input) if sink is not None and trained else None
        kept = (None, None)
        if trained and not ctx.get_input:
            same = operand if recipe == "tensorwise" else None
            kept = same or scheme.along_tokens(rows, amaxes[0], E4M3)
        ctx.save_for_backward(*kept, *amaxes, *weights)
        ctx.options = (form, recipe, transposed, sink, shared, count)
        ctx.shape = input.shape
        ctx.dtype = input.dtype
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        values, inverse, *others = ctx.saved_tensors
        form, recipe, transposed, sink, shared, count = ctx.options
        scheme = _RECIPES[recipe]
        amaxes = others[: 1 + count]
        weights = others[1 + count :]
        places = [place for place, grad in enumerate(grads) if grad is not None]
        rows = [grads[place].reshape(-1, grads[place].shape[-1]) for place in places]
        dtype = _GRADIENTS[form]
        largest_of = scheme.largest(rows, shared) if rows else []
        grad_input = None
        grad_parameters: list[Tensor | None] = [None] * (2 * count)
        columns = None if values is None else Rounded(values, inverse)
        if columns is not None and recipe == "tensorwise":
            columns = Rounded(_dense(columns.values.t()), inverse)
        for place, grad, amax in zip(places, rows, largest_of, strict=True):
            weight = weights[place]
            if ctx.needs_input_grad[0]:
                matrix = _turned(scheme, weight, transposed, amaxes[1 + place])
                part = product(scheme.along_features(grad, amax, dtype), matrix, ctx.dtype)
                grad_input = part if grad_input is None else grad_input.add_(part)
            if ctx.needs_input_grad[7 + place]:
                if columns is None:
                    again = ctx.get_input()
                    again = again.reshape(-1, again.shape[-1])
                    columns = scheme.along_tokens(again, amaxes[0], E4M3)
                across = scheme.along_tokens(grad, amax, dtype)
                of_weight = WeightProduct(*((columns, across) if transposed else (across, columns)))
                if sink is not None:
                    sink.product(weight, of_weight)
                else:
                    grad_parameters[place] = of_weight(weight.dtype)
            if ctx.needs_input_grad[7 + count + place]:
                grad_parameters[count + place] = grad.sum(0)
        if grad_input is not None:
            grad_input = grad_input.view(ctx.shape)
        return (grad_input, None, None, None, None, None, None, *grad_parameters)


def _stored(weight: Tensor, transposed: bool) -> Tensor:
    return weight.t() if transposed else weight


def _turned(
    scheme: type[_Tensorwise] | type[_Blockwise], weight: Tensor, transposed: bool, amax: Tensor
) -> Rounded:
    """Return a weight with its input features as rows."""
    return scheme.along_rows(_stored(weight, not transposed), amax, E4M3)


def fp8_linears(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    form: str,
    recipe: str,
    shared: bool = False,
    transposed: bool = False,
    sink: WeightGradientSink | None = None,
    ranks: SharedScales | None = None,
) -> tuple[Tensor, ...]:
    """input [..., i] @ weight [o, i]^T + bias [o] -> [..., o] for each weight and its bias, of fp8
    operands.

    form:       what operands are rounded to, see ``--fp8-format``.
    recipe:     how they are scaled, see ``--fp8-recipe``.
    shared:     whether ``ranks`` have other parts of these values, which have one scale.
    transposed: weights are stored as [i, o].
    sink:       see ``linear``.
    """
    over = ranks.largest if shared and ranks is not None else _own
    return _Fp8Linears.apply(
        input, form, recipe, transposed, sink, over, len(weights), *weights, *biases
    )


def fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: str,
    recipe: str,
    shared: bool = False,
    transposed: bool = False,
    sink: WeightGradientSink | None = None,
    ranks: SharedScales | None = None,
) -> Tensor:
    """One layer of ``fp8_linears``: [..., o]."""
    (out,) = fp8_linears(
        input,
        [weight],
        [bias],
        form,
        recipe,
        shared=shared,
        transposed=transposed,
        sink=sink,
        ranks=ranks,
    )
    return out
