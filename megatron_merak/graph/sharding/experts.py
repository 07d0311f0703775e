"""Which parameters are weights of experts: those that grouped products multiply rows with, or a
function of them, such as one that an adapter adds to.

    A [experts x rank, in]  -- reshape ----------- [experts, rank, in]  --|
    B [out, rank x experts] -- reshape, permute -- [experts, out, rank] --|
    W [experts, out, in] ------------------------------------------------ baddbmm -- product

A rank that has some of the experts of W so has some rows of A, and columns in several blocks of B.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch.fx import Graph, Node

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..ir.names import place
from ..ir.nodes import op_name, operand, values
from .placement import ShardSpec
from .rules_value import argument

GROUPED = ("_grouped_mm", "transformers.grouped_mm_fallback")
DIVIDED = "expert parallel: each rank has some of the experts"
_AS_THEY_ARE = ("to", "_to_copy", "detach", "alias", "clone", "contiguous")
RESHAPES = ("reshape", "view", "_unsafe_view")
_ENTRY_BY_ENTRY = ("add", "sub", "mul", "div", "neg")
_ALONG_A_DIM = ("chunk", "split", "slice", "select", "split_with_sizes")
_SETTING = "--expert-model-parallel-size"


def weight_of(product: Node) -> str:
    """Return the name of the parameter that a grouped product multiplies with, or with a function of:
    of several, the first one; what is none has another name.
    """
    weight = operand(product, 1)
    while weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    return str(weight.target)


@dataclass
class ExpertWeights:
    """What the weights of grouped products follow from, where ranks have some of the experts.

    parts:  how parameters are then sharded.
    places: what is computed of them alone -> its dimension that counts experts, or features of one,
            in an order in which it can be computed.
    setting: by which they are sharded.
    """

    parts: dict[Node, ShardSpec] = field(default_factory=dict)
    places: dict[Node, int] = field(default_factory=dict)
    setting: str = _SETTING

    def follow(self, value: Node, spec: ShardSpec, ranks: int) -> None:
        """Take up what ``value`` follows from, which is to be sharded so. Raises PlanError."""
        if value.op == "get_attr":
            if self.parts.setdefault(value, spec) != spec:
                raise self._mixes(value, ranks)
            return
        if value in self.places:
            if self.places[value] != spec.dim:
                raise self._mixes(value, ranks)
            return
        sources = _sources(value, spec.dim)
        if not sources:
            raise self._mixes(value, ranks)
        for x, dim in sources.items():
            blocks = spec.blocks
            if op_name(value) in RESHAPES:
                if len(blocks) > 1:
                    raise self._mixes(value, ranks)
                blocks = _blocks(value, spec.dim, dim)
            self.follow(x, ShardSpec(dim, blocks), ranks)
        self.places[value] = spec.dim

    def check_readers(self, ranks: int) -> None:
        """Raise PlanError if anything is read in another way than expert by expert."""
        for node in (*self.parts, *self.places):
            for user in node.users:
                if user not in self.places and op_name(user) not in GROUPED:
                    raise self._mixes(user, ranks)

    def _mixes(self, node: Node, ranks: int) -> PlanError:
        reason = (
            f"{op_name(node)} in {place(node)} mixes experts, or combines their weights with others"
        )
        return PlanError(self.setting, ranks, reason, "Use 1")


def weights_of(products: Iterable[Node], ranks: int) -> ExpertWeights:
    """Return what the weights of grouped products follow from. Raises PlanError for weights whose
    experts ``ranks`` ranks cannot divide.
    """
    found = ExpertWeights()
    for product in products:
        weight = operand(product, 1)
        found.follow(weight, ShardSpec(0, (values(weight)[0].shape[0],)), ranks)
    found.check_readers(ranks)
    return found


def _sources(value: Node, dim: int) -> dict[Node, int]:
    """Return the operands of a value whose entries along ``dim`` are of one expert each, and their
    dimension that counts experts; none where they cannot be told.
    """
    name = op_name(value)
    x = value.args[0] if value.args else None
    if not isinstance(x, Node):
        return {}
    if name == "getitem" or name in _AS_THEY_ARE:
        return {x: dim}
    if name in ("baddbmm", "bmm") and dim == 0:
        return dict.fromkeys(value.all_input_nodes, 0)
    if name in _ENTRY_BY_ENTRY:
        alike = all(
            values(each)[0].shape == values(value)[0].shape for each in value.all_input_nodes
        )
        if alike:
            return dict.fromkeys(value.all_input_nodes, dim)
    rank = values(x)[0].dim()
    if name in ("mT", "mH", "adjoint"):
        return {x: _swapped(dim, rank - 2, rank - 1)}
    if name == "transpose":
        one, other = (int(each) % rank for each in value.args[1:3])  # type: ignore[arg-type]
        return {x: _swapped(dim, one, other)}
    if name == "permute":
        return {x: int(argument(value, "dims")[dim]) % rank}
    if name in _ALONG_A_DIM:
        other = argument(value, "dim", 0) % rank
        own = dim + (name == "select" and other <= dim)
        if own != other:
            return {x: own}
    if name in RESHAPES:
        for own in range(rank):
            if _outer_and_inner(value, dim, own) is not None:
                return {x: own}
    return {}


def _swapped(dim: int, one: int, other: int) -> int:
    return {one: other, other: one}.get(dim, dim)


def _outer_and_inner(reshaped: Node, dim: int, own: int) -> tuple[int, int] | None:
    """Return of how many entries of other dimensions before and after it each entry of ``dim`` is in
    dimension ``own`` of what is reshaped; None if it is not in that dimension alone.
    """
    before = values(operand(reshaped))[0].shape
    after = values(reshaped)[0].shape
    outer, left = divmod(prod(after[:dim]), prod(before[:own]))
    inner, right = divmod(prod(after[dim + 1 :]), prod(before[own + 1 :]))
    if left or right or outer * after[dim] * inner != before[own]:
        return None
    return outer, inner


def _blocks(reshaped: Node, dim: int, own: int) -> tuple[int, ...]:
    """Return the blocks of dimension ``own`` of what is reshaped, of each of which a rank has the
    share that it has of ``dim``.
    """
    extents = _outer_and_inner(reshaped, dim, own)
    assert extents is not None
    outer, inner = extents
    return (values(reshaped)[0].shape[dim] * inner,) * outer


def divided_experts(
    graph: Graph, tensors: Mapping[str, TensorSharding], ranks: int
) -> dict[str, TensorSharding]:
    """Return the weights of experts that ``ranks`` ranks divide, as they are then sharded.

    tensors: how other ranks shard all parameters.

    Raises PlanError without any, and for weights whose experts cannot be divided.
    """
    products = [node for node in graph.nodes if op_name(node) in GROUPED]
    if not products:
        reason = "the model has no grouped product of experts"
        raise PlanError(_SETTING, ranks, reason, "Use 1")
    return _shardings(products, tensors, ranks, over_copies=True)


def adapted_experts(
    graph: Graph, tensors: Mapping[str, TensorSharding], ranks: int
) -> dict[str, TensorSharding]:
    """Return the parameters of weights of experts that follow from several, such as those with an
    adapter, as they are sharded where the ranks of a layer divide experts.

    tensors: all parameters.

    Raises PlanError for weights whose experts cannot be divided.
    """
    products = [node for node in graph.nodes if op_name(node) in GROUPED]
    combined = [node for node in products if _is_combined(operand(node, 1))]
    return _shardings(combined, tensors, ranks, over_copies=False)


def _is_combined(weight: Node) -> bool:
    """Whether a weight follows from several values."""
    while weight.all_input_nodes:
        if len(weight.all_input_nodes) > 1:
            return True
        (weight,) = weight.all_input_nodes
    return False


def _shardings(
    products: Sequence[Node],
    tensors: Mapping[str, TensorSharding],
    ranks: int,
    over_copies: bool,
) -> dict[str, TensorSharding]:
    for product in products:
        experts = values(operand(product, 1))[0].shape[0]
        if experts % ranks:
            reason = f"it does not divide the {experts} experts of {weight_of(product)}"
            raise PlanError(_SETTING, ranks, reason, "Use a size that does, or 1")
    found: dict[str, TensorSharding] = {}
    for node, spec in weights_of(products, ranks).parts.items():
        name = str(node.target)
        if name not in tensors:
            reason = f"the weight of experts {name} is no parameter"
            raise PlanError(_SETTING, ranks, reason, "Use 1")
        found[name] = TensorSharding(
            name, tensors[name].shape, spec.dim, len(spec.blocks), experts=over_copies
        )
    return found
