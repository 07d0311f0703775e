"""Converts an exported program to a graph with parameters and constants as get_attr nodes, named as
in the model.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.empty import is_fake


@dataclass(frozen=True, eq=False)
class RawGraph:
    """A traced graph before ``clean``.

    model:      name of the model's class.
    parameters: names of the parameters that the graph reads.
    trainable:  names of the model's parameters that require a gradient.
    aliases:    other names of tied parameters -> the first name.
    buffers:    names of the constants that are buffers in the state dict.
    """

    model: str
    module: GraphModule
    parameters: tuple[str, ...]
    trainable: frozenset[str]
    aliases: dict[str, str]
    buffers: tuple[str, ...]


def unlift(program: ExportedProgram, model: nn.Module) -> RawGraph:
    """Convert an exported program of ``model``. Raises TraceError for a constant that has no
    values.
    """
    owner = program.graph_module
    graph = program.graph_module.graph
    _note_readers(graph)
    values = {}
    first = {id(p): name for name, p in model.named_parameters()}
    canonical = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    nodes: dict[str, Node] = {}
    buffers: dict[str, None] = {}
    keys = iter(program.call_spec.in_spec.child(1).context)
    for node, spec in zip(
        graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True
    ):
        if spec.kind == InputKind.USER_INPUT:
            key = next(keys)
            if isinstance(node.meta["val"], Tensor):
                node.target = key
                node._rename(key)
            else:
                assert not node.users, "a value of the batch that is no tensor is part of the graph"
                graph.erase_node(node)
            continue
        if spec.kind == InputKind.BUFFER and not node.users:
            graph.erase_node(node)
            continue
        name = canonical[spec.target] if spec.kind == InputKind.PARAMETER else spec.target
        if name not in nodes:
            with graph.inserting_before(node):
                nodes[name] = graph.create_node("get_attr", name)
            value = (
                node.meta["val"]
                if spec.kind == InputKind.PARAMETER
                else _constant(program, model, name, node)
            )
            nodes[name].meta["val"] = values[name] = value
            if spec.kind == InputKind.BUFFER and spec.persistent:
                buffers[name] = None
        node.replace_all_uses_with(nodes[name])
        graph.erase_node(node)
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in values:
            values[node.target] = owner.get_submodule(node.target)
    module = GraphModule(values, graph)
    parameters = tuple(name for name in nodes if name in first.values())
    return RawGraph(
        type(model).__name__,
        module,
        parameters,
        frozenset(name for name, p in model.named_parameters() if p.requires_grad),
        aliases={name: target for name, target in canonical.items() if name != target},
        buffers=tuple(buffers),
    )


def _note_readers(graph: Graph) -> None:
    """Let every node know all of its readers. The exporter loses some, which nothing else reads, of
    a value that enters a region without gradients.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def source_line(node: Node) -> str:
    """Return the line of the model's code that a node, or one of its readers, comes from."""
    traces = [n.meta["stack_trace"] for n in (node, *node.users) if n.meta.get("stack_trace")]
    if not traces:
        return node.name
    *_, location, code = traces[0].strip().splitlines()
    return f"{location.strip()}: {code.strip()}"


def _constant(program: ExportedProgram, model: nn.Module, name: str, node: Node) -> Tensor:
    value = dict(model.named_buffers(remove_duplicate=False)).get(name)
    if value is not None and is_fake(value):
        reason = (
            "it has no values (it was made on device 'meta' or from a parameter), and they "
            "are part of the model"
        )
        raise TraceError(
            "buffer",
            name,
            reason,
            "Build the model under init_empty_weights(), or with its weights",
        )
    value = program.constants[name] if value is None else value
    if is_fake(value):
        line = source_line(node)
        # what only autograd reads comes from no line of the model's
        if line == node.name or "grad(" in line:
            reason = (
                "its forward or loss calls torch.autograd.grad, which reads values from "
                "outside of the graph"
            )
            remedy = (
                "Compute this gradient with differentiable operations, without torch.autograd.grad"
            )
            raise TraceError("model", type(model).__name__, reason, remedy)
        reason = (
            f"{line} uses the values of a parameter apart from its gradient (.data, or a "
            "copy of it)"
        )
        raise TraceError(
            "model", type(model).__name__, reason, "Use the parameter itself, or a buffer"
        )
    return value.detach().cpu()
