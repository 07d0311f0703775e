"""Which linear layers of a captured model compute in fp8, and their nodes in a rank's graph.

As in Megatron-LM those of the layers do: not the output layer, which is outside of them, and no
router. A layer is a member of a list of modules. What is chosen follows from the model alone, so
that every layout computes the same.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Graph, Node

from ... import ops
from ...config.fp8 import Fp8
from ...errors import PlanError
from ...plan import TensorSharding
from ...segment import LayerAxis
from ..capture.captured import Captured
from ..ir.inplace import call as new_node
from ..ir.kinds import NodeKind, kind
from ..ir.marks import copy_in
from ..ir.nodes import constant, is_op, operand, values
from ..ir.operators import flops

FLAG = "--fp8-format"
_PRODUCTS = ("linear", "addmm", "mm", "matmul")
_AT_AN_END = "it is of a first or last layer that is not to"
_SELECTS = ("topk", "sort", "argsort", "argmax")  # what a router does with its logits


@dataclass(frozen=True)
class Fp8Weights:
    """The weights of linear layers that compute in fp8.

    counts:  of each, how many products with it.
    reasons: why the other matrices of layers, and the output layer, do not, by name.
    """

    how: Fp8
    counts: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.counts


def fp8_weights(captured: Captured, model: nn.Module, how: Fp8 | None) -> Fp8Weights | None:
    """Choose the linear layers that compute in fp8; None where none is to.

    Raises PlanError if there is none.
    """
    if how is None:
        return None
    depths = _depths(model)
    graph = captured.module.graph
    routers = _routers(graph)
    counts: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for name, shape in captured.shapes.items():
        if len(shape) > 2 and name in depths:
            reasons[name] = f"it has {len(shape)} dimensions"
    for node in graph.nodes:
        weight = _weight(node)
        name = "" if weight is None else str(weight.target)
        if name not in captured.shapes:
            continue
        reasons.setdefault(name, _reason(captured.shapes[name], depths.get(name), how))
        if node in routers:
            reasons[name] = "it is a router"
        counts[name] += 1
    chosen = {name: counts[name] for name in counts if not reasons[name]}
    if not chosen:
        raise _nothing_computes(how, {name: reasons[name] for name in counts}, depths)
    return Fp8Weights(how, chosen, {name: why for name, why in reasons.items() if why})


def _nothing_computes(how: Fp8, reasons: Mapping[str, str], listed: Container[str]) -> PlanError:
    """Return the error for a model of whose linear layers none computes in fp8, each for a reason.

    listed: parameters in lists of modules.
    """
    reason = "no linear layer of the model computes in fp8"
    name = next((name for name in reasons if name in listed), None)
    if name is None:
        return PlanError(
            FLAG, how.format, f"{reason}: none is in a list of modules", "Leave it out"
        )
    remedy = "Leave it out"
    if _AT_AN_END in reasons.values():
        remedy = "Leave it out, or leave fewer layers in bf16 (--first-last-layers-bf16)"
    return PlanError(FLAG, how.format, f"{reason}, as not {name}: {reasons[name]}", remedy)


def _reason(shape: tuple[int, ...], depth: tuple[int, int] | None, how: Fp8) -> str:
    """Return why a matrix is not multiplied in fp8, as far as its place and its shape say; "" else.

    depth: of ``_depths``; None: it is in no list of modules.
    """
    if depth is None:
        return "it is outside of the layers"
    place, count = depth
    first, last = how.bf16_layers
    if place < first or place >= count - last:
        return _AT_AN_END
    if any(extent % ops.MULTIPLE for extent in shape):
        return f"a side of {shape[0]} x {shape[1]} is not a multiple of {ops.MULTIPLE}"
    return ""


def _depths(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return, for each parameter in a list of modules, its index in the outermost one and how long
    that is.
    """
    found: dict[str, tuple[int, int]] = {}
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    for name, _ in model.named_parameters(remove_duplicate=False):
        steps = name.split(".")
        for end in range(len(steps) - 1):
            count = lists.get(".".join(steps[:end]))
            if count is not None:
                found[name] = int(steps[end]), count
                break
    return found


def _routers(graph: Graph) -> set[Node]:
    """Return the products from which experts are selected, with nothing but pointwise work between."""
    found: set[Node] = set()
    seen: set[Node] = set()
    pending = [node for node in graph.nodes if is_op(node, *_SELECTS)]
    while pending:
        node = pending.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if flops(node):
            found.add(node)
        else:
            pending += node.all_input_nodes
    return found


def _weight(node: Node) -> Node | None:
    """Return the parameter or constant that a node multiplies, if it is a matrix as it is stored."""
    if node.kwargs or not is_op(node, *_PRODUCTS):
        return None
    weight = constant(node, 2 if is_op(node, "addmm") else 1)
    while isinstance(weight, Node) and weight.target is copy_in:
        weight = operand(weight)
    if not isinstance(weight, Node) or weight.op != "get_attr" or len(values(weight)) != 1:
        return None
    return weight if values(weight)[0].dim() == 2 else None


def in_fp8(node: Node, weights: Fp8Weights | None) -> bool:
    """Whether a linear layer of a graph is to compute in fp8."""
    weight = None if weights is None else _weight(node)
    return weights is not None and weight is not None and str(weight.target) in weights


def fp8_work(nodes: Iterable[Node], weights: Fp8Weights | None) -> tuple[int, tuple[int, int]]:
    """Return the FLOPs of the products that are to be of fp8 operands, and how many values of these
    are rounded in (forward, backward). nodes: before they are fused.

    Blockwise, an input and its gradient are rounded in two ways.
    """
    work = 0
    forward = 0
    backward = 0
    ways = 1 if weights is None or weights.how.recipe == "tensorwise" else 2
    for node in nodes:
        if in_fp8(node, weights):
            weight = _weight(node)
            assert weight is not None
            matrix = values(weight)[0].numel()
            work += flops(node)
            rows = values(node)[0].numel() // values(node)[0].shape[-1]
            forward += matrix + ways * flops(node) // (2 * values(node)[0].shape[-1])
            backward += matrix + ways * rows * values(node)[0].shape[-1]
    return work, (forward, backward)


def to_fp8(graph: Graph, weights: Fp8Weights) -> int:
    """Replace linear layers by those of fp8 operands, in place; return how many weights these have."""
    count = 0
    for node in list(graph.nodes):
        if node.target is ops.linears and str(constant(node, 1)[0].target) in weights:
            count += len(constant(node, 1))
            arguments = node.args[:3]  # no fp8 results are views of one product
            _replace(graph, node, ops.fp8_linears, *arguments, weights=weights, transposed=False)
        elif in_fp8(node, weights):
            count += 1
            _lower(graph, node, weights)
    return count


def _lower(graph: Graph, node: Node, weights: Fp8Weights) -> None:
    places = (1, 2, 0) if is_op(node, "addmm") else (0, 1, 2)
    arguments = [node.args[place] if place < len(node.args) else None for place in places]
    transposed = not is_op(node, "linear")
    _replace(graph, node, ops.fp8_linear, *arguments, weights=weights, transposed=transposed)


def _replace(
    graph: Graph,
    node: Node,
    operation: Callable,
    *arguments: object,
    weights: Fp8Weights,
    transposed: bool,
) -> None:
    how = weights.how
    shared = kind(node, LayerAxis.TP) is not NodeKind.FULL
    with graph.inserting_before(node):
        new = new_node(
            graph,
            node,
            operation,
            *arguments,
            form=how.format,
            recipe=how.recipe,
            shared=shared,
            transposed=transposed,
        )
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def check_shards(
    graph: Graph, weights: Fp8Weights, shardings: Mapping[str, TensorSharding], tp: int
) -> None:
    """Raise PlanError for a layer that ranks cannot compute as one process does. graph: a rank's,
    before it is fused.
    """
    found: Counter[str] = Counter()
    for node in graph.nodes:
        weight = _weight(node)
        if weight is None or str(weight.target) not in weights:
            continue
        name = str(weight.target)
        found[name] += 1
        if weights.how.recipe == "blockwise" and kind(node, LayerAxis.TP) is NodeKind.PARTS:
            reason = (
                f"{name} computes on parts of sequences, which cut blocks of {ops.BLOCK} tokens"
            )
            raise _refused(reason, tp, "Use --fp8-recipe tensorwise, or leave it out")
    for name, count in weights.counts.items():
        if found[name] != count:
            reason = f"the product with {name} is computed in another way where ranks divide it"
            raise _refused(
                reason, tp, "Use --tensor-model-parallel-size 1, or replicate the weight"
            )
        _check_cuts(shardings[name], weights.how, tp)


def _check_cuts(tensor: TensorSharding, how: Fp8, tp: int) -> None:
    if tensor.dim is None or tp == 1:
        return
    if tensor.experts or tensor.padded is not None:
        what = "its experts are divided" if tensor.experts else "its features are padded"
        raise _refused(f"{tensor.name}: {what}", tp, "Use a degree that divides its features")
    cuts = [edge for rank in range(tp) for pair in tensor.intervals(rank, tp) for edge in pair]
    extents = (*cuts, tensor.shape[tensor.dim])
    if how.recipe == "blockwise" and any(edge % ops.BLOCK for edge in extents):
        reason = f"{tensor.name} is cut inside of blocks of {ops.BLOCK} x {ops.BLOCK}"
        remedy = "Use --fp8-recipe tensorwise, or a smaller degree"
        raise _refused(reason, tp, remedy)


def _refused(reason: str, tp: int, remedy: str) -> PlanError:
    return PlanError("--tensor-model-parallel-size", tp, f"with fp8: {reason}", remedy)
