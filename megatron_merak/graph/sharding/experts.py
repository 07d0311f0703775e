"""Which parameters are weights of experts: those that grouped products multiply rows with."""

from collections.abc import Mapping

from torch.fx import Graph, Node

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..ir.names import place
from ..ir.nodes import op_name, operand, values
from .rules_value import argument

GROUPED = ("_grouped_mm", "transformers.grouped_mm_fallback")
DIVIDED = "expert parallel: each rank has some of the experts"
_AS_THEY_ARE = ("to", "_to_copy", "detach", "alias", "clone", "contiguous")
_ALONG_A_DIM = ("chunk", "split", "slice", "select", "split_with_sizes")
_SETTING = "--expert-model-parallel-size"


def weight_of(product: Node) -> str:
    """Return the name of the parameter that a grouped product multiplies with, or with a view of."""
    weight = operand(product, 1)
    while weight.op == "call_function":
        weight = operand(weight)
    return str(weight.target)


def divided_experts(
    graph: Graph, tensors: Mapping[str, TensorSharding], ranks: int
) -> dict[str, TensorSharding]:
    """Return the weights of experts that ``ranks`` ranks divide, as they are then sharded.

    tensors: how other ranks shard all parameters.

    Raises PlanError without any, and for weights whose experts cannot be divided.
    """
    found: dict[str, TensorSharding] = {}
    for product in graph.nodes:
        if op_name(product) not in GROUPED:
            continue
        name = weight_of(product)
        if name not in tensors:
            reason = f"the weight of {op_name(product)} in {place(product)} is no parameter"
            raise PlanError(_SETTING, ranks, reason, "Use 1")
        shape = tensors[name].shape
        if shape[0] % ranks:
            reason = f"it does not divide the {shape[0]} experts of {name}"
            raise PlanError(_SETTING, ranks, reason, "Use a size that does, or 1")
        found[name] = TensorSharding(name, shape, 0, experts=True)
    if not found:
        reason = "the model has no grouped product of experts"
        raise PlanError(_SETTING, ranks, reason, "Use 1")
    for node in graph.find_nodes(op="get_attr"):
        if node.target in found:
            _check_views(node, ranks)
    return found


def views_of(weight: Node) -> list[Node]:
    """Return the nodes that are views, or casts, of a weight of experts, in order."""
    views: list[Node] = []
    for user in weight.users:
        if op_name(user) not in GROUPED:
            views += [user, *views_of(user)]
    return views


def _check_views(weight: Node, ranks: int) -> None:
    """Raise PlanError if a weight is read in another way than expert by expert."""
    for view in views_of(weight):
        if not _keeps_experts(view):
            reason = f"{op_name(view)} in {place(view)} mixes the experts of {weight.target}"
            raise PlanError(_SETTING, ranks, reason, "Use 1")


def _keeps_experts(view: Node) -> bool:
    """Whether the first dimension of a value is that of the value that it is a view of."""
    name = op_name(view)
    if name == "getitem" or name in _AS_THEY_ARE:
        return True
    dims = values(operand(view))[0].dim()
    if name in ("mT", "mH", "adjoint"):  # of the last two
        return dims > 2
    if name == "transpose":
        return all(int(dim) % dims != 0 for dim in view.args[1:3])  # type: ignore[arg-type]
    if name == "permute":
        order = argument(view, "dims")
        return int(order[0]) % dims == 0
    return name in _ALONG_A_DIM and argument(view, "dim", 0) % dims != 0
