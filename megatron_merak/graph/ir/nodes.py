"""Facts about the nodes of a captured graph: values, costs, chance, and what becomes of a node in a cut."""

from collections.abc import Container, Iterator
from math import prod

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from .aliases import mutation_deps, storages, writers
from .opaque import CustomFunction

EMBEDDINGS = ("embedding", "embedding_bag")


def op_name(node: Node) -> str:
    """What a node calls, without overload: "linear" (aten), "namespace.name" (other operators), a function's name; ""
    for a node that calls nothing."""
    if node.op != "call_function":
        return ""
    target = node.target
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__name__", target))
    name = target.overloadpacket.__name__
    return name if target.namespace == "aten" else f"{target.namespace}.{name}"


def is_op(node: object, *names: str) -> bool:
    """Whether ``node`` is a node that calls one of ``names`` (see ``op_name``)."""
    return isinstance(node, Node) and op_name(node) in names


def values(node: Node) -> tuple[torch.Tensor, ...]:
    """The tensors that a node makes: one, those of a tuple or list, or none."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(x for x in value if isinstance(x, torch.Tensor)) if isinstance(value, list | tuple) else ()


def nbytes(node: Node) -> int:
    """Bytes of what a node makes."""
    return sum(value.numel() * value.element_size() for value in values(node))


def flops(node: Node) -> int:
    """Of the matrix products and convolutions in a node's forward, a multiply-add counting two; attention that is
    declared causal counts half of its scores. Everything else counts nothing."""
    if node.op != "call_function":
        return 0
    name = op_name(node)
    if name in _CONTRACTIONS:
        made, shapes = values(node), [_shape(argument) for argument in node.args]
        return _CONTRACTIONS[name](node, made[0].numel(), shapes) if made else 0
    if isinstance(node.target, OpOverload):
        return 0
    if isinstance(node.target, CustomFunction):
        return node.target.flops
    return sum(flops(inner) for graph in _inner_graphs(node) for inner in graph.nodes)


def _shape(argument: object) -> tuple[int, ...]:
    made = values(argument) if isinstance(argument, Node) else ()
    return tuple(made[0].shape) if made else ()


def _inner_graphs(node: Node) -> Iterator[Graph]:
    """The graphs that a higher-order op runs."""
    owner = node.graph.owning_module
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and not values(argument) and owner is not None:
            module = owner.get_submodule(str(argument.target))
            if isinstance(module, GraphModule):
                yield module.graph


def is_causal(attention: Node) -> bool:
    """Whether a scaled_dot_product_attention masks what comes later by itself."""
    return attention.kwargs.get("is_causal", attention.args[5] if len(attention.args) > 5 else False)


def attends_causally(graph: Graph) -> bool:
    """Whether there is attention in a graph, and all of it is causal by itself."""
    found, graphs = [], [graph]
    while graphs:
        for node in graphs.pop().nodes:
            found += [is_causal(node)] * is_op(node, "scaled_dot_product_attention")
            graphs += _inner_graphs(node) if node.op == "call_function" else ()
    return bool(found) and all(found)


def _attention(node: Node, made: int, shapes: list[tuple[int, ...]]) -> int:
    query, key = shapes[0], shapes[1]
    rows = made // (shapes[2][-1] or 1)
    products = 2 * rows * key[-2] * (query[-1] + shapes[2][-1])
    return products // 2 if is_causal(node) else products


def _einsum(node: Node, made: int, shapes: list[tuple[int, ...]]) -> int:
    operands = [values(operand)[0].shape for operand in node.args[1]]
    letters = str(node.args[0]).replace(" ", "").split("->")[0].split(",")
    if "..." in "".join(letters):
        return 2 * made * operands[0][-1]
    extents = {
        letter: n for term, shape in zip(letters, operands, strict=True) for letter, n in zip(term, shape, strict=True)
    }
    return 2 * prod(extents.values())


_CONTRACTIONS = {
    **dict.fromkeys(
        ("linear", "mm", "bmm", "matmul", "mv", "dot", "_grouped_mm", "transformers.grouped_mm_fallback"),
        lambda node, made, shapes: 2 * made * shapes[0][-1],
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), lambda node, made, shapes: 2 * made * shapes[1][-1]),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution"), lambda node, made, shapes: 2 * made * prod(shapes[1][1:])
    ),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        lambda node, made, shapes: 2 * prod(shapes[0]) * prod(shapes[1][1:]),
    ),
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers: dropout with probability 0 or in evaluation does not."""
    target = node.target
    if isinstance(target, CustomFunction):
        return target.random
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = {argument.name: value for argument, value in zip(target._schema.arguments, node.args, strict=False)}
    given = {argument.name: argument.default_value for argument in target._schema.arguments} | given | dict(node.kwargs)
    if given.get("train") is False or given.get("training") is False or given.get("dropout_p") == 0:
        return False
    return not ("dropout" in op_name(node) and given.get("p") == 0)


def classify(graph: Graph, parameters: Container[str]) -> dict[Node, str]:
    """What becomes of every node when the graph is cut.

    - "param": reads one of ``parameters`` (names); "leaf": a placeholder or a constant; "output": the output;
    - "common": no parameter upstream (masks, positions, rotary tables): every stage computes it again;
    - "side": parameters upstream but neither the batch nor chance (a relative position bias);
    - "main": all else. It is computed once, as is whatever draws random numbers, and whatever shares a storage that a
      main node writes to in place, or that changes after a main or side node has read it.
    """
    after, root, written = mutation_deps(graph), storages(graph), writers(graph)
    once: dict[Node, str] = {}  # storages whose nodes must all be main or side
    while True:
        kinds = _classify_once(graph, parameters, after, root, once)
        found = dict(once)
        for storage, nodes in written.items():
            if kinds[storage] in ("common", "side") and "main" in (kinds[x] for x in nodes):
                found[storage] = "main"
            elif kinds[storage] == "common" and "side" in (kinds[x] for x in nodes):
                found[storage] = "side"
            elif kinds[storage] == "common" and _read_before(storage, nodes[-1], root, kinds):
                found[storage] = "main"
        if found == once:
            return kinds
        once = found


def _read_before(storage: Node, writer: Node, root: dict[Node, Node], kinds: dict[Node, str]) -> bool:
    """Whether a main or side node reads a storage that ``writer`` changes later."""
    for node in kinds:
        if node is writer:
            return False
        if kinds[node] in ("main", "side") and any(root[x] is storage for x in node.all_input_nodes):
            return True
    return False


def _classify_once(
    graph: Graph,
    parameters: Container[str],
    after: dict[Node, tuple[Node, ...]],
    root: dict[Node, Node],
    once: dict[Node, str],
) -> dict[Node, str]:
    kinds: dict[Node, str] = {}
    batch: dict[Node, bool] = {}  # whether the batch or chance is upstream
    for node in graph.nodes:
        above = [*node.all_input_nodes, *after.get(node, ())]
        above_kinds = {kinds[x] for x in above}
        batch[node] = node.op == "placeholder" or is_random(node) or any(batch[x] for x in above)
        if node.op == "get_attr":
            kinds[node] = "param" if node.target in parameters else "leaf"
        elif node.op in ("placeholder", "output"):
            kinds[node] = "leaf" if node.op == "placeholder" else "output"
        elif is_random(node) or once.get(root[node]) == "main" or "main" in above_kinds:
            kinds[node] = "main"
        elif once.get(root[node]) == "side" or not above_kinds.isdisjoint(("param", "side")):
            kinds[node] = "main" if batch[node] else "side"
        else:
            kinds[node] = "common"
    return kinds
