"""Splits units of a rewritten graph at collectives into parts; each part becomes a ``Segment`` of
the runtime.

Only the units of one pipeline stage are split. Values are named after their nodes, alike on every
rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ... import ops
from ...ops import WeightGradientSink
from ...segment import Collective, Common, Crossing, In, LayerAxis, Out, Segment
from ..capture.outputs import SAME
from ..ir.kinds import NodeKind, kinds, over
from ..ir.marks import (
    all_gather,
    copy_in,
    exchange,
    exchange_rows,
    reduce_scatter,
    rotate,
    rows_of,
    turn_back,
)
from ..ir.nodes import called, is_random, op_name, operand, values
from ..ir.opaque import CustomFunction
from ..ir.operators import facts
from ..sharding.experts import GROUPED
from .emit import Emitter
from .flow import REDUCTIONS, Flow
from .levels import check_in_place, segment_levels
from .lookups import Lookups
from .prelude import Prelude
from .regathered import is_regathered, without_gathered
from .rewrite import Rewritten

LOSS = "loss"
SegmentKey = tuple[int, int, tuple[NodeKind, ...]]  # unit, level, what is computed with
# What is done with the gradient of a mark: where it is read as it is, and through a ``copy_in``.
_OF_GRADIENT: dict[object, Collective] = {
    reduce_scatter: Collective.ALL_GATHER,
    exchange: Collective.EXCHANGE,
    exchange_rows: Collective.ROWS,
    rotate: Collective.ROTATE_BACK,
    turn_back: Collective.ROTATE_BACK,
}
_OF_COPIED_GRADIENT: dict[object, Collective] = {all_gather: Collective.REDUCE_SCATTER}


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
    along_sequence: bool = False
    own_context: bool = False

    def segment(
        self, parameters: Mapping[str, nn.Parameter], sink: WeightGradientSink | None
    ) -> Segment:
        """Bind the code to a rank's parameters, by name; ``sink`` receives the gradients of
        weights, if given.
        """
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
            along_sequence=self.along_sequence,
            own_context=self.own_context,
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
    results: if the range contains the last unit, the values of the captured outputs in their order;
             else empty.
    prelude: maps a batch to the common values that the parts read.
    named:   the output name of each result; several names joined by ``SAME`` if one value is
             several outputs.
    by_host: the common values whose numbers Python reads, see ``ops.documents``.
    codes:   names of the functions of the model's own code that parts call.
    lookups: what all units look up by numbers of the batch, as far as that is known.
    touched: the parameters of all units that get a gradient, likewise.
    """

    parts: tuple[Part, ...]
    sources: tuple[Crossing, ...]
    targets: tuple[Crossing, ...]
    results: tuple[str, ...]
    prelude: Prelude
    named: tuple[str, ...] = ()
    by_host: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    lookups: Lookups = field(default_factory=Lookups)
    touched: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters that these units read, in order of first use."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.parameters))

    def segments(
        self, parameters: Mapping[str, nn.Parameter], sink: WeightGradientSink | None = None
    ) -> list[Segment]:
        return [part.segment(parameters, sink) for part in self.parts]


def split(
    rewritten: Rewritten,
    units: range,
    device: torch.device | None = None,
    lookups: Lookups | None = None,
) -> Parts:
    """Split ``units`` of a rewritten graph into parts.

    device:  the device that the code runs on and the prelude puts common values on; None for the
             CPU.
    lookups: of the graph before it was rewritten; None if nobody asks for them.

    Raises TraceError if memory that one segment uses is written in place by another.
    """
    device = device or torch.device("cpu")
    parts = _Splitter(Flow(rewritten), rewritten.names, units, device).split()
    return parts if lookups is None else replace(parts, lookups=lookups)


class _Splitter:
    def __init__(
        self,
        flow: Flow,
        names: Sequence[str],
        units: range,
        device: torch.device,
    ):
        self.flow = flow
        self.units = units
        self.device = device
        self.outputs: dict[Node, str] = {}
        for node, name in zip(flow.outputs, names, strict=True):
            self.outputs[node] = (
                f"{self.outputs[node]}{SAME}{name}" if node in self.outputs else name
            )
        self.last = max(flow.unit.values())
        self.segment: dict[Node, SegmentKey] = {}
        self.plain: dict[Node, SegmentKey] = {}  # with nothing behind exchanges
        for unit in units:
            for node, level in segment_levels(flow, unit).items():
                self.segment[node] = (unit, level, kinds(node))
            for node, level in segment_levels(flow, unit, hides=False).items():
                self.plain[node] = (unit, level, kinds(node))
        check_in_place(flow, self.segment)

    def split(self) -> Parts:
        members = self._members(self.segment)
        plain = self._members(self.plain)
        numbers = dict(zip(plain, _numbers(plain), strict=True))
        parts = []
        shared: dict[Node, None] = {}
        for nodes in members.values():
            unit, index = numbers[self.plain[_usual(nodes)]]
            part, common = self._part(unit, index, nodes)
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
            by_host=tuple(node.name for node in shared if node.target is ops.documents),
            codes=tuple(code for code in map(_code_of, self.segment) if code),
        )

    def _members(self, segment_of: Mapping[Node, SegmentKey]) -> dict[SegmentKey, list[Node]]:
        """Return the nodes of each segment, in graph order; segments in order of execution."""
        members = {key: list[Node]() for key in sorted(segment_of.values())}
        for node in self.flow.unit:
            if node in segment_of:
                members[segment_of[node]].append(node)
        return members

    def _name(self, node: Node) -> str:
        return LOSS if LOSS in self.outputs.get(node, "").split(SAME) else node.name

    def _part(self, unit: int, index: int, nodes: list[Node]) -> tuple[Part, list[Node]]:
        """Build one part from its nodes; also return the common nodes that it reads."""
        flow = self.flow
        members = dict.fromkeys(nodes)
        reads = dict.fromkeys(
            x
            for n in nodes
            if n.target is not copy_in
            for x in map(flow.resolve, n.all_input_nodes)
        )
        copies = [n for n in nodes if n.target is copy_in]
        outer = [x for x in reads if x not in members and not flow.is_module(x)]
        parameters: dict[str, list[Node]] = {}
        for node in outer:
            if flow.is_parameter(node):
                parameters.setdefault(str(node.target), []).append(node)
        values = [x for x in outer if x in flow.unit]
        # The gradients of rows are sent first: nothing hides the wait for them.
        values.sort(key=lambda x: rows_of(x) is None)
        common = [x for x in outer if x not in flow.unit and not flow.is_parameter(x)]
        ins = [self._in(x, _OF_GRADIENT.get(x.target, Collective.NONE), over(x)) for x in values]
        others: dict[Node, Callable[..., Any]] = {}
        for node in copies:
            source = operand(node)
            collective = _OF_COPIED_GRADIENT.get(source.target, Collective.ALL_REDUCE)
            regather = is_regathered(flow, node, members)
            ins.append(replace(self._in(source, collective, over(node)), regather=regather))
            if regather:
                others |= without_gathered(node)
        outs, results = self._outs(nodes, members)
        emitter = Emitter(flow, self.device, sink=True, others=others)
        groups = [
            (attribute_nodes[0].name, attribute_nodes) for attribute_nodes in parameters.values()
        ]
        emitter.arguments([*groups, *((x.name, (x,)) for x in (*common, *values, *copies))])
        for node in nodes:
            if node.target is not copy_in:
                emitter.add(node)
        weights, contexts = kinds(nodes[0])
        random = any(map(is_random, nodes))
        names = tuple(x.name for x in common)
        code = emitter.finish(results)
        part = Part(
            unit,
            index,
            code,
            tuple(parameters),
            common=names,
            ins=tuple(ins),
            outs=outs,
            sharded=weights is not NodeKind.FULL,
            random=random,
            along_sequence=weights is NodeKind.PARTS,
            own_context=contexts is NodeKind.SHARDS,
        )
        return part, common

    def _in(self, source: Node, collective: Collective, axis: LayerAxis) -> In:
        grad = self.flow.differentiable[source]
        of_gradient = collective if grad else Collective.NONE
        return In(self._name(source), collective=of_gradient, grad=grad, axis=axis)

    def _outs(
        self, nodes: Iterable[Node], inside: Mapping[Node, None]
    ) -> tuple[tuple[Out, ...], list[Node]]:
        """Return the outs of a segment and, for each, the node that computes it."""
        outs = []
        results = []
        for node in nodes:
            reductions = [
                user for user in node.users if user.target in REDUCTIONS and operand(user) is node
            ]
            for user in reductions:
                # an all-reduce may overwrite it: nobody else reads it, nor does its backward
                alone = len(node.users) == 1 and facts(node).result_unread
                counts = self._name(operand(user, 1)) if user.target is exchange_rows else ""
                collective = REDUCTIONS[called(user)]
                out = Out(
                    self._name(user), collective, inplace=alone, counts=counts, axis=over(user)
                )
                outs.append(out)
                results.append(node)
            read = any(
                user not in inside and user in self.flow.unit and user not in reductions
                for user in node.users
            )
            if read or node in self.outputs:
                outs.append(Out(self._name(node)))
                results.append(node)
        return tuple(outs), results

    def _live(self, border: int) -> tuple[Crossing, ...]:
        crossing = []
        for node in crossing_nodes(self.flow, border):
            value = node.meta["val"]
            grad = self.flow.differentiable[node]
            crossing.append(Crossing(self._name(node), tuple(value.shape), value.dtype, grad))
        return tuple(crossing)


def crossing_nodes(flow: Flow, border: int) -> list[Node]:
    """Return the values computed in units before ``border`` and read in unit ``border`` or later.

    The graph's outputs count as read by the last unit.
    """
    return crossings(flow)[border]


def crossings(flow: Flow) -> Mapping[int, list[Node]]:
    """Return ``crossing_nodes`` of every border."""
    last = max(flow.unit.values())
    found: defaultdict[int, list[Node]] = defaultdict(list)
    for node, unit in flow.unit.items():
        read_until = max((flow.unit.get(user, -1) for user in node.users), default=-1)
        end = last if node in flow.outputs else read_until
        for border in range(unit + 1, end + 1):
            found[border].append(node)
    return found


def _usual(nodes: Sequence[Node]) -> Node:
    """Return a node of a segment that is where it is without anything behind exchanges; the first if
    all moved. What moved draws no random numbers.
    """
    moved = ("behind", "late")
    return next((node for node in nodes if not any(map(node.meta.get, moved))), nodes[0])


def _code_of(node: Node) -> str:
    """Return what a node runs in Python that may read numbers on the host; "": nothing."""
    if isinstance(node.target, CustomFunction):
        return f"{op_name(node)} of the model"
    grouped = ops.row(node.target).grouped or op_name(node) in GROUPED
    if grouped and values(node)[0].dtype != torch.bfloat16:
        return "a product of experts in another type than bf16"
    return ""


def _numbers(
    members: Mapping[SegmentKey, Sequence[Node]],
) -> Iterator[tuple[int, int]]:
    """Yield (unit, number in the unit) of each segment, from which its random numbers follow.

    They are those without sequence parallelism: a segment that does nothing but gather has the
    number of the next one, and one on parts of sequences that of the replicated work beside it,
    unless both draw random numbers.
    """
    number = 0
    counts = False
    drawn = False
    before = (-1, -1)
    for (unit, level, _), nodes in members.items():
        draws = any(map(is_random, nodes))
        if (unit, level) != before or draws and drawn:
            number = number + counts if unit == before[0] else 0
            counts = False
            drawn = False
        yield unit, number
        counts |= not all(node.meta.get("moves", False) for node in nodes)
        drawn |= draws
        before = (unit, level)
