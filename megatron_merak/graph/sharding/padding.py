"""What the padding of divided values holds, found by running each operation on it.

A dimension that does not divide is continued until it does. Two things hold of these entries everywhere: the gradient
that comes back for them is zero, so that the padding of weights stays zero while they are trained; and what they hold
is known (``Split.filler``) or not used. An operation keeps the first if its derivatives there are finite; the second is
followed from value to value. Where an operation needs other padding than there is, as a sum needs zeros and a division
anything else, the padding of its operand is replaced first (``Decision.fills``), which also stops its gradient.
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
from ..ir.nodes import is_random, op_name, values
from .placement import Cut, Filler, Split
from .propagate import Propagation

# What a whole operand may hold that meets every entry of the padding.
_ANY = {"float": (-25.0, -3.7, -0.6, 0.3, 1.9, 7.0), "int": (-7, -2, -1, 1, 3), "bool": (True, False)}


def fillers(p: Propagation, node: Node, cuts: Mapping[Node, Cut]) -> dict[Node, Filler]:
    """What the padding of each padded operand of a node holds; a value that is cut is continued with zeros."""
    found: dict[Node, Filler] = {}
    for x in node.all_input_nodes:
        layout = p.layout(x)
        if layout is not None and layout.padded:
            found[x] = layout.filler
        elif x in cuts and cuts[x].padded:
            found[x] = 0
    return found


def zeros(p: Propagation, node: Node, cuts: Mapping[Node, Cut]) -> dict[Node, Filler]:
    """The fills after which the padding of every operand is zero."""
    return {x: 0 for x, filler in fillers(p, node, cuts).items() if filler is None or filler != 0}


def alike(p: Propagation, node: Node, cuts: Mapping[Node, Cut]) -> tuple[dict[Node, Filler], Filler]:
    """The fills after which the padding of all operands is the same, and what it is then."""
    known = dict.fromkeys(fillers(p, node, cuts).values())
    return (zeros(p, node, cuts), 0) if len(known) > 1 or None in known else ({}, next(iter(known), 0))


def settle(
    p: Propagation, node: Node, split: Split, cuts: Mapping[Node, Cut], pointwise: bool
) -> tuple[dict[Node, Filler], tuple[Filler, ...]]:
    """(fills, what the padding of each result holds then) of a node whose padded operands share the dimension of
    ``split``, counted in the result if ``pointwise``, else in each. Raises Unfit where none gives finite derivatives.
    """
    held = fillers(p, node, cuts)
    if aliased(node)[0] and not aliased(node)[1]:
        return {}, (held[node.args[0]],)
    if is_random(node):
        stays = "dropout" in op_name(node) and "alpha" not in op_name(node)
        return zeros(p, node, cuts), ((0 if stays else None),) * len(values(node))
    for fills in _fills(held):
        made = _run(p, node, split, {**held, **fills}, pointwise)
        if made is None:
            continue
        for x in aliased(node)[1]:
            if x in fills or x in held and made[0] != held[x]:
                raise p.unfit(node, "writes into the padding of a dimension that the ranks do not share evenly", (x,))
        return fills, made
    raise p.unfit(node, "is singular in the padding of a dimension that the ranks do not share evenly")


def _fills(held: Mapping[Node, Filler]) -> Iterator[dict[Node, Filler]]:
    """What to try: as little as possible, then ones where zeros are singular: in one operand, in all."""
    unknown: dict[Node, Filler] = {x: 0 for x, filler in held.items() if filler is None}
    numbers = [x for x in held if values(x)[0].is_floating_point()]
    yield unknown
    yield from ({**unknown, x: 1} for x in numbers)
    yield {**unknown, **dict.fromkeys(numbers, 1)}


def _run(
    p: Propagation, node: Node, split: Split, held: Mapping[Node, Filler], pointwise: bool
) -> tuple[Filler, ...] | None:
    """What a node makes of padding that holds ``held``; None where a gradient of zero does not stay zero."""
    operands = _mixed(node, held) if pointwise else _thin(node, split, held)
    given = {x: t.requires_grad_() if t.is_floating_point() else t for x, t in operands.items()}
    leaves = [x for x in given.values() if x.requires_grad]
    written = aliased(node)[1]
    with torch.enable_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: given[x].clone() if x in written else given[x])
        made = [x for x in tree_leaves(node.target(*args, **kwargs)) if isinstance(x, Tensor)]
    roots = [x for x in made if x.requires_grad]
    if roots:
        grads = torch.autograd.grad(roots, leaves, [torch.zeros_like(x) for x in roots], allow_unused=True)
        if any(grad is not None and grad.any() for grad in grads):
            return None
    return tuple(_constant(x.detach()) for x in made)


def _mixed(node: Node, held: Mapping[Node, Filler]) -> dict[Node, Tensor]:
    """The padding beside every mixture of what the other operands may hold."""
    others = [x for x in node.all_input_nodes if x not in held]
    mixtures = list(product(*(_ANY[_kind(values(x)[0].dtype)] for x in others)))
    columns = dict(zip(others, zip(*mixtures, strict=True), strict=True))
    full = {x: torch.full((len(mixtures),), filler, dtype=values(x)[0].dtype) for x, filler in held.items()}
    return full | {x: torch.tensor(column, dtype=values(x)[0].dtype) for x, column in columns.items()}


def _thin(node: Node, split: Split, held: Mapping[Node, Filler]) -> dict[Node, Tensor]:
    """The padding as one entry of its dimension, beside other operands that hold anything."""
    operands: dict[Node, Tensor] = {}
    for x in node.all_input_nodes:
        value = values(x)[0]
        shape = [1 if x in held and dim == split.dim else extent for dim, extent in enumerate(value.shape)]
        many = torch.tensor(_ANY[_kind(value.dtype)], dtype=value.dtype)
        many = many.repeat(-(-math.prod(shape) // len(many)))[: math.prod(shape)].view(shape)
        operands[x] = torch.full(shape, held[x], dtype=value.dtype) if x in held else many
    return operands


def _kind(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point or dtype.is_complex else "int"


def _constant(x: Tensor) -> Filler:
    """The one finite number in all of a tensor."""
    if x.is_complex() or not x.numel() or not bool((x == x.flatten()[0]).all()) or not bool(x.isfinite().all()):
        return None
    return x.flatten()[0].item()
