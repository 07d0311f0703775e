"""Rules of ops that keep positions: elementwise ones, and those that reduce or scan along dimensions."""

from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ..ir.aliases import aliased
from ..ir.nodes import op_name, values
from .padding import settle
from .placement import Cut, Decision, Split
from .propagate import Propagation

POINTWISE = """
    add sub mul div rsub neg exp exp2 log log2 log10 sqrt rsqrt pow tanh tan sigmoid silu gelu relu relu6 to
    contiguous clone alias detach dropout where masked_fill eq ne lt gt le ge clamp clamp_min clamp_max maximum
    minimum abs erf sin cos square reciprocal __and__ __or__ __xor__ logical_not logical_and logical_or bitwise_not
    bitwise_and bitwise_or type_as _to_copy leaky_relu softplus elu selu celu hardtanh hardsigmoid threshold mish
    log1p expm1 sign zeros_like ones_like hardswish log_sigmoid floor ceil round trunc fmod remainder floor_divide
    lerp addcmul addcdiv full_like empty_like rand_like nan_to_num isnan isinf isfinite max.other min.other
    lift_fresh_copy feature_dropout true_divide multiply divide subtract sinh cosh atan atan2 float_power logit
    xlogy rrelu_with_noise prelu_scalar copysign real imag conj angle sgn erfc erfinv positive logaddexp heaviside
    bernoulli.p alpha_dropout detach_ relu_ add_ mul_ sub_ div_ masked_fill_ clamp_ clamp_min_ clamp_max_ copy_
    zero_ fill_ neg_ exp_ sigmoid_ tanh_ silu_ dropout_ clip greater greater_equal less less_equal not_equal
    absolute negative logical_xor pow_ sqrt_ rsqrt_ hardtanh_ leaky_relu_ gelu_ elu_ hardswish_ relu6_ addcmul_
    addcdiv_ lerp_ erf_ abs_ square_
""".split()


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The value that a node gives to an argument of its operator, or the operator's own default."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, OpOverload)
    for place, known in enumerate(node.target._schema.arguments):
        if known.name == name:
            return node.args[place] if place < len(node.args) else known.default_value
    return default


def pointwise(p: Propagation, node: Node) -> Decision:
    """Operands must be divided alike; whole ones are cut where they are as long, and enter whole where they are 1."""
    rank = len(p.shape(node))
    inputs = node.all_input_nodes
    divided = p.divided(inputs)
    first = aligned(p, divided[0], rank)
    if any(not first.same(aligned(p, x, rank)) for x in divided):
        raise p.unfit(node, "combines values that are divided differently")
    if any(p.layout(x) is None for x in aliased(node)[1]):
        raise p.unfit(node, "writes a divided value into a whole one")
    cuts: dict[Node, Cut] = {}
    summed = any(split.summed for x in divided if (split := p.layout(x)))
    for x in inputs:
        if p.layout(x) is not None or not values(x):
            continue
        shape = p.shape(x)
        dim = first.dim - (rank - len(shape))
        if dim >= 0 and shape[dim] != 1:
            p.bring(cuts, x, Cut(dim, first.blocks, first.padded))
            if (
                p.thrifty
                and x in cuts
                and x not in p.common
                and first.dim == rank - 1 > 0
                and prod(shape) == prod(p.shape(node))
            ):
                raise p.unfit(node, "combines the parts with a whole value of the same size")
        elif not summed:
            summed = _statistic(p, x)
    rows = first.rows if all(p.layout(x).rows == first.rows for x in divided) else None
    made = replace(first, origins=p.origins(divided), summed=summed, rows=rows)
    if not first.padded:
        return Decision(made, cuts)
    fills, (filler,) = settle(p, node, first, cuts, pointwise=True)
    return Decision(replace(made, filler=filler), cuts, fills=fills)


def aligned(p: Propagation, node: Node, rank: int) -> Split:
    """How an operand is divided, its dimension counted in a result of ``rank`` dimensions (they align at the end)."""
    split = p.layout(node)
    assert split is not None
    return replace(split, dim=split.dim + rank - len(p.shape(node)))


def _statistic(p: Propagation, node: Node, depth: int = 8) -> bool:
    """Whether a whole value is a statistic (a mean square, say) that was summed over the ranks."""
    for _ in range(depth):
        decision = p.decisions.get(node)
        if decision is not None:
            return decision.reduce and op_name(node) in ("sum", "mean")
        inputs = node.all_input_nodes
        if node.op != "call_function" or len(inputs) != 1:
            return False
        node = inputs[0]
    return False


def dims_of(p: Propagation, node: Node, name: str) -> tuple[int, ...]:
    """The dimensions an op works along, from 0; all when it names none."""
    rank = len(p.shape(node.args[0]))
    given = argument(node, name)
    dims = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(dim % rank for dim in dims) or tuple(range(rank))


def reduction(p: Propagation, node: Node) -> Decision:
    """Reducing other dimensions keeps the parts; a sum or mean along the divided one is a partial sum."""
    x = node.args[0]
    split = p.subject(node)
    dims = dims_of(p, node, "dim")
    if split.dim not in dims:
        kept = argument(node, "keepdim") or 0
        dim = split.dim if kept else split.dim - sum(other < split.dim for other in dims)
        return _kept(p, node, split, replace(split, dim=dim))
    name = op_name(node)
    if name not in ("sum", "mean") or not values(x)[0].is_floating_point():
        raise p.unfit(node, "reduces the divided dimension")
    # Of padding the gradient has to be stopped too, so that it is replaced even if it is zero.
    scale = split.extent(p.tp) / sum(split.blocks) if name == "mean" else 1.0
    return Decision(None, reduce=True, scale=scale, fills={x: 0} if split.padded else {})


def _kept(p: Propagation, node: Node, split: Split, made: Split) -> Decision:
    """The result, or every one of several, is ``made``; its operands are divided by ``split``."""
    fills, held = settle(p, node, split, {}, pointwise=False) if split.padded else ({}, (0,) * len(values(node)))
    several = not isinstance(node.meta["val"], Tensor)
    results = tuple(replace(made, filler=filler) for filler in held)
    return Decision(results if several else results[0], fills=fills)


def along(p: Propagation, node: Node) -> Decision:
    """Ops along one dimension that keep the shape (softmax, cumsum): it must not be the divided one."""
    split = p.subject(node)
    if split.dim in dims_of(p, node, "dim"):
        raise p.unfit(node, "works along the divided dimension")
    return _kept(p, node, split, split)


def norm(p: Propagation, node: Node) -> Decision:
    """layer_norm, rms_norm: the normalised dimensions, the last ones, must be whole."""
    split = p.subject(node)
    count = len(argument(node, "normalized_shape"))
    if split.dim >= len(p.shape(node.args[0])) - count or len(p.divided(node.all_input_nodes)) > 1:
        raise p.unfit(node, "normalises over the divided dimension")
    return _kept(p, node, split, split)


def selection(p: Propagation, node: Node) -> Decision:
    """topk, sort: several results along a dimension that is not the divided one."""
    split = p.subject(node)
    if split.dim == argument(node, "dim") % len(p.shape(node.args[0])):
        raise p.unfit(node, "selects along the divided dimension")
    return _kept(p, node, split, split)
