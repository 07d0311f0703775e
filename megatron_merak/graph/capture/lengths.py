"""Finds the sequence lengths for which a model's forward does the same work, by a trace with a
symbolic length.

Every branch on the length, in the forward or in an operation, leaves a condition in that trace (a
sliding window longer than the row, padding to whole chunks). For a length that meets all conditions
a trace has the same operations, and each number that depends on the length is given by the
expression in the symbolic trace.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from megatron_merak.graph.capture.outputs import take_entries
from megatron_merak.graph.capture.overriding import overriding

Axes = Collection[tuple[str, int]]  # (batch entry, dimension) pairs whose extent is the length
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CHECKS = ("_assert", "sym_constrain_range", "sym_size")
_END = 2**63 - 1
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, eq=False)
class Lengths:
    """The lengths from ``least`` to ``most`` that meet ``conditions``, expressions of the symbol
    ``length``.
    """

    length: sympy.Symbol
    conditions: tuple[Any, ...]
    least: int
    most: int

    def hold(self, length: int) -> bool:
        values = {self.length: sympy.Integer(length)}
        inside = self.least <= length <= self.most
        return inside and all(condition.subs(values) == sympy.true for condition in self.conditions)


def digest(program: ExportedProgram, length: int | None = None) -> str:
    """Return a hash of the operations of a program, in order.

    length: for a program with a symbolic length, the value to substitute.
    """
    hash = hashlib.sha256()
    for line in _lines(program.graph_module, length):
        hash.update(line.encode())
    return hash.hexdigest()


def _lines(module: GraphModule, length: int | None):
    names: dict[Node, str] = {}
    number = 0
    for node in module.graph.nodes:
        if _is_number(node) or getattr(node.target, "__name__", str(node.target)).startswith(
            _CHECKS
        ):
            continue
        if _is_identity(node):
            names[node] = names[node.args[0]]
            continue
        number += 1
        names[node] = f"%{number}"
        args = [x for x in node.args if not (_is_number(x) and _is_region(node))]

        def describe(x: Node) -> Any:
            return _value(x, length) if _is_number(x) else names.get(x, "?")

        yield _ADDRESS.sub(
            "", f"{node.op} {node.target} {map_arg((args, node.kwargs), describe)}\n"
        )
        if node.op == "get_attr" and isinstance(
            inner := getattr(module, str(node.target), None), GraphModule
        ):
            yield from _lines(inner, length)


def _is_number(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), _SYMBOLIC)


def _is_identity(node: Node) -> bool:
    """Whether a node is an alias or a full slice, which torch leaves out where it knows
    the extent.
    """
    if node.target is torch.ops.aten.alias.default:
        return True
    return node.target is torch.ops.aten.slice.Tensor and node.args[2:] in ((0, _END), (0, _END, 1))


def _is_region(node: Node) -> bool:
    """Whether a node runs an inner graph, which takes numbers of this graph as arguments."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _value(node: Node, length: int | None) -> int | str:
    value = node.meta["val"]
    if length is None or not isinstance(value, torch.SymInt):
        return "?"
    expression = value.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, length)))


class SymbolicLength:
    """Replaces ``torch.export.export``: exports with ``axes`` of the batch symbolic. ``batch`` has
    real tensors.
    """

    def __init__(self, batch: Mapping[str, Any], axes: Axes):
        self.batch = batch
        self.axes = axes
        self.env: ShapeEnv | None = None

    def __call__(
        self, fake: nn.Module, args: tuple, inputs: Mapping[str, Any], strict: bool
    ) -> ExportedProgram:
        mode: FakeTensorMode = next(p.fake_mode for p in fake.parameters())  # type: ignore[attr-defined]

        def fake_mode(**options: Any) -> FakeTensorMode:
            """Return the mode of the parameters, set up for one trace with symbols."""
            mode.shape_env = options["shape_env"]
            vars(mode)["export"] = True  # it is no declared attribute of the class
            mode.static_shapes = False
            self.env = mode.shape_env
            return mode

        take_entries(fake, tuple(inputs))
        real = {
            k: v.detach().cpu() if isinstance(v := self.batch.get(k, each), Tensor) else v
            for k, each in inputs.items()
        }
        sizes = {k: {dim: Dim.AUTO for name, dim in self.axes if name == k} or None for k in real}
        with overriding(non_strict_utils, "FakeTensorMode", fake_mode):
            return torch.export.export(fake, args, real, dynamic_shapes=sizes, strict=strict)

    def lengths(self, program: ExportedProgram) -> Lengths | None:
        """Return the lengths that the program is right for; None if a number in it is not affine in
        the length.
        """
        length = sympy.Symbol("length", integer=True, positive=True)

        def of_length(expression: Any) -> Any:
            return expression.subs(dict.fromkeys(expression.free_symbols, length))

        assert self.env is not None
        if not all(
            _is_affine(of_length(each), length) for each in _expressions(program.graph_module)
        ):
            return None
        conditions = tuple(dict.fromkeys(of_length(guard.expr) for guard in self.env.guards))
        ranges = list(self.env.var_to_range.values())
        least = max(int(r.lower) for r in ranges)
        most = min(int(min(r.upper, sympy.Integer(2**62))) for r in ranges)
        return Lengths(length, tuple(c for c in conditions if c != sympy.true), least, most)


def _is_affine(expression: Any, length: sympy.Symbol) -> bool:
    if expression.is_Integer:
        return True
    if expression.free_symbols != {length} or not expression.is_polynomial(length):
        return False
    polynomial = sympy.Poly(expression, length)
    return polynomial.degree() <= 1 and all(each.is_Integer for each in polynomial.all_coeffs())


def _expressions(module: GraphModule):
    """Yield the expression of every symbolic number in a graph."""
    for node in module.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            numbers = [*value.shape] if isinstance(value, Tensor) else [value]
            yield from (x.node.expr for x in numbers if isinstance(x, torch.SymInt))
        if node.op == "get_attr" and isinstance(
            inner := getattr(module, str(node.target), None), GraphModule
        ):
            yield from _expressions(inner)
