"""Cleans up a raw trace for later passes: flattens it, and removes assertions, no-ops and dead
code.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.eager_module import DataDependentForward, around_node
from megatron_merak.graph.capture.guards import is_guard, take_guards
from megatron_merak.graph.capture.outputs import SAME
from megatron_merak.graph.capture.unlift import RawGraph, source_line
from megatron_merak.graph.ir.aliases import changing, is_view, written
from megatron_merak.graph.ir.gradients import passes_gradient, reached
from megatron_merak.graph.ir.inplace import call, out_of_place
from megatron_merak.graph.ir.opaque import CustomFunction
from megatron_merak.graph.ir.operators import facts

from ..ir.nodes import constant, operand, schema

aten = torch.ops.aten
_CHECKS = (
    "_assert",
    "sym_constrain_range",
    "_functional_assert",
    "_functional_sym_constrain_range",
)


def clean(raw: RawGraph, outputs: Sequence[str], how: str) -> Captured:
    """Clean up a traced graph in place.

    outputs: names of its outputs.
    how:     the attempt that traced it.

    Raises TraceError for what a graph cannot express: a region under autocast, or a forward that
    changes its buffers.
    """
    graph = raw.module.graph
    refuse_dynamic(graph, raw.model)
    _inline_regions(graph, raw.module, raw)
    _drop_checks(graph)
    out_of_place(graph)
    guards = take_guards(raw)
    _refuse_state_changes(graph)
    _drop_dead_code(graph)
    _drop_identities(graph, raw.trainable)
    _use_linear(graph, raw.parameters)
    _drop_dead_code(graph)
    _view_where_read(graph, raw.parameters)
    used = dict.fromkeys(node.target for node in graph.find_nodes(op="get_attr"))
    module = GraphModule({name: _attribute(raw.module, name) for name in used}, graph)
    module.graph.lint()
    parameters = {
        n.target: n.meta["val"]
        for n in module.graph.find_nodes(op="get_attr")
        if n.target in raw.parameters
    }
    trainable = raw.trainable & parameters.keys()
    return Captured(
        module=module,
        outputs=tuple(outputs),
        shapes={name: tuple(value.shape) for name, value in parameters.items()},
        dtypes={name: value.dtype for name, value in parameters.items()},
        trainable=frozenset(trainable),
        untouched=frozenset(trainable - _with_gradient(module.graph, outputs)),
        aliases={name: target for name, target in raw.aliases.items() if target in parameters},
        buffers=tuple(name for name in raw.buffers if name in used),
        how=how,
        guards=guards,
    )


def _with_gradient(graph: Graph, outputs: Sequence[str]) -> set[str]:
    """Return the targets of get_attr nodes that take a gradient of the loss, or without one of any
    output.
    """
    (output,) = graph.find_nodes(op="output")
    pairs = [*zip(outputs, output.args[0], strict=True)]
    losses = [node for name, node in pairs if "loss" in name.split(SAME)]
    results = losses or [node for _, node in pairs]
    return {str(node.target) for node in reached(graph, results) if node.op == "get_attr"}


def _name(node: Node) -> str:
    """Return the name of an aten operation ("linear" for aten.linear.default), "" for any other
    node.
    """
    target = node.target
    if (
        node.op != "call_function"
        or not isinstance(target, torch._ops.OpOverload)
        or target.namespace != "aten"
    ):
        return ""
    return target._schema.name.removeprefix("aten::")


def _attribute(module: torch.nn.Module, name: str) -> object:
    return operator.attrgetter(name)(module)


def _drop_checks(graph: Graph) -> None:
    """Erase assertions, except guards, and numbers read from tensors that nothing else uses."""
    for node in reversed(list(graph.nodes)):
        number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        check = number or (_name(node).startswith(_CHECKS) and not is_guard(node))
        if check and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def refuse_dynamic(graph: Graph, model: str) -> None:
    """Raise an error for a tensor whose shape depends on values, and for what a traced vmap leaves
    in the graph.
    """
    _drop_checks(graph)
    for node in graph.nodes:
        values = tree_leaves(node.meta.get("val"))
        if any(
            isinstance(n, torch.SymInt)
            for v in values
            for n in (v.shape if isinstance(v, Tensor) else (v,))
        ):
            line = source_line(node)
            reason = (
                f"{line} makes a tensor whose shape depends on values, and shapes in a "
                "graph are fixed"
            )
            remedy = "Mask what is not wanted instead of selecting the rest"
            raise DataDependentForward(model, reason, remedy, around_node(node))
        if "_batch_dim" in node.name:
            reason = f"{source_line(node)} uses torch.vmap, which a captured graph cannot contain"
            raise TraceError("model", model, reason, "Write it with broadcasting")


def _inline_regions(
    graph: Graph, owner: torch.nn.Module, raw: RawGraph, nested: bool = False
) -> None:
    """Inline ``with torch.no_grad()`` regions, with a ``detach`` on each value that leaves them."""
    for node in list(graph.nodes):
        kind = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
            assert not (enabled and nested), "the exporter lays regions side by side"
        elif kind == "wrap_with_autocast":
            _, _, enabled, _, body, *args = node.args
            if enabled:
                reason = (
                    f"{source_line(node)} runs under autocast, which later passes would not see"
                )
                raise TraceError("model", raw.model, reason, "Cast where it matters, or use dtype=")
        else:
            continue
        inner = _attribute(owner, body.target)
        assert isinstance(inner, GraphModule)
        no_grad = kind == "wrap_with_set_grad_enabled" and not enabled
        _inline_regions(inner.graph, inner, raw, nested or no_grad)
        _inline(graph, node, inner.graph, args, no_grad=no_grad, raw=raw)


def _inline(
    graph: Graph, node: Node, inner: Graph, args: Sequence[Node], no_grad: bool, raw: RawGraph
) -> None:
    copies = dict(zip(inner.find_nodes(op="placeholder"), args, strict=True))
    writes: set[Node] = set()  # into values from outside
    for part, shared in written(inner).items() if no_grad else ():
        # out= is refused by _refuse_state_changes
        if shared[0].op == "placeholder" and "out" not in part.kwargs:
            if _may_have_gradient(graph, copies[shared[0]], raw):
                line = source_line(part)
                reason = (
                    f"{line} writes into a value from outside of torch.no_grad(), so the "
                    "gradient would change"
                )
                raise TraceError("model", raw.model, reason, "Write into a copy")
            writes.add(part)
    with graph.inserting_before(node):
        for part in inner.nodes:
            if part.op == "output":
                results = [copies.get(x, x) for x in part.args[0]]
            elif part.op != "placeholder":
                assert part.op == "call_function", f"a region of {part.op} nodes"
                copies[part] = graph.node_copy(part, copies.__getitem__)
            if part in writes:
                _detach_sources(graph, copies[part])
        for i, value in enumerate(results if no_grad else ()):
            if (
                isinstance(value, Node)
                and isinstance(value.meta.get("val"), Tensor)
                and _origin(value) not in args
            ):
                results[i] = call(graph, value, aten.detach.default, value)
    for user in list(node.users):
        assert user.target is operator.getitem, "the results of a region are read one by one"
        user.replace_all_uses_with(results[constant(user, 1)])
        graph.erase_node(user)
    graph.erase_node(node)


def _may_have_gradient(graph: Graph, value: Node, raw: RawGraph) -> bool:
    """Whether ``value`` depends on a trainable parameter; True in a region with inputs, which are
    unknown.
    """
    region = graph is not raw.module.graph
    nodes = reached(graph, [value])
    return any(
        each.target in raw.trainable or (region and each.op == "placeholder") for each in nodes
    )


def _detach_sources(graph: Graph, write: Node) -> None:
    """Let an in-place operation of a ``no_grad`` region pass no gradient of what it writes into its
    first argument.

    The written value has none. It is read after the region under its own name, not as one of the
    region's results.
    """

    def detached(source: Node) -> Node:
        if not isinstance(source.meta["val"], Tensor):
            return source
        with graph.inserting_before(write):
            return call(graph, write, aten.detach.default, source)

    write.args = (write.args[0], *map_arg(write.args[1:], detached))
    write.kwargs = map_arg(write.kwargs, detached)


def _origin(node: Node) -> Node:
    """Follow operations that return their input tensor itself, so that its gradient is kept, back
    to that tensor.
    """
    while isinstance(node, Node) and node.args and isinstance(node.args[0], Node):
        value = node.meta["val"]
        source = node.args[0].meta.get("val")
        if not isinstance(source, Tensor):
            break
        name = _name(node)
        unchanged = (
            name == "contiguous"
            and len(node.args) == 1
            and not node.kwargs
            and source.is_contiguous()
        )
        no_op = name in ("to", "type_as", "dropout") and _is_no_op(name, node, copy_matters=True)
        if not (unchanged or no_op) or value.shape != source.shape:
            break
        node = node.args[0]
    return node


def _refuse_state_changes(graph: Graph) -> None:
    """Raise an error if the forward changes a parameter or buffer; drop the unused counter of batch
    norm.
    """
    for node in graph.nodes:
        out = node.kwargs.get("out") if isinstance(node.target, torch._ops.OpOverload) else None
        if isinstance(out, Node):
            what, name = ("buffer", out.target) if out.op == "get_attr" else ("tensor", out.name)
            reason = (
                f"{source_line(node)} writes into it in the forward (out=), and a captured "
                "graph keeps no state"
            )
            raise TraceError(
                what, name, reason, "Leave out=, or for spectral_norm use a plain layer"
            )
    for node, shared in written(graph).items():
        if shared[0].op != "get_attr":
            continue
        buffer = str(shared[0].target)
        if not buffer.endswith("num_batches_tracked"):
            reason = (
                f"{source_line(node)} changes it in the forward, and a captured graph keeps "
                "no state"
            )
            raise TraceError(
                "buffer", buffer, reason, "Keep it constant, or compute it from the batch"
            )
        node.replace_all_uses_with(operand(node))
        graph.erase_node(node)


def _drop_dead_code(graph: Graph) -> None:
    """Erase nodes that nothing reads, random ones too; an in-place write stays if a later node
    reads its memory.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = written(graph)
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        shared = [x for x in writes.get(node, ()) if x is not node]
        if not any(order[user] > order[node] for x in shared for user in x.users):
            writes = (
                {k: [x for x in v if x is not node] for k, v in writes.items()}
                if writes
                else writes
            )
            graph.erase_node(node)


def _drop_identities(graph: Graph, trainable: frozenset[str]) -> None:
    """Erase no-ops; their readers read the input instead."""
    shared = changing(graph)
    differentiable: dict[Node, bool] = {}
    for node in list(graph.nodes):
        name = _name(node)
        if node.op == "get_attr":
            differentiable[node] = node.target in trainable
        else:
            differentiable[node] = passes_gradient(node) and any(
                differentiable[x] for x in node.all_input_nodes
            )
        if not name or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        if name == "detach":
            redundant = not differentiable[source]
        else:
            redundant = _is_no_op(name, node, copy_matters=node in shared or source in shared)
        if redundant:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_no_op(name: str, node: Node, copy_matters: bool) -> bool:
    value = node.meta["val"]
    source = operand(node).meta["val"]
    if not isinstance(value, Tensor) or not isinstance(source, Tensor):
        return False
    sizes = zip(value.shape, source.shape, strict=False)  # some are known only when values are
    same_shape = value.dim() == source.dim() and all(
        statically_known_true(one == other) for one, other in sizes
    )
    if name in ("alias", "lift_fresh"):
        return True
    if name == "lift_fresh_copy" or facts(node).converts:
        copies = name in ("lift_fresh_copy", "_to_copy") or _requests_copy(node)
        return value.dtype == source.dtype and not (copies and copy_matters)
    if facts(node).reshapes:
        return same_shape
    if name == "slice":
        return same_shape and (len(node.args) < 5 or constant(node, 4) == 1)
    if name == "dropout":
        return constant(node, 1) == 0.0 or not constant(node, 2)
    return False


def _requests_copy(node: Node) -> bool:
    """Whether a node is ``x.to(..., copy=True)``."""
    names = [argument.name for argument in schema(node).arguments]
    return ({**dict(zip(names, node.args, strict=False)), **node.kwargs}).get("copy") is True


def _use_linear(graph: Graph, parameters: tuple[str, ...]) -> None:
    """Replace x @ W.T by linear(x, W) for parameters W."""
    for node in list(graph.nodes):
        if _name(node) not in ("matmul", "mm") or not isinstance(node.args[1], Node):
            continue
        transposed = node.args[1]
        if not facts(transposed).transposes or not isinstance(transposed.args[0], Node):
            continue
        weight = transposed.args[0]
        dims: Sequence[int] = (
            constant(transposed, 1)
            if _name(transposed) == "permute"
            else [constant(transposed, k) for k in range(1, len(transposed.args))]
        )
        if (
            weight.target not in parameters
            or weight.meta["val"].dim() != 2
            or [d % 2 for d in dims] not in ([], [0, 1], [1, 0])
        ):
            continue
        if _name(transposed) == "permute" and [d % 2 for d in dims] == [0, 1]:
            continue
        with graph.inserting_before(node):
            linear = call(graph, node, aten.linear.default, node.args[0], weight)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)


def _view_where_read(graph: Graph, parameters: tuple[str, ...]) -> None:
    """Give every reader of a view of a parameter its own view, right before it.

    One shared early view would be a value that crosses every cut between its readers.
    """
    views: dict[Node, None] = {}
    for node in graph.nodes:
        movable = is_view(node) and _name(node) not in ("to", "contiguous")
        movable = movable and not isinstance(node.target, CustomFunction)
        if movable and (node.args[0] in views or node.args[0].target in parameters):
            views[node] = None
    for node in reversed(list(views)):
        for user in list(node.users):
            if user.op == "output":
                continue
            with graph.inserting_before(user):
                view = graph.node_copy(node)
            user.replace_input_with(node, view)
        if not node.users:
            graph.erase_node(node)
