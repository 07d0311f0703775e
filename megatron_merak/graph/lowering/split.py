"""Splits units of a rewritten graph at collectives into parts; each part becomes a ``Segment`` of the runtime.

Only the units of one pipeline stage are split. Values are named after their nodes, alike on every rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.fx import Node

from ...ops import WeightGradientSink
from ...segment import Collective, Common, Crossing, In, Out, Segment
from ..capture.outputs import SAME
from ..ir.marks import copy_in
from ..ir.nodes import called, is_random, operand
from ..ir.operators import facts
from .emit import Emitter
from .flow import REDUCTIONS, Flow
from .levels import check_in_place, is_sharded, segment_levels
from .lookups import Lookups
from .prelude import Prelude
from .rewrite import Rewritten

LOSS = "loss"


@dataclass(frozen=True, eq=False)
class Part:
    """The code of one segment, not yet bound to parameters.

    code:       function (*parameters, *common, *ins, sink) -> tuple of outs.
    parameters: names of the parameters that it reads.
    common:     names of the common values that it reads.
    random:     whether it draws random numbers.
    """

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
        """Bind the code to a rank's parameters, by name; ``sink`` receives the gradients of weights, if given."""
        bound = tuple(parameters[name] for name in self.parameters)
        run = partial(_run, self.code, bound, self.common, sink)
        return Segment(
            self.unit,
            self.index,
            run,
            self.ins,
            outs=self.outs,
            parameters=bound,
            sharded=self.sharded,
            random=self.random,
        )


def _run(
    code: Callable[..., tuple[Tensor, ...]],
    parameters: tuple[Tensor, ...],
    names: tuple[str, ...],
    sink: WeightGradientSink | None,
    common: Common,
    *ins: Tensor,
) -> tuple[Tensor, ...]:
    return code(*parameters, *[common[name] for name in names], *ins, sink)


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a range of units, ready to be bound to a rank's parameters.

    parts:   in order of execution, unit by unit.
    sources: values that enter the range, including those that only pass through it, in graph order.
    targets: values that leave the range, likewise.
    results: if the range contains the last unit, the values of the captured outputs in their order; else empty.
    prelude: maps a batch to the common values that the parts read.
    named:   the output name of each result; several names joined by ``SAME`` if one value is several outputs.
    lookups: what all units look up by numbers of the batch, as far as that is known.
    touched: the parameters of all units that get a gradient, likewise.
    """

    parts: tuple[Part, ...]
    sources: tuple[Crossing, ...]
    targets: tuple[Crossing, ...]
    results: tuple[str, ...]
    prelude: Prelude
    named: tuple[str, ...] = ()
    lookups: Lookups = field(default_factory=Lookups)
    touched: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that these units read, in order of first use."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.parameters))

    def segments(self, parameters: Mapping[str, nn.Parameter], sink: WeightGradientSink | None = None) -> list[Segment]:
        return [part.segment(parameters, sink) for part in self.parts]


def split(
    rewritten: Rewritten, units: range, device: torch.device | None = None, lookups: Lookups | None = None
) -> Parts:
    """Split ``units`` of a rewritten graph into parts.

    device:  the device that the code runs on and the prelude puts common values on; None for the CPU.
    lookups: of the graph before it was rewritten; None if nobody asks for them.

    Raises TraceError if memory that one segment uses is written in place by another.
    """
    flow = Flow(rewritten)
    (output,) = rewritten.graph.find_nodes(op="output")
    parts = _Splitter(flow, output.args[0], rewritten.names, units, device=device or torch.device("cpu")).split()
    return parts if lookups is None else replace(parts, lookups=lookups)


class _Splitter:
    def __init__(self, flow: Flow, outputs: Sequence[Node], names: Sequence[str], units: range, device: torch.device):
        self.flow = flow
        self.units = units
        self.device = device
        self.outputs: dict[Node, str] = {}
        for node, name in zip(map(flow.resolve, outputs), names, strict=True):
            self.outputs[node] = f"{self.outputs[node]}{SAME}{name}" if node in self.outputs else name
        self.last = max(flow.unit.values())
        self.segment = {n: (unit, level) for unit in units for n, level in segment_levels(flow, unit).items()}
        check_in_place(flow, self.segment)

    def split(self) -> Parts:
        members: dict[tuple[int, int], list[Node]] = {key: [] for key in sorted(self.segment.values())}
        for node in self.flow.unit:
            if node in self.segment:
                members[self.segment[node]].append(node)
        parts = []
        indices = dict.fromkeys(self.units, 0)
        shared: dict[Node, None] = {}
        for (unit, _), nodes in members.items():
            part, common = self._part(unit, indices[unit], nodes)
            indices[unit] += 1
            parts.append(part)
            shared |= dict.fromkeys(common)
        ends = self.last in self.units
        results = tuple(map(self._name, self.outputs)) if ends else ()
        shared |= {node: None for node in self.outputs if ends and node not in self.flow.unit}
        prelude = Prelude(self.flow, list(shared), self.device)
        return Parts(
            parts=tuple(parts),
            sources=self._live(self.units.start),
            targets=self._live(self.units.stop),
            results=results,
            prelude=prelude,
            named=tuple(self.outputs.values()) if ends else (),
        )

    def _name(self, node: Node) -> str:
        return LOSS if LOSS in self.outputs.get(node, "").split(SAME) else node.name

    def _part(self, unit: int, index: int, nodes: list[Node]) -> tuple[Part, list[Node]]:
        """Build one part from its nodes; also return the common nodes that it reads."""
        flow = self.flow
        members = dict.fromkeys(nodes)
        reads = dict.fromkeys(x for n in nodes if n.target is not copy_in for x in map(flow.resolve, n.all_input_nodes))
        copies = [n for n in nodes if n.target is copy_in]
        outer = [x for x in reads if x not in members and not flow.is_module(x)]
        parameters: dict[str, list[Node]] = {}
        for node in outer:
            if flow.is_parameter(node):
                parameters.setdefault(str(node.target), []).append(node)
        values = [x for x in outer if x in flow.unit]
        common = [x for x in outer if x not in flow.unit and not flow.is_parameter(x)]
        ins = [In(self._name(x), grad=flow.differentiable[x]) for x in values]
        for node in copies:
            source = operand(node)
            grad = flow.differentiable[source]
            ins.append(In(self._name(source), collective=Collective.ALL_REDUCE if grad else Collective.NONE, grad=grad))
        outs, results = self._outs(nodes, members)
        emitter = Emitter(flow, self.device, sink=True)
        groups = [(attribute_nodes[0].name, attribute_nodes) for attribute_nodes in parameters.values()]
        emitter.arguments([*groups, *((x.name, (x,)) for x in (*common, *values, *copies))])
        for node in nodes:
            if node.target is not copy_in:
                emitter.add(node)
        sharded = is_sharded(nodes[0])
        random = any(is_random(n) or n.meta.get("random", False) for n in nodes)
        names = tuple(x.name for x in common)
        code = emitter.finish(results)
        return Part(unit, index, code, tuple(parameters), names, tuple(ins), outs, sharded, random), common

    def _outs(self, nodes: Iterable[Node], inside: Mapping[Node, None]) -> tuple[tuple[Out, ...], list[Node]]:
        """Return the outs of a segment and, for each, the node that computes it."""
        outs = []
        results = []
        for node in nodes:
            reductions = [user for user in node.users if user.target in REDUCTIONS]
            for user in reductions:
                alone = len(node.users) == 1 and facts(node).result_unread
                outs.append(Out(self._name(user), REDUCTIONS[called(user)], inplace=alone))
                results.append(node)
            read = any(user not in inside and user in self.flow.unit and user not in reductions for user in node.users)
            if read or node in self.outputs:
                outs.append(Out(self._name(node)))
                results.append(node)
        return tuple(outs), results

    def _live(self, border: int) -> tuple[Crossing, ...]:
        """Return the values computed in units before ``border`` and read in unit ``border`` or later."""
        crossing = []
        for node, unit in self.flow.unit.items():
            if unit < border <= self._read_until(node):
                value = node.meta["val"]
                grad = self.flow.differentiable[node]
                crossing.append(Crossing(self._name(node), tuple(value.shape), value.dtype, grad))
        return tuple(crossing)

    def _read_until(self, node: Node) -> int:
        """Return the last unit that reads a value; an output counts as read by the last unit."""
        if node in self.outputs:
            return self.last
        return max((self.flow.unit.get(user, -1) for user in node.users), default=-1)
