"""How several ranks shard each expert: between its first product and its last one every rank computes
some of its features.

    rows -- product: a rank has some of its output features -- silu, mul, ... of these
         -- product: a rank has some of its input features -- a part of each row of a sum

A product of rows that are whole shards its output features, in as many blocks as what follows takes
pieces of; a product of sharded rows shards its input features likewise, and ranks add up the result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, Node

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..ir.names import place
from ..ir.nodes import op_name, operand, values
from .experts import GROUPED, ExpertWeights, weight_of
from .placement import ShardSpec
from .rules_value import POINTWISE, argument

SETTING = "--expert-tensor-parallel-size"
_ALIGNMENT = 16  # bytes, of the rows of torch's grouped product
_POINTWISE = frozenset(POINTWISE)
_PIECES = ("chunk", "split", "split_with_sizes", "slice")

Blocks = tuple[int, ...]


@dataclass
class ExpertFeatures:
    """What ranks that shard each expert have of the rows of its products.

    columns: values of whose last dimension a rank has some -> the extents that this dimension is a
             concatenation of, of each of which a rank has an even share.
    partial: values of which each rank has a part of a sum.
    """

    columns: dict[Node, Blocks] = field(default_factory=dict)
    partial: dict[Node, None] = field(default_factory=dict)

    def sharded(
        self, divided: Mapping[str, TensorSharding], shards: int
    ) -> dict[str, TensorSharding]:
        """Return weights of experts that ranks divide, as they are if ``shards`` ranks shard each
        expert. Raises PlanError.
        """
        specs = self.weights(shards).parts
        found = {str(node.target): spec for node, spec in specs.items()}
        sharded = {}
        for name, tensor in divided.items():
            spec = found[name]
            if len({*spec.blocks}) > 1 or tensor.dim != 0 or tensor.blocks != 1:
                blocks = ", ".join(map(str, spec.blocks))
                reason = f"the features of {name} are in blocks of {blocks}"
                raise PlanError(SETTING, shards, reason, "Use 1")
            sharded[name] = replace(
                tensor, shards=shards, within=spec.dim, within_blocks=len(spec.blocks)
            )
        return sharded

    def weights(self, shards: int) -> ExpertWeights:
        """Return what the weights of the products follow from, and how it is then sharded. Raises
        PlanError.
        """
        found = ExpertWeights(setting=SETTING)
        for product in (node for node in (*self.columns, *self.partial) if _is_product(node)):
            blocks = self.columns.get(product)
            dim = 1 if blocks is None else 2
            blocks = self.columns[operand(product)] if blocks is None else blocks
            found.follow(operand(product, 1), ShardSpec(dim, blocks), shards)
        found.check_readers(shards)
        return found

    def local_args(self, node: Node, shards: int) -> tuple[Any, ...]:
        """Return the arguments with which a rank takes its share of pieces."""
        blocks = self.columns.get(operand(node))
        name = op_name(node)
        if blocks is None or name not in _PIECES or name == "chunk":
            return node.args
        args: list[Any] = list(node.args)
        if name != "slice":
            sizes: Any = args[1]
            whole = isinstance(sizes, int)
            args[1] = sizes // shards if whole else [each // shards for each in sizes]
            return tuple(args)
        start, stop = _bounds([argument(node, "start"), argument(node, "end")], sum(blocks))
        step = argument(node, "step")
        if step == 1:
            return (*args[:2], start // shards, stop // shards)
        return (*args[:2], start, stop // shards, step)


class _Blocked(Exception):
    """A product has to shard its features in other blocks. blocks: of the last dimension."""

    def __init__(self, product: Node, blocks: Blocks):
        super().__init__()
        self.product = product
        self.blocks = blocks


def features_of(graph: Graph, shards: int) -> ExpertFeatures:
    """Return what ``shards`` ranks have of the rows of experts. Raises PlanError."""
    if not any(map(_is_product, graph.nodes)):
        reason = "the model has no grouped product of experts"
        raise PlanError(SETTING, shards, reason, "Use 1")
    blocks: dict[Node, Blocks] = {}
    while True:
        try:
            return _OfFeatures(blocks, shards).run(graph.nodes)
        except _Blocked as wanted:
            known = blocks.setdefault(wanted.product, wanted.blocks)
            if known != wanted.blocks:
                raise _refused(wanted.product, shards, "is cut in two ways") from None


class _OfFeatures:
    """One walk over a graph. blocks: those that products need."""

    def __init__(self, blocks: Mapping[Node, Blocks], shards: int):
        self.blocks = blocks
        self.shards = shards
        self.found = ExpertFeatures()
        self.origin: dict[Node, Node] = {}  # of columns: the product that made them

    def run(self, nodes: Iterable[Node]) -> ExpertFeatures:
        for node in nodes:
            if _is_product(node):
                self._product(node)
            elif any(x in self.found.columns for x in node.all_input_nodes):
                self._columns(node)
            elif op_name(node) == "add" and any(x in self.found.partial for x in node.args):
                self._added(node)
        return self.found

    def _product(self, node: Node) -> None:
        rows = operand(node)
        if rows in self.found.partial:
            raise _refused(node, self.shards, "multiplies the result of two products")
        blocks = self.found.columns.get(rows)
        extent = values(node)[0].shape[-1]
        width = extent if blocks is None else sum(blocks)
        if blocks is not None:
            self.found.partial[node] = None
        else:
            blocks = self.found.columns[node] = self.blocks.get(node, (extent,))
            self.origin[node] = node
        if any(each % self.shards for each in blocks):
            reason = f"it does not divide the {blocks[0]} features of {weight_of(node)}"
            raise PlanError(SETTING, self.shards, reason, "Use a size that does, or 1")
        itemsize = values(node)[0].dtype.itemsize
        if op_name(node) == "_grouped_mm" and width // self.shards * itemsize % _ALIGNMENT:
            reason = (
                f"a rank's share of the {width} features of {weight_of(node)} is not a multiple of "
                f"{_ALIGNMENT} bytes"
            )
            raise PlanError(SETTING, self.shards, reason, "Use a smaller size")

    def _columns(self, node: Node) -> None:
        """Decide about a node that reads sharded features."""
        name = op_name(node)
        sources = [x for x in node.all_input_nodes if x in self.found.columns]
        blocks = self.found.columns[sources[0]]
        if name in _PIECES:
            made = self._pieces(node, blocks)
        elif name == "getitem" or name in _POINTWISE:
            made = blocks
        else:
            raise _refused(node, self.shards, "does not compute each feature by itself")
        for x in node.all_input_nodes:
            own = self.found.columns.get(x)
            if own is not None and own != blocks:
                raise _refused(node, self.shards, "combines features of different ranks")
            if own is None and not _fits(x):
                why = "combines features with values that ranks have all of"
                raise _refused(node, self.shards, why)
        self.found.columns[node] = made
        self.origin[node] = self.origin[sources[0]]

    def _pieces(self, node: Node, blocks: Blocks) -> Blocks:
        rank = values(operand(node))[0].dim()
        dim = argument(node, "dim", 0) % rank
        if dim != rank - 1:
            if dim == 0:
                raise _refused(node, self.shards, "takes pieces of rows")
            return blocks
        extent = sum(blocks)
        if op_name(node) == "slice":
            start, stop = _bounds([argument(node, "start"), argument(node, "end")], extent)
            step = argument(node, "step")
            if step != 1:
                whole = stop == extent and len(blocks) == 1 and start < step
                if not whole or extent // self.shards % step:
                    raise _refused(node, self.shards, "takes some features of several ranks")
                return (extent // step,)
            sizes = [each for each in (start, stop - start, extent - stop) if each]
        else:
            made = values(node)
            sizes = [each.shape[-1] for each in made]
        wanted = tuple(sizes)
        if len(wanted) == 1:
            return blocks
        if len(blocks) == 1:
            raise _Blocked(self.origin[operand(node)], wanted)
        if blocks != wanted or len({*wanted}) > 1 and op_name(node) != "slice":
            raise _refused(node, self.shards, "cuts features in other pieces than before")
        if op_name(node) == "slice":
            return (stop - start,)
        return (wanted[0],)

    def _added(self, node: Node) -> None:
        """A bias of each expert is added to the part of one rank."""
        sums = [x for x in node.all_input_nodes if x in self.found.partial]
        others = [x for x in node.all_input_nodes if x not in self.found.partial]
        if len(sums) == 1 and len(others) == 1 and is_row_of_parameter(others[0]):
            self.found.partial[node] = None


def is_row_of_parameter(node: Node) -> bool:
    """Whether a value is a row of a parameter for each row, by its expert."""
    return op_name(node) == "index" and operand(node).op == "get_attr"


def _fits(x: Node) -> bool:
    """Whether a value that is whole can be combined with features: one for each row, or for each
    expert, of which a rank takes its share.
    """
    value = values(x)[0]
    return value.dim() == 0 or value.shape[-1] == 1 or is_row_of_parameter(x)


def _is_product(node: Node) -> bool:
    return op_name(node) in GROUPED


def _bounds(given: Iterable[Any], extent: int) -> list[int]:
    """Return where a slice starts and ends."""
    start, stop = given
    ends = [0 if start is None else start, extent if stop is None else stop]
    return [min(max(at + extent if at < 0 else at, 0), extent) for at in ends]


def _refused(node: Node, shards: int, why: str) -> PlanError:
    reason = f"{op_name(node)} in {place(node)} {why}"
    return PlanError(SETTING, shards, reason, "Use 1")
