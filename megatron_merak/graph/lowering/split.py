"""A rewritten graph as parts, the compute between two collectives: each becomes a segment of the runtime.

Only the units that a stage holds are split. Values have the names of their nodes, which are the same on every rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.fx import Node

from ...ops import WeightGradientSink
from ...segment import Collective, Common, Crossing, In, Out, Segment
from ..capture.outputs import SAME
from ..ir.marks import copy_in
from ..ir.nodes import is_random, op_name
from .emit import Emitter
from .flow import REDUCTIONS, Flow
from .levels import check_in_place, is_sharded, levels
from .prelude import Prelude
from .rewrite import Rewritten

LOSS = "loss"

# Operations of which no backward reads the result, so that a reduction may overwrite it.
_UNREAD = (
    "linear",
    "gated_linear",
    "gelu_linear",
    "mm",
    "addmm",
    "matmul",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "embedding",
    "embedding_part",
)
_UNREAD += ("spread", "add", "sum")


@dataclass(frozen=True, eq=False)
class Part:
    """One future segment: ``code(*parameters, *common, *ins, sink) -> tuple of outs``."""

    unit: int
    index: int
    code: Callable[..., tuple[Tensor, ...]]
    parameters: tuple[str, ...]
    common: tuple[str, ...]
    ins: tuple[In, ...]
    outs: tuple[Out, ...]
    sharded: bool = False
    random: bool = False

    def segment(self, parameters: Mapping[str, nn.Parameter], sink: WeightGradientSink | None) -> Segment:
        """Bound to a rank's parameters, by name; ``sink`` takes the gradients of weights, if given."""
        held = tuple(parameters[name] for name in self.parameters)
        run = partial(_run, self.code, held, self.common, sink)
        return Segment(self.unit, self.index, run, self.ins, self.outs, held, self.sharded, self.random)


def _run(
    code: Callable[..., tuple[Tensor, ...]],
    held: tuple[Tensor, ...],
    names: tuple[str, ...],
    sink: WeightGradientSink | None,
    common: Common,
    *ins: Tensor,
) -> tuple[Tensor, ...]:
    return code(*held, *[common[name] for name in names], *ins, sink)


@dataclass(frozen=True, eq=False)
class Parts:
    """A range of units, ready to be bound to a rank's parameters.

    parts: in order, those of one unit one after the other. sources, targets: values that enter and leave the range,
    those that merely pass through it too, in the order of the graph. results: the values of the captured outputs, in
    their order, when the range ends with the last unit, else none; ``named``: what each is called, of one that is
    several outputs all names. prelude: batch -> every ``common`` value.
    """

    parts: tuple[Part, ...]
    sources: tuple[Crossing, ...]
    targets: tuple[Crossing, ...]
    results: tuple[str, ...]
    prelude: Prelude
    named: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that these units read, in order of first use."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.parameters))

    def segments(self, parameters: Mapping[str, nn.Parameter], sink: WeightGradientSink | None = None) -> list[Segment]:
        return [part.segment(parameters, sink) for part in self.parts]


def split(rewritten: Rewritten, units: range, device: torch.device | None = None) -> Parts:
    """The parts of ``units`` of a rewritten graph. device: where their prelude leaves values; None: the CPU.

    Raises TraceError where an operation in place spans two segments.
    """
    flow = Flow(rewritten)
    (output,) = rewritten.graph.find_nodes(op="output")
    return _Splitter(flow, output.args[0], rewritten.names, units, device or torch.device("cpu")).split()


class _Splitter:
    def __init__(self, flow: Flow, outputs: Sequence[Node], names: Sequence[str], units: range, device: torch.device):
        self.flow, self.units, self.device = flow, units, device
        self.outputs: dict[Node, str] = {}
        for node, name in zip(map(flow.behind, outputs), names, strict=True):
            self.outputs[node] = f"{self.outputs[node]}{SAME}{name}" if node in self.outputs else name
        self.last = max(flow.unit.values())
        self.segment = {n: (unit, level) for unit in units for n, level in levels(flow, unit).items()}
        check_in_place(flow, self.segment)

    def split(self) -> Parts:
        members: dict[tuple[int, int], list[Node]] = {place: [] for place in sorted(self.segment.values())}
        for node in self.flow.unit:
            if node in self.segment:
                members[self.segment[node]].append(node)
        parts, indices = [], dict.fromkeys(self.units, 0)
        wanted: dict[Node, None] = {}
        for (unit, _), nodes in members.items():
            part, common = self._part(unit, indices[unit], nodes)
            indices[unit] += 1
            parts.append(part)
            wanted |= dict.fromkeys(common)
        ends = self.last in self.units
        results = tuple(map(self._name, self.outputs)) if ends else ()
        wanted |= {node: None for node in self.outputs if ends and node not in self.flow.unit}
        prelude = Prelude(self.flow, list(wanted), self.device)
        crossing = self._live(self.units.start), self._live(self.units.stop)
        return Parts(tuple(parts), *crossing, results, prelude, tuple(self.outputs.values()) if ends else ())

    def _name(self, node: Node) -> str:
        return LOSS if LOSS in self.outputs.get(node, "").split(SAME) else node.name

    def _part(self, unit: int, index: int, nodes: list[Node]) -> tuple[Part, list[Node]]:
        """A part and the common nodes it reads."""
        flow, inside = self.flow, dict.fromkeys(nodes)
        reads = dict.fromkeys(x for n in nodes if n.target is not copy_in for x in map(flow.behind, n.all_input_nodes))
        copies = [n for n in nodes if n.target is copy_in]
        outer = [x for x in reads if x not in inside and not flow.is_module(x)]
        parameters: dict[str, list[Node]] = {}
        for node in outer:
            if flow.is_parameter(node):
                parameters.setdefault(str(node.target), []).append(node)
        values = [x for x in outer if x in flow.unit]
        common = [x for x in outer if x not in flow.unit and not flow.is_parameter(x)]
        ins = [In(self._name(x), grad=flow.differentiable[x]) for x in values]
        for node in copies:
            source = node.args[0]
            grad = flow.differentiable[source]
            ins.append(In(self._name(source), collective=Collective.ALL_REDUCE if grad else Collective.NONE, grad=grad))
        outs, results = self._outs(nodes, inside)
        emitter = Emitter(flow, self.device, sink=True)
        groups = [(held[0].name, held) for held in parameters.values()]
        emitter.arguments([*groups, *((x.name, (x,)) for x in (*common, *values, *copies))])
        for node in nodes:
            if node.target is not copy_in:
                emitter.add(node)
        sharded, random = is_sharded(nodes[0]), any(is_random(n) or n.meta.get("random", False) for n in nodes)
        names = tuple(x.name for x in common)
        code = emitter.finish(results)
        return Part(unit, index, code, tuple(parameters), names, tuple(ins), outs, sharded, random), common

    def _outs(self, nodes: Iterable[Node], inside: Mapping[Node, None]) -> tuple[tuple[Out, ...], list[Node]]:
        """What leaves a segment, and the nodes that make it."""
        outs, results = [], []
        for node in nodes:
            reductions = [user for user in node.users if user.target in REDUCTIONS]
            for user in reductions:
                alone = len(node.users) == 1 and op_name(node) in _UNREAD
                outs.append(Out(self._name(user), REDUCTIONS[user.target], inplace=alone))
                results.append(node)
            read = any(user not in inside and user in self.flow.unit and user not in reductions for user in node.users)
            if read or node in self.outputs:
                outs.append(Out(self._name(node)))
                results.append(node)
        return tuple(outs), results

    def _live(self, border: int) -> tuple[Crossing, ...]:
        """The values made in units before ``border`` and read at or after it."""
        crossing = []
        for node, unit in self.flow.unit.items():
            if unit < border <= self._read_until(node):
                value = node.meta["val"]
                grad = self.flow.differentiable[node]
                crossing.append(Crossing(self._name(node), tuple(value.shape), value.dtype, grad))
        return tuple(crossing)

    def _read_until(self, node: Node) -> int:
        """The last unit that reads a value; outputs are read at the end of the last."""
        if node in self.outputs:
            return self.last
        return max((self.flow.unit.get(user, -1) for user in node.users), default=-1)
