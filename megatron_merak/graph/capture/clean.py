"""Repairs between a raw trace and the graph that the passes read: flat, without assertions, no-ops and dead code."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.eager_module import DataDependentForward, around_node
from megatron_merak.graph.capture.guards import is_guard, take_guards
from megatron_merak.graph.capture.unlift import Raw, source
from megatron_merak.graph.ir.aliases import changing, is_view, written
from megatron_merak.graph.ir.gradients import passes_gradient
from megatron_merak.graph.ir.inplace import call, out_of_place
from megatron_merak.graph.ir.opaque import CustomFunction

aten = torch.ops.aten
_CHECKS = ("_assert", "sym_constrain_range", "_functional_assert", "_functional_sym_constrain_range")
_COPIES_TO = ("to", "_to_copy", "type_as")
_TRANSPOSED = ("numpy_T", "t", "transpose", "permute", "adjoint", "mT")


def clean(raw: Raw, outputs: Sequence[str], how: str) -> Captured:
    """Raises TraceError for what a graph cannot repeat: a region under autocast, a forward that changes its tables."""
    graph = raw.module.graph
    refuse_dynamic(graph, raw.model)
    _inline_regions(graph, raw.module, raw.model)
    _drop_checks(graph)
    out_of_place(graph)
    guards = take_guards(raw)
    _refuse_state(graph)
    _drop_dead(graph)
    _drop_identities(graph, raw.trainable)
    _use_linear(graph, raw.parameters)
    _drop_dead(graph)
    _sink_views(graph, raw.parameters)
    used = dict.fromkeys(node.target for node in graph.find_nodes(op="get_attr"))
    module = GraphModule({name: _attribute(raw.module, name) for name in used}, graph)
    module.graph.lint()
    held = {n.target: n.meta["val"] for n in module.graph.find_nodes(op="get_attr") if n.target in raw.parameters}
    return Captured(
        module=module,
        outputs=tuple(outputs),
        shapes={name: tuple(value.shape) for name, value in held.items()},
        dtypes={name: value.dtype for name, value in held.items()},
        trainable=frozenset(raw.trainable & held.keys()),
        aliases={name: target for name, target in raw.aliases.items() if target in held},
        buffers=tuple(name for name in raw.buffers if name in used),
        how=how,
        guards=guards,
    )


def _name(node: Node) -> str:
    """ "linear" for aten.linear.default; empty for whatever is no aten operation."""
    target = node.target
    known = node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return target._schema.name.removeprefix("aten::") if known else ""


def _attribute(module: torch.nn.Module, name: str) -> object:
    return operator.attrgetter(name)(module)


def _drop_checks(graph: Graph) -> None:
    """Assertions, and numbers that were taken out of tensors for nothing else."""
    for node in reversed(list(graph.nodes)):
        number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        check = number or (_name(node).startswith(_CHECKS) and not is_guard(node))
        if check and node.op == "call_function" and not node.users:
            graph.erase_node(node)


def refuse_dynamic(graph: Graph, model: str) -> None:
    """A tensor whose shape depends on values, and what vmap leaves behind when it is traced."""
    _drop_checks(graph)
    for node in graph.nodes:
        values = tree_leaves(node.meta.get("val"))
        if any(isinstance(n, torch.SymInt) for v in values for n in (v.shape if isinstance(v, Tensor) else (v,))):
            reason = f"{source(node)} makes a tensor whose shape depends on values, and shapes in a graph are fixed"
            remedy = "Mask what is not wanted instead of selecting the rest"
            raise DataDependentForward(model, reason, remedy, around_node(node))
        if "_batch_dim" in node.name:
            reason = f"{source(node)} uses torch.vmap, which a captured graph cannot hold"
            raise TraceError("model", model, reason, "Write it with broadcasting")


def _inline_regions(graph: Graph, owner: torch.nn.Module, model: str, nested: bool = False) -> None:
    """Replace ``with torch.no_grad()`` regions by what they do, a ``detach`` on what leaves them."""
    for node in list(graph.nodes):
        kind = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, *args = node.args
            assert not (enabled and nested), "the exporter lays regions side by side"
        elif kind == "wrap_with_autocast":
            _, _, enabled, _, body, *args = node.args
            if enabled:
                reason = f"{source(node)} runs under autocast, which later passes would not see"
                raise TraceError("model", model, reason, "Cast where it matters, or use dtype=")
        else:
            continue
        inner = _attribute(owner, body.target)
        no_grad = kind == "wrap_with_set_grad_enabled" and not enabled
        _inline_regions(inner.graph, inner, model, nested or no_grad)
        _inline(graph, node, inner.graph, args, no_grad, model)


def _inline(graph: Graph, node: Node, inner: Graph, args: Sequence[Node], no_grad: bool, model: str) -> None:
    for part, shared in written(inner).items() if no_grad else ():
        if shared[0].op == "placeholder" and "out" not in part.kwargs:  # those: see _refuse_state
            reason = f"{source(part)} writes into a value from outside of torch.no_grad(), so the gradient would change"
            raise TraceError("model", model, reason, "Write into a copy")
    known = dict(zip(inner.find_nodes(op="placeholder"), args, strict=True))
    with graph.inserting_before(node):
        for part in inner.nodes:
            if part.op == "output":
                results = [known.get(x, x) for x in part.args[0]]
            elif part.op != "placeholder":
                assert part.op == "call_function", f"a region of {part.op} nodes"
                known[part] = graph.node_copy(part, known.__getitem__)
        for i, value in enumerate(results if no_grad else ()):
            if isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor) and _itself(value) not in args:
                results[i] = call(graph, value, aten.detach.default, value)
    for user in list(node.users):
        assert user.target is operator.getitem, "the results of a region are read one by one"
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _itself(node: Node) -> Node:
    """Through operations that return the very tensor that they are given, which so keeps its gradient."""
    while isinstance(node, Node) and node.args and isinstance(node.args[0], Node):
        value, source = node.meta["val"], node.args[0].meta.get("val")
        name = _name(node)
        whole = name == "contiguous" and len(node.args) == 1 and not node.kwargs and source.is_contiguous()
        kept = name in ("to", "type_as", "dropout") and _changes_nothing(name, node, copy_matters=True)
        if not (whole or kept) or value.shape != source.shape:
            break
        node = node.args[0]
    return node


def _refuse_state(graph: Graph) -> None:
    """A parameter or buffer that the forward changes; the counter of batch norm, which nothing reads, is dropped."""
    for node in graph.nodes:
        out = node.kwargs.get("out") if isinstance(node.target, torch._ops.OpOverload) else None
        if isinstance(out, Node):
            what, name = ("buffer", out.target) if out.op == "get_attr" else ("tensor", out.name)
            reason = f"{source(node)} writes into it in the forward (out=), and a captured graph keeps no state"
            raise TraceError(what, name, reason, "Leave out=, or for spectral_norm use a plain layer")
    for node, shared in written(graph).items():
        if shared[0].op != "get_attr":
            continue
        if not shared[0].target.endswith("num_batches_tracked"):
            reason = f"{source(node)} changes it in the forward, and a captured graph keeps no state"
            raise TraceError("buffer", shared[0].target, reason, "Keep it constant, or compute it from the batch")
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _drop_dead(graph: Graph) -> None:
    """Erase what nothing reads, random numbers included; a write stays while something later reads its memory."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = written(graph)
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output"):
            continue
        shared = [x for x in writes.get(node, ()) if x is not node]
        if not any(order[user] > order[node] for x in shared for user in x.users):
            writes = {k: [x for x in v if x is not node] for k, v in writes.items()} if writes else writes
            graph.erase_node(node)


def _drop_identities(graph: Graph, trainable: frozenset[str]) -> None:
    """Let readers of a node that changes nothing read its input."""
    shared = changing(graph)
    differentiable: dict[Node, bool] = {}
    for node in list(graph.nodes):
        name = _name(node)
        if node.op == "get_attr":
            differentiable[node] = node.target in trainable
        else:
            differentiable[node] = passes_gradient(node) and any(differentiable[x] for x in node.all_input_nodes)
        if not name or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        if name == "detach":
            same = not differentiable[source]
        else:
            same = _changes_nothing(name, node, copy_matters=node in shared or source in shared)
        if same:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _changes_nothing(name: str, node: Node, copy_matters: bool) -> bool:
    value, source = node.meta["val"], node.args[0].meta["val"]
    if not isinstance(value, Tensor) or not isinstance(source, Tensor):
        return False
    sizes = zip(value.shape, source.shape, strict=False)  # some of them known only when the values are
    same_shape = value.dim() == source.dim() and all(statically_known_true(one == other) for one, other in sizes)
    if name in ("alias", "lift_fresh"):
        return True
    if name == "lift_fresh_copy" or name in _COPIES_TO:
        copies = name in ("lift_fresh_copy", "_to_copy") or _asks_for_copy(node)
        return value.dtype == source.dtype and not (copies and copy_matters)
    if name in ("view", "reshape", "expand", "view_as", "expand_as"):
        return same_shape
    if name == "slice":
        return same_shape and (len(node.args) < 5 or node.args[4] == 1)
    if name == "dropout":
        return node.args[1] == 0.0 or not node.args[2]
    return False


def _asks_for_copy(node: Node) -> bool:
    """Whether it is ``x.to(..., copy=True)``."""
    names = [argument.name for argument in node.target._schema.arguments]
    return ({**dict(zip(names, node.args, strict=False)), **node.kwargs}).get("copy") is True


def _use_linear(graph: Graph, parameters: tuple[str, ...]) -> None:
    """x @ W.T -> linear(x, W)."""
    for node in list(graph.nodes):
        if _name(node) not in ("matmul", "mm") or not isinstance(node.args[1], Node):
            continue
        turned = node.args[1]
        if _name(turned) not in _TRANSPOSED or not isinstance(turned.args[0], Node):
            continue
        weight = turned.args[0]
        dims = turned.args[1] if _name(turned) == "permute" else turned.args[1:]
        if (
            weight.target not in parameters
            or weight.meta["val"].dim() != 2
            or [d % 2 for d in dims] not in ([], [0, 1], [1, 0])
        ):
            continue
        if _name(turned) == "permute" and [d % 2 for d in dims] == [0, 1]:
            continue
        with graph.inserting_before(node):
            linear = call(graph, node, aten.linear.default, node.args[0], weight)
        node.replace_all_uses_with(linear)
        graph.erase_node(node)


def _sink_views(graph: Graph, parameters: tuple[str, ...]) -> None:
    """Give every reader of a view of a parameter its own view, right before it.

    A view made once, early, would otherwise be a value that crosses every border between its readers.
    """
    viewed: dict[Node, None] = {}
    for node in graph.nodes:
        moves = is_view(node) and _name(node) not in ("to", "contiguous")
        moves = moves and not isinstance(node.target, CustomFunction)
        if moves and (node.args[0] in viewed or node.args[0].target in parameters):
            viewed[node] = None
    for node in reversed(list(viewed)):
        for user in list(node.users):
            if user.op == "output":
                continue
            with graph.inserting_before(user):
                own = graph.node_copy(node)
            user.replace_input_with(node, own)
        if not node.users:
            graph.erase_node(node)
