"""Groups of pointwise operations that no other fusion took become one node each, where that moves
fewer bytes.

A group is what lies between two operations of another kind, inside one segment:

    product | scale, tanh, scale, add a mask, softmax, to bf16 | product
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..ir.aliases import is_view
from ..ir.bundle import Bundle, backward_operations, is_free, moved_bytes, tensor_bytes
from ..ir.kinds import NodeKind, kinds
from ..ir.nodes import is_random, op_name, values
from ..ir.operators import facts
from ..lowering.flow import Flow
from ..lowering.levels import segment_levels
from ..lowering.rewrite import Rewritten

LEAST = 1 << 20  # bytes that a group must save in a micro-batch: a call costs the host some 40 us
SHARE = 0.8  # most of the bytes of separate operations that may be left

# Reductions of the last dimension, of which a row stays in a cache.
_ROWWISE = frozenset("softmax _softmax mean sum amax amin logsumexp".split())
# Copies, which are pointwise of parts.
_COPIES = frozenset("clone contiguous cat stack reshape constant_pad_nd".split())

# Meta of nodes whose segment follows from more than what they read.
_PLACED = ("apart", "moves", "behind", "late")

Known = dict[object, Bundle]


def bundle(
    rewritten: Rewritten, known: Known | None = None, least: int = LEAST
) -> tuple[Bundle, ...]:
    """Replace groups of pointwise operations of a rewritten graph in place; return their bundles,
    each once.

    Every rank does so in all units, of which it may run a few: what crosses between stages then has
    one order and one name.

    known: bundles by what they compute, to be used again and added to.
    least: bytes that a group must save.
    """
    flow = Flow(rewritten)
    known = {} if known is None else known
    found = []
    for unit in dict.fromkeys(flow.unit.values()):
        for nodes in _groups(flow, unit):
            made = _made(nodes, flow, known)
            if made is not None and _pays(made, least):
                found.append((nodes, made))
    replaced: dict[Bundle, None] = {}
    for nodes, made in found:
        if not _late(nodes):  # of groups before it, whose results come later in the graph now
            _replace(rewritten.graph, nodes, made)
            replaced[made] = None
    rewritten.graph.lint()
    return tuple(replaced)


# ---- which nodes ---------------------------------------------------------------------------------
def _groups(flow: Flow, unit: int) -> Iterator[list[Node]]:
    """Yield groups of nodes, in graph order, that may be computed at once."""
    levels = segment_levels(flow, unit)
    segments: dict[tuple[int, tuple[NodeKind, ...]], list[Node]] = {}
    for node in (x for x in flow.unit if x in levels):
        segments.setdefault((levels[node], kinds(node)), []).append(node)
    for nodes in segments.values():
        allowed = {node for node in nodes if _is_allowed(node, flow)}
        while True:
            groups = _connected(nodes, allowed)
            misplaced = {node for group in groups for node in _misplaced(group, flow)}
            if not misplaced:
                break
            allowed -= misplaced
        yield from (group for group in groups if sum(not is_free(x) for x in group) > 1)


def _is_allowed(node: Node, flow: Flow) -> bool:
    """Whether a node may be in a group."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_random(node):
        return False
    if any(node.meta.get(key, False) for key in _PLACED):
        return False
    if any(
        x in flow.written or not isinstance(x.meta.get("val"), Tensor) for x in _with_inputs(node)
    ):
        return False
    if any(x.dtype.is_complex for x in values(node)):
        return False
    name = op_name(node)
    if name in _ROWWISE:
        return _is_rowwise(node)
    known = name in _COPIES or facts(node).converts or torch.Tag.pointwise in target.tags
    return (known or is_view(node)) and not facts(node).stops_gradient


def _with_inputs(node: Node) -> tuple[Node, ...]:
    return (node, *node.all_input_nodes)


def _is_rowwise(node: Node) -> bool:
    """Whether a reduction is of the last dimension alone."""
    dims: Any = node.args[1] if len(node.args) > 1 else None
    (first,) = node.all_input_nodes
    last = values(first)[0].dim() - 1
    given = dims if isinstance(dims, list | tuple) else [dims]
    return len(given) == 1 and isinstance(given[0], int) and given[0] % (last + 1) == last


def _connected(nodes: Sequence[Node], allowed: set[Node]) -> list[list[Node]]:
    """Return the connected groups of allowed nodes between which no path leads through another node
    of the segment.

    depth: the number of alternations on the longest path to a node.
    """
    depth: dict[Node, int] = {}
    for node in nodes:
        inputs = [x for x in node.all_input_nodes if x in depth]
        ahead = [depth[x] + (x in allowed and node not in allowed) for x in inputs]
        depth[node] = max(ahead, default=0)
    _delay(nodes, allowed, depth)
    group_of: dict[Node, list[Node]] = {}
    for node in nodes:
        if node not in allowed:
            continue
        group = [node]
        group_of[node] = group
        for x in node.all_input_nodes:
            if x in allowed and depth.get(x) == depth[node] and group_of[x] is not group:
                joined = group_of[x]
                joined += group
                for each in group:
                    group_of[each] = joined
                group = joined
    order = {node: place for place, node in enumerate(nodes)}
    groups = {id(group): group for group in group_of.values()}
    return [sorted(group, key=order.__getitem__) for group in groups.values()]


def _delay(nodes: Sequence[Node], allowed: set[Node], depth: dict[Node, int]) -> None:
    """Let what only later groups read, such as ``1 + weight``, be computed with these."""
    for node in reversed(nodes):
        users = list(node.users)
        if node in allowed and users and all(user in allowed and user in depth for user in users):
            depth[node] = max(depth[node], min(depth[user] for user in users))


def _misplaced(group: Sequence[Node], flow: Flow) -> list[Node]:
    """Return nodes of a group that must not be in one: views at its ends, which are free outside,
    and results that take no gradient although others do.
    """
    inside = set(group)
    found = []
    trains = any(flow.differentiable[flow.resolve(x)] for x in _inputs(group))
    for node in group:
        leaves = node in flow.outputs or any(user not in inside for user in node.users)
        begins = not any(x in inside for x in node.all_input_nodes)
        if is_free(node) and (leaves or begins):
            found.append(node)
        elif leaves and trains and values(node)[0].is_floating_point():
            if not flow.differentiable[node]:
                found.append(node)
    return found or _late(group)


def _late(group: Sequence[Node]) -> list[Node]:
    """Return nodes of a group that others read before all that the group reads is computed."""
    inside = set(group)
    last = max(_inputs(group), default=group[0])
    early = [
        node for node in group if any(user not in inside and user < last for user in node.users)
    ]
    return early


def _inputs(group: Sequence[Node]) -> list[Node]:
    """Return what a group reads, in the order in which it does."""
    inside = set(group)
    return list(dict.fromkeys(x for node in group for x in node.all_input_nodes if x not in inside))


def _results(group: Sequence[Node], outputs: Iterable[Node] = ()) -> list[Node]:
    """Return the nodes of a group that others read."""
    inside = set(group)
    returned = set(outputs)
    return [
        node for node in group if node in returned or any(user not in inside for user in node.users)
    ]


# ---- what they become ----------------------------------------------------------------------------
def _made(group: Sequence[Node], flow: Flow, known: Known) -> Bundle | None:
    """Return the bundle of a group: one of ``known``, or a new one that is added to them."""
    inputs = _inputs(group)
    results = _results(group, flow.outputs)
    if not inputs or not results:
        return None
    trained = [
        place
        for place, x in enumerate(inputs)
        if flow.differentiable[flow.resolve(x)] and values(x)[0].is_floating_point()
    ]
    if not any(flow.differentiable[node] for node in results):
        trained = []
    key = _key(group, inputs, results, trained=trained)
    if key not in known:
        known[key] = Bundle(_code(group, inputs, results), [values(x)[0] for x in inputs], trained)
    return known[key]


def _key(
    group: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node], trained: Sequence[int]
) -> object:
    """Return what is equal for groups that compute the same."""
    # not the number alone, which a literal argument may be, too
    name = {node: f"%{place}" for place, node in enumerate((*inputs, *group))}
    examples = [(tuple(x.shape), x.stride(), x.dtype) for node in inputs for x in values(node)]
    calls = [
        (node.target, repr(map_arg((node.args, node.kwargs), name.__getitem__))) for node in group
    ]
    return (*examples, *calls, *(name[node] for node in results), tuple(trained))


def _code(group: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    graph = Graph()
    copied: dict[Node, Node] = {node: graph.placeholder(f"x_{i}") for i, node in enumerate(inputs)}
    for node in (*inputs, *group):
        if node not in copied:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            # A fused operation may return other strides than the one that was captured.
            if node.target is torch.ops.aten.view.default:
                copied[node].target = torch.ops.aten.reshape.default
        copied[node].meta = {"val": node.meta["val"]}
    graph.output(tuple(copied[node] for node in results))
    return GraphModule({}, graph)


def _pays(made: Bundle, least: int) -> bool:
    before, after = traffic(made)
    return before - after >= least and after <= SHARE * before


def traffic(made: Bundle) -> tuple[int, int]:
    """Return the bytes that a bundle's operations read and write one by one, forward and backward,
    and those that it does compiled: its inputs and results, and their gradients.
    """
    inputs = tensor_bytes(made.examples)
    before = moved_bytes(made.forward.graph)
    after = inputs + tensor_bytes(made.results)
    if made.backward is not None:
        before += moved_bytes(made.backward.graph, backward_operations(made))
        flows = zip(made.results, made.differentiable, strict=True)
        grads = tensor_bytes([x for x, differentiable in flows if differentiable])
        after += inputs + grads + tensor_bytes([made.examples[place] for place in made.trained])
    return before, after


def _replace(graph: Graph, group: Sequence[Node], made: Bundle) -> None:
    inputs = _inputs(group)
    results = _results(group, graph.output_node().all_input_nodes)
    vals: Mapping[Node, Any] = {node: node.meta["val"] for node in results}
    last = max(inputs)
    with graph.inserting_after(max(last, group[0])):
        call = graph.call_function(made, tuple(inputs))
    call.meta = {key: each for key, each in group[-1].meta.items() if key != "tensor_meta"}
    call.meta["val"] = tuple(vals.values()) if len(results) > 1 else vals[results[0]]
    replacements = [call]
    if len(results) > 1:
        place = call
        replacements = []
        for index, node in enumerate(results):
            with graph.inserting_after(place):
                place = graph.call_function(operator.getitem, (call, index))
            place.meta = {key: each for key, each in node.meta.items() if key != "tensor_meta"}
            replacements.append(place)
    for node, replacement in zip(results, replacements, strict=True):
        node.replace_all_uses_with(replacement)
    for node in reversed(group):
        graph.erase_node(node)
    for node, replacement in zip(results, replacements, strict=True):
        replacement.name = node.name
