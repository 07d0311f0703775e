"""Rules of operators that keep positions: elementwise ones, and those that reduce or scan along
dimensions.
"""

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor
from torch.fx import Node

from ..ir.aliases import aliased
from ..ir.nodes import op_name, operand, schema, values
from .known import Known
from .padding import settle
from .placement import Decision, Layout, ShardSpec

POINTWISE = """
    add sub mul div rsub neg exp exp2 log log2 log10 sqrt rsqrt pow tanh tan sigmoid silu gelu relu relu6 to
    contiguous clone alias detach dropout where masked_fill eq ne lt gt le ge clamp clamp_min clamp_max maximum
    minimum abs erf sin cos square reciprocal __and__ __or__ __xor__ logical_not logical_and logical_or bitwise_not
    bitwise_and bitwise_or type_as _to_copy leaky_relu softplus elu selu celu hardtanh hardsigmoid threshold mish
    log1p expm1 sign zeros_like ones_like hardswish log_sigmoid floor ceil round trunc fmod remainder floor_divide
    lerp addcmul addcdiv full_like empty_like rand_like nan_to_num isnan isinf isfinite max.other min.other
    lift_fresh_copy feature_dropout true_divide multiply divide subtract sinh cosh atan atan2 float_power logit
    xlogy rrelu_with_noise copysign real imag conj angle sgn erfc erfinv positive logaddexp heaviside
    bernoulli.p alpha_dropout detach_ relu_ add_ mul_ sub_ div_ masked_fill_ clamp_ clamp_min_ clamp_max_ copy_
    zero_ fill_ neg_ exp_ sigmoid_ tanh_ silu_ dropout_ clip greater greater_equal less less_equal not_equal
    absolute negative logical_xor pow_ sqrt_ rsqrt_ hardtanh_ leaky_relu_ gelu_ elu_ hardswish_ relu6_ addcmul_
    addcdiv_ lerp_ erf_ abs_ square_
""".split()


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Return the value of an argument of a node's operator, which may be the operator's default for
    it.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    for position, parameter in enumerate(schema(node).arguments):
        if parameter.name == name:
            return node.args[position] if position < len(node.args) else parameter.default_value
    return default


def pointwise(p: Known, node: Node) -> Decision:
    """Sharded operands must be sharded alike; replicated ones are sharded too, unless they
    broadcast along that dimension."""
    rank = len(p.shape(node))
    inputs = node.all_input_nodes
    sharded = p.sharded(inputs)
    first = aligned(p, sharded[0], rank)
    if any(not first.same_shards(aligned(p, x, rank)) for x in sharded):
        raise p.cannot_shard(node, "combines values that are sharded differently")
    if any(p.layout(x) is None for x in aliased(node)[1]):
        raise p.cannot_shard(node, "writes a sharded value into a replicated one")
    to_shard: dict[Node, ShardSpec] = {}
    renormalized = any(layout.renormalized for x in sharded if (layout := p.layout(x)))
    for x in inputs:
        if p.layout(x) is not None or not values(x):
            continue
        shape = p.shape(x)
        dim = first.dim - (rank - len(shape))
        if dim >= 0 and shape[dim] != 1:
            p.shard_operand(to_shard, x, ShardSpec(dim, first.blocks, first.padded))
            if (
                p.refuse_costly
                and x in to_shard
                and x not in p.common
                and first.dim == rank - 1 > 0
                and prod(shape) == prod(p.shape(node))
            ):
                raise p.cannot_shard(
                    node, "combines shards with a replicated value of the same size"
                )
        elif not renormalized:
            renormalized = _is_reduced_statistic(p, x)
    features = (
        first.features
        if all(p.sharded_layout(x).features == first.features for x in sharded)
        else None
    )
    result = replace(
        first, origins=p.origins(sharded), renormalized=renormalized, features=features
    )
    if not first.padded:
        return Decision(result, to_shard)
    fills, (padding_value,) = settle(p, node, first, to_shard, pointwise=True)
    return Decision(replace(result, padding_value=padding_value), to_shard, fills=fills)


def aligned(p: Known, node: Node, rank: int) -> Layout:
    """Return an operand's layout with its dimension counted in a result of ``rank`` dimensions, as
    in broadcasting.
    """
    layout = p.sharded_layout(node)
    return replace(layout, dim=layout.dim + rank - len(p.shape(node)))


def _is_reduced_statistic(p: Known, node: Node, depth: int = 8) -> bool:
    """Whether a replicated value is a statistic (a mean square, say) that was all-reduced."""
    for _ in range(depth):
        decision = p.decisions.get(node)
        if decision is not None:
            return decision.reduce and op_name(node) in ("sum", "mean")
        inputs = node.all_input_nodes
        if node.op != "call_function" or len(inputs) != 1:
            return False
        node = inputs[0]
    return False


def dims_of(p: Known, node: Node, name: str) -> tuple[int, ...]:
    """Return the dimensions an operator works along, as indices >= 0; all if it names none."""
    rank = len(p.shape(operand(node)))
    value = argument(node, name)
    dims = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(dim % rank for dim in dims) or tuple(range(rank))


def reduction(p: Known, node: Node) -> Decision:
    """Reducing other dimensions keeps the shards; a sum or mean along the sharded one is a partial
    sum.
    """
    x = operand(node)
    layout = p.input_layout(node)
    dims = dims_of(p, node, "dim")
    if layout.dim not in dims:
        keepdim = argument(node, "keepdim") or 0
        dim = layout.dim if keepdim else layout.dim - sum(other < layout.dim for other in dims)
        return _decision(p, node, layout, replace(layout, dim=dim))
    name = op_name(node)
    if name not in ("sum", "mean") or not values(x)[0].is_floating_point():
        raise p.cannot_shard(node, "reduces the sharded dimension")
    # A fill also stops the gradient of the padding, so that it is needed even if the padding is
    # zero.
    scale = layout.extent(p.tp) / sum(layout.blocks) if name == "mean" else 1.0
    return Decision(None, reduce=True, scale=scale, fills={x: 0} if layout.padded else {})


def _decision(p: Known, node: Node, layout: Layout, result: Layout) -> Decision:
    """Return the decision for a node whose operand has ``layout`` and of which every result has the
    layout ``result``, apart from the value of its padding."""
    fills, padding = (
        settle(p, node, layout, {}, pointwise=False)
        if layout.padded
        else ({}, (0,) * len(values(node)))
    )
    several = not isinstance(node.meta["val"], Tensor)
    results = tuple(replace(result, padding_value=padding_value) for padding_value in padding)
    return Decision(results if several else results[0], fills=fills)


def along(p: Known, node: Node) -> Decision:
    """Operators along one dimension that keep the shape (softmax, cumsum): it must not be the
    sharded one.
    """
    layout = p.input_layout(node)
    if layout.dim in dims_of(p, node, "dim"):
        raise p.cannot_shard(node, "works along the sharded dimension")
    return _decision(p, node, layout, layout)


def norm(p: Known, node: Node) -> Decision:
    """layer_norm, rms_norm: the normalised dimensions, which are the last ones, must not be
    sharded.
    """
    layout = p.input_layout(node)
    count = len(argument(node, "normalized_shape"))
    if (
        layout.dim >= len(p.shape(operand(node))) - count
        or len(p.sharded(node.all_input_nodes)) > 1
    ):
        raise p.cannot_shard(node, "normalises over the sharded dimension")
    return _decision(p, node, layout, layout)


def selection(p: Known, node: Node) -> Decision:
    """topk, sort: several results along a dimension that must not be the sharded one."""
    layout = p.input_layout(node)
    if layout.dim == argument(node, "dim") % len(p.shape(operand(node))):
        raise p.cannot_shard(node, "selects along the sharded dimension")
    return _decision(p, node, layout, layout)
