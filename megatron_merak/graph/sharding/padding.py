"""What the padding of sharded values contains, found by running each operator on it.

A dimension that is not divisible by the ranks is padded. Two things hold for padding everywhere:
its gradient is zero, so that the padding of parameters stays zero in training; and its value is
either known (``Layout.padding_value``) or not used. An operator keeps the first if its derivatives
at the padding are finite; the second is tracked from value to value. Where an operator needs other
padding (zeros for a sum, anything else for a divisor), the padding of its operand is overwritten
first (``Decision.fills``), which also stops the gradient of the padding.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..ir.aliases import aliased
from ..ir.nodes import called, is_random, op_name, operand, values
from .known import Known
from .placement import Layout, PaddingValue, ShardSpec

# Sample values of a replicated operand that is combined with the padding.
_SAMPLES = {
    "float": (-25.0, -3.7, -0.6, 0.3, 1.9, 7.0),
    "int": (-7, -2, -1, 1, 3),
    "bool": (True, False),
}


def padding_values(
    p: Known, node: Node, to_shard: Mapping[Node, ShardSpec]
) -> dict[Node, PaddingValue]:
    """Return the padding value of each padded operand of a node; operands in ``to_shard`` are
    padded with zeros.
    """
    result: dict[Node, PaddingValue] = {}
    for x in node.all_input_nodes:
        layout = p.layout(x)
        if layout is not None and layout.padded:
            result[x] = layout.padding_value
        elif x in to_shard and to_shard[x].padded:
            result[x] = 0
    return result


def zeros(p: Known, node: Node, to_shard: Mapping[Node, ShardSpec]) -> dict[Node, PaddingValue]:
    """Return the fills after which the padding of every operand is zero."""
    return {
        x: 0
        for x, value in padding_values(p, node, to_shard).items()
        if value is None or value != 0
    }


def equal_padding(
    p: Known, node: Node, to_shard: Mapping[Node, ShardSpec]
) -> tuple[dict[Node, PaddingValue], PaddingValue]:
    """Return (the fills after which the padding of all operands is the same, its value then)."""
    distinct = dict.fromkeys(padding_values(p, node, to_shard).values())
    if len(distinct) > 1 or None in distinct:
        return zeros(p, node, to_shard), 0
    return {}, next(iter(distinct), 0)


def settle(
    p: Known, node: Node, layout: Layout, to_shard: Mapping[Node, ShardSpec], pointwise: bool
) -> tuple[dict[Node, PaddingValue], tuple[PaddingValue, ...]]:
    """Return (fills, the padding value of each result after these) of a node whose padded operands
    share a dimension.

    layout:    its ``dim`` is that dimension, counted in the result if ``pointwise``, else in each
               operand.
    pointwise: whether the operator is elementwise.

    Raises CannotShard if no fills give finite derivatives.
    """
    padding = padding_values(p, node, to_shard)
    if aliased(node)[0] and not aliased(node)[1]:
        return {}, (padding[operand(node)],)
    if is_random(node):
        keeps_zeros = "dropout" in op_name(node) and "alpha" not in op_name(node)
        return zeros(p, node, to_shard), ((0 if keeps_zeros else None),) * len(values(node))
    for fills in _candidate_fills(padding):
        results = _run(p, node, layout, {**padding, **fills}, pointwise)
        if results is None:
            continue
        for x in aliased(node)[1]:
            if x in fills or x in padding and results[0] != padding[x]:
                why = "writes into the padding of a dimension that the ranks do not share evenly"
                raise p.cannot_shard(node, why, (x,))
        return fills, results
    raise p.cannot_shard(
        node, "is singular in the padding of a dimension that the ranks do not share evenly"
    )


def _candidate_fills(padding: Mapping[Node, PaddingValue]) -> Iterator[dict[Node, PaddingValue]]:
    """Yield fills to try: as few as possible, then ones where zeros are singular, in one operand,
    then in all.
    """
    unknown: dict[Node, PaddingValue] = {x: 0 for x, value in padding.items() if value is None}
    numbers = [x for x in padding if values(x)[0].is_floating_point()]
    yield unknown
    yield from ({**unknown, x: 1} for x in numbers)
    yield {**unknown, **dict.fromkeys(numbers, 1)}


def _run(
    p: Known, node: Node, layout: Layout, padding: Mapping[Node, PaddingValue], pointwise: bool
) -> tuple[PaddingValue, ...] | None:
    """Return the padding value of each result; None if a gradient of zero does not stay zero."""
    samples = (
        _padding_beside_samples(node, padding)
        if pointwise
        else _one_padding_entry(node, layout, padding)
    )
    operands = {x: t.requires_grad_() if t.is_floating_point() else t for x, t in samples.items()}
    leaves = [x for x in operands.values() if x.requires_grad]
    written = aliased(node)[1]
    with torch.enable_grad():
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda x: operands[x].clone() if x in written else operands[x]
        )
        results = [x for x in tree_leaves(called(node)(*args, **kwargs)) if isinstance(x, Tensor)]
    roots = [x for x in results if x.requires_grad]
    if roots:
        grads = torch.autograd.grad(
            roots, leaves, [torch.zeros_like(x) for x in roots], allow_unused=True
        )
        if any(grad is not None and grad.any() for grad in grads):
            return None
    return tuple(_constant(x.detach()) for x in results)


def _padding_beside_samples(node: Node, padding: Mapping[Node, PaddingValue]) -> dict[Node, Tensor]:
    """Return 1-D operands: the padding beside every combination of sample values of the other
    operands.
    """
    others = [x for x in node.all_input_nodes if x not in padding]
    combinations = list(product(*(_SAMPLES[_kind(values(x)[0].dtype)] for x in others)))
    columns = dict(zip(others, zip(*combinations, strict=True), strict=True))
    full = {
        x: torch.full((len(combinations),), _known(value), dtype=values(x)[0].dtype)
        for x, value in padding.items()
    }
    return full | {
        x: torch.tensor(column, dtype=values(x)[0].dtype) for x, column in columns.items()
    }


def _one_padding_entry(
    node: Node, layout: Layout, padding: Mapping[Node, PaddingValue]
) -> dict[Node, Tensor]:
    """Return operands whose padded dimension is one entry of padding; other operands have sample
    values.
    """
    operands: dict[Node, Tensor] = {}
    for x in node.all_input_nodes:
        value = values(x)[0]
        shape = [
            1 if x in padding and dim == layout.dim else extent
            for dim, extent in enumerate(value.shape)
        ]
        samples = torch.tensor(_SAMPLES[_kind(value.dtype)], dtype=value.dtype)
        samples = samples.repeat(-(-math.prod(shape) // len(samples)))[: math.prod(shape)].view(
            shape
        )
        operands[x] = (
            torch.full(shape, _known(padding[x]), dtype=value.dtype) if x in padding else samples
        )
    return operands


def _known(value: PaddingValue) -> float | int | bool:
    assert value is not None
    return value


def _kind(dtype: torch.dtype) -> str:
    return (
        "bool"
        if dtype == torch.bool
        else "float"
        if dtype.is_floating_point or dtype.is_complex
        else "int"
    )


def _constant(x: Tensor) -> PaddingValue:
    """Return the number that every entry of a tensor is; None if they differ or are not finite."""
    if (
        x.is_complex()
        or not x.numel()
        or not bool((x == x.flatten()[0]).all())
        or not bool(x.isfinite().all())
    ):
        return None
    return x.flatten()[0].item()
