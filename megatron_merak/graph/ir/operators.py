"""What passes know of operators: one table, a row per kind of operator. Sharding rules, and the
operations of ``ops``, have tables of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ... import ops
from .nodes import constant, is_op, op_name, values
from .opaque import CustomFunction

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """What is known of an operator, whatever its overload.

    flops:           of a forward, a multiply-add counting as two, from the node, the number of
                     elements of its first result and the shapes of its arguments. None: nothing
                     that counts.
    linear:          linear in its first argument, the only one that takes a gradient.
    result_unread:   no backward reads the result.
    stops_gradient:  no gradient flows back, although the result has a floating-point dtype.
    one_dtype:       operands are not promoted: their dtypes must be equal.
    converts:        changes the dtype and nothing else.
    reshapes:        changes the shape and nothing else, if that.
    transposes:      swaps dimensions, of a matrix always the two.
    normalizes:      a norm, which takes fp32 weights beside operands of less precision.
    drops:           a dropout: the identity if nothing is dropped.
    attends:         attention.
    looks_up:        rows of a table, by index.
    like:            the argument of which only shape and dtype matter; None: there is none.
    """

    flops: Callable[[Node, int, list[Shape]], int] | None = None
    linear: bool = False
    result_unread: bool = False
    stops_gradient: bool = False
    one_dtype: bool = False
    converts: bool = False
    reshapes: bool = False
    transposes: bool = False
    normalizes: bool = False
    drops: bool = False
    attends: bool = False
    looks_up: bool = False
    like: int | None = None


def facts(node: Node) -> Operator:
    """Return what is known of the operator, or of the operation of ``ops``, that a node calls."""
    known = _OPERATIONS.get(node.target)
    return facts_named(op_name(node)) if known is None else known


def facts_named(name: str) -> Operator:
    """Return what is known of an operator, by its name as of ``op_name``."""
    return OPERATORS.get(name, _OTHER)


def flops(node: Node) -> int:
    """Return the FLOPs of the matrix products and convolutions in a node's forward; a multiply-add
    counts as two.

    Attention with ``is_causal`` counts half. All other operations count as zero.
    """
    if node.op != "call_function":
        return 0
    count = facts(node).flops
    if count is not None:
        results = values(node)
        shapes = [_shape(argument) for argument in node.args]
        work = count(node, results[0].numel(), shapes) if results else 0
        return round(work * filled(node))
    if isinstance(node.target, OpOverload):
        return 0
    if isinstance(node.target, CustomFunction):
        return node.target.flops
    return sum(flops(inner) for graph in _inner_graphs(node) for inner in graph.nodes)


def filled(node: Node) -> float:
    """Return the share of the rows of a product of experts that there are: behind them is room, see
    ``lowering.experts``.
    """
    return node.meta.get("filled", 1.0)


def is_causal(attention: Node) -> bool:
    """Whether a scaled_dot_product_attention is called with ``is_causal``."""
    given: Any = attention.args[5] if len(attention.args) > 5 else False
    return bool(attention.kwargs.get("is_causal", given))


def attends_causally(graph: Graph) -> bool:
    """Whether a graph contains attention, and all of it is called with ``is_causal``."""
    causal = []
    pending = [graph]
    while pending:
        for node in pending.pop().nodes:
            if is_op(node, "scaled_dot_product_attention"):
                causal.append(is_causal(node))
            pending += _inner_graphs(node) if node.op == "call_function" else ()
    return bool(causal) and all(causal)


def _shape(argument: object) -> Shape:
    tensors = values(argument) if isinstance(argument, Node) else ()
    return tuple(tensors[0].shape) if tensors else ()


def _inner_graphs(node: Node) -> Iterator[Graph]:
    """Yield the graphs that a higher-order op runs."""
    owner = node.graph.owning_module
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and not values(argument) and owner is not None:
            module = owner.get_submodule(str(argument.target))
            if isinstance(module, GraphModule):
                yield module.graph


def _product(node: Node, numel: int, shapes: list[Shape]) -> int:
    return 2 * numel * shapes[0][-1]


def _added_product(node: Node, numel: int, shapes: list[Shape]) -> int:
    return 2 * numel * shapes[1][-1]


def _convolution(node: Node, numel: int, shapes: list[Shape]) -> int:
    return 2 * numel * prod(shapes[1][1:])


def _transposed_convolution(node: Node, numel: int, shapes: list[Shape]) -> int:
    return 2 * prod(shapes[0]) * prod(shapes[1][1:])


def _attention(node: Node, numel: int, shapes: list[Shape]) -> int:
    query = shapes[0]
    key = shapes[1]
    rows = numel // (shapes[2][-1] or 1)
    products = 2 * rows * key[-2] * (query[-1] + shapes[2][-1])
    return products // 2 if is_causal(node) else products


def _einsum(node: Node, numel: int, shapes: list[Shape]) -> int:
    operands = [values(x)[0].shape for x in constant(node, 1)]
    letters = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    if "..." in "".join(letters):
        return 2 * numel * operands[0][-1]
    extents = {
        letter: n
        for term, shape in zip(letters, operands, strict=True)
        for letter, n in zip(term, shape, strict=True)
    }
    return 2 * prod(extents.values())


_OTHER = Operator()
_ROWS = (
    # matrix products and convolutions
    ("linear mm bmm matmul", Operator(_product, one_dtype=True, result_unread=True)),
    ("mv dot", Operator(_product, one_dtype=True)),
    ("_grouped_mm transformers.grouped_mm_fallback", Operator(_product, result_unread=True)),
    ("addmm baddbmm", Operator(_added_product, one_dtype=True, result_unread=True)),
    ("addbmm addmv", Operator(_added_product, one_dtype=True)),
    ("bilinear tensordot inner outer chain_matmul", Operator(one_dtype=True)),
    ("einsum", Operator(_einsum, one_dtype=True)),
    ("conv1d conv2d conv3d convolution", Operator(_convolution, one_dtype=True)),
    (
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        Operator(_transposed_convolution, one_dtype=True),
    ),
    ("scaled_dot_product_attention", Operator(_attention, one_dtype=True, attends=True)),
    # tables
    ("embedding", Operator(looks_up=True, result_unread=True)),
    ("embedding_bag", Operator(looks_up=True)),
    # shape, position and dtype
    ("view reshape", Operator(linear=True, reshapes=True)),
    ("expand", Operator(linear=True, reshapes=True)),
    ("view_as expand_as", Operator(reshapes=True, like=1)),
    ("reshape_as", Operator(like=1)),
    ("flatten unflatten unsqueeze squeeze contiguous clone alias", Operator(linear=True)),
    ("index index_select slice select", Operator(linear=True)),
    ("transpose permute", Operator(linear=True, transposes=True)),
    ("t numpy_T mT adjoint", Operator(transposes=True)),
    ("to", Operator(linear=True, converts=True)),
    ("_to_copy", Operator(converts=True)),
    ("type_as", Operator(converts=True, like=1)),
    # sums
    ("sum", Operator(linear=True, result_unread=True)),
    ("add embed_in_zeros", Operator(result_unread=True)),
    # values that are not those of the argument
    ("detach rand_like randn_like", Operator(stops_gradient=True)),
    ("zeros_like ones_like full_like empty_like", Operator(stops_gradient=True, like=0)),
    ("new_zeros new_ones new_full new_empty", Operator(stops_gradient=True, like=0)),
    ("dropout feature_dropout alpha_dropout feature_alpha_dropout", Operator(drops=True)),
    # others that take one dtype, or two
    ("index_add scatter scatter_add masked_scatter index_put prelu lerp", Operator(one_dtype=True)),
    (
        "layer_norm native_layer_norm group_norm native_group_norm batch_norm",
        Operator(normalizes=True),
    ),
)
OPERATORS = {name: row for names, row in _ROWS for name in names.split()}


def _scored(row: ops.Operation) -> Operator:
    """Return what an operation of ``ops`` is as an operator."""
    scores = row.scores
    if scores is None:
        return Operator(result_unread=row.result_unread)

    def count(node: Node, numel: int, shapes: list[Shape]) -> int:
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        return scores(*args, **kwargs).flops

    return Operator(flops=count, attends=True, result_unread=row.result_unread)


_OPERATIONS = {operation: _scored(row) for operation, row in ops.OPERATIONS.items()}
