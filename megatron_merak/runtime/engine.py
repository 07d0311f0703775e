"""Runs forward, recomputation and backward of segments: autograd inside a segment, the engine
between segments.

In forward and backward a tensor-parallel collective is launched as soon as its input exists and
awaited where its output is first read. Other work overlaps with it: the weight gradients of the
segment that launched it, the other half of the micro-batch, or another micro-batch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..parallel.in_flight import Done, Work
from ..parallel.pulse import Pulse
from ..pipeline_parallel.ops import Kind
from ..segment import Collective, Common, In, LayerAxis, Segment
from .collectives import RowCounts, exchange_rows, launch, own_gradient
from .offload import OffloadedTapes, Packed
from .regather import Regather
from .units import ShardedPass
from .weights import Deferred, WeightGradients

Step = tuple[Kind, Segment]  # F (forward), R (recomputation) or B (backward) of one segment
Run = tuple[Step, ...]  # steps, none of which waits for a collective launched by another of them
SegmentCallback = Callable[[Segment], None]


class Enter(torch.autograd.Function):
    """Starts an autograd graph at a value without keeping the value alive, unlike a leaf tensor."""

    @staticmethod
    def forward(ctx, value, token):
        return value.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, None


class Tape(NamedTuple):
    """The autograd graph of one segment's forward.

    entries:   per input, the edge at which its gradient is returned; None without gradient.
    exits:     per output, the edge at which its gradient is supplied; None without gradient.
    regathers: the inputs that the backward all-gathers again.
    """

    entries: list[GradientEdge | None]
    exits: list[GradientEdge | None]
    regathers: tuple[Regather, ...]


class State:
    """All live values and gradients of one micro-batch, or of a half of it, on one stage.

    values:  by name; one whose transfer is in flight has an entry in ``works``, awaited at first
             use.
    shards:  this rank's shards of values that the backward all-gathers again, and how many readers
             have yet to keep one.
    grads:   gradients of values, summed over the readers that have run.
    pending: gradients whose transfer is in flight, awaited at first use.
    tape:    autograd graphs of the segments whose backward has not run.
    queue:   per segment, the products of weight gradients that were deferred to a W.
    rows:    of values whose rows were exchanged, how many.
    offloaded: what is in host memory of the tapes; None where all stay on the device.
    """

    def __init__(self, common: Common, training: bool, offloaded: OffloadedTapes | None = None):
        self.common = common
        self.training = training
        self.offloaded = offloaded
        self.values: dict[str, Tensor] = {}
        self.shards: dict[str, tuple[Tensor, int]] = {}
        self.works: dict[str, Work] = {}
        self.grads: dict[str, Tensor] = {}
        self.pending: dict[str, list[tuple[Work, Tensor]]] = {}
        self.tape: dict[Segment, Tape] = {}
        self.queue: list[tuple[Segment, list[Deferred]]] = []
        self.recomputed = False
        self.rows: dict[str, RowCounts] = {}

    def arriving(self, name: str, value: Tensor, work: Work) -> None:
        self.values[name], self.works[name] = value, work

    def value(self, name: str) -> Tensor:
        self.wait(name)
        return self.values[name]

    def wait(self, name: str) -> None:
        """Block until the value ``name`` has arrived. Waits once per work: gloo hangs when waited
        for twice.
        """
        if name in self.works:
            self.works.pop(name).wait()

    def take_shard(self, name: str) -> Tensor:
        """Return the shard of a value for one of its readers."""
        shard, readers = self.shards.pop(name)
        if readers > 1:
            self.shards[name] = (shard, readers - 1)
        return shard

    def arriving_grad(self, name: str, grad: Tensor, work: Work) -> None:
        self.pending.setdefault(name, []).append((work, grad))

    def add_grad(self, name: str, grad: Tensor) -> None:
        self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def take_grad(self, name: str) -> Tensor | None:
        self.wait_grad(name)
        return self.grads.pop(name, None)

    def wait_grad(self, name: str) -> None:
        """Block until the gradients of ``name`` have arrived.

        Separate from `wait`, because the value may be read before its gradients arrive.
        """
        for work, grad in self.pending.pop(name, ()):
            work.wait()
            self.add_grad(name, grad)

    def leftovers(self) -> list[str]:
        """Name what a finished micro-batch should have consumed and did not; empty if all
        is well.
        """
        tapes = (f"tape of unit {s.unit}" for s in self.tape)
        queued = (f"weight gradients of unit {s.unit}" for s, _ in self.queue)
        away = [] if self.offloaded is None else self.offloaded.leftovers()
        return [*self.works, *self.shards, *self.grads, *self.pending, *tapes, *queued, *away]


@dataclass(frozen=True, eq=False)
class Block:
    """Segments of one unit, or of consecutive units that are recomputed together from the inputs of
    the first.
    """

    segments: tuple[Segment, ...]
    recompute: bool

    @property
    def reads(self) -> dict[str, None]:
        return {i.value: None for s in self.segments for i in s.ins}

    @property
    def enters(self) -> dict[str, None]:
        outputs = {o.value: None for s in self.segments for o in s.outs}
        return {name: None for name in self.reads if name not in outputs}


class Interpreter:
    """Runs the segments of one stage.

    segments:            in forward order.
    recompute:           groups of consecutive units that keep only the inputs of each group and are
                         recomputed.
    outputs:             names of the values that leave the stage.
    group:               tensor-parallel ranks; None for a single rank.
    groups:              those of other axes, where there are several ranks.
    weights:             accumulates the weight gradients.
    overlap:             whether collectives overlap with other work; otherwise each is waited for
                         at once.
    wait_for_parameters: called before a segment's forward; returns when its parameters are
                         gathered.
    pulse:               where the launch of collectives is noted; None: nowhere.

    Attributes:
    kept:     names of the values that a forward keeps for recomputation.
    observer: called after each forward and backward of a segment, see `watching`; None: nobody
              watches.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        recompute: Collection[Sequence[int]],
        outputs: Collection[str],
        group: dist.ProcessGroup | None,
        weights: WeightGradients,
        device: torch.device,
        overlap: bool = True,
        wait_for_parameters: SegmentCallback = lambda segment: None,
        pulse: Pulse | None = None,
        groups: Mapping[LayerAxis, dist.ProcessGroup | None] = MappingProxyType({}),
    ):
        self._groups = {LayerAxis.TP: group, **groups}
        self._pulse = Pulse() if pulse is None else pulse
        self._wait_for_parameters = wait_for_parameters
        self.observer: Callable[..., None] | None = None
        self.segments = tuple(segments)
        self.weights = weights
        self.overlap = overlap
        self._token = torch.zeros((), requires_grad=True, device=device)
        self._trained = {s: [p for p in s.parameters if p.requires_grad] for s in self.segments}
        self._edges = {
            s: [get_gradient_edge(p) for p in trained] for s, trained in self._trained.items()
        }
        self.blocks = _blocks(self.segments, recompute)
        self._analyse(outputs)
        recompute_steps = [
            (Kind.R, s)
            for block in reversed(self.blocks)
            if block.recompute
            for s in block.segments
        ]
        self.forward_runs = _runs((Kind.F, s) for s in self.segments)
        self.recompute_runs = _runs(recompute_steps)
        self._backward_runs = {early: _runs(self._backward_steps(early)) for early in (False, True)}

    def _analyse(self, outputs: Collection[str]) -> None:
        """Find the last reader of each value, in the forward and in the recomputation of
        its block.
        """
        self._block_of = {s: block for block in self.blocks for s in block.segments}
        self._regathered = Counter(
            i.value for s in self.segments for i in s.ins if self._gathers_again(s, i)
        )
        read = {i.value for s in self.segments for i in s.ins} | set(outputs)
        counts = {o.counts for s in self.segments for o in s.outs if o.counts}
        self._only_counts = frozenset(counts - read)
        self.kept = frozenset(
            name for block in self.blocks if block.recompute for name in block.enters
        )
        self._last_read_forward: dict[Segment, list[str]] = {s: [] for s in self.segments}
        self._last_read_recompute: dict[Segment, list[str]] = {s: [] for s in self.segments}
        for name, segment in {i.value: s for s in self.segments for i in s.ins}.items():
            if name not in outputs:
                self._last_read_forward[segment].append(name)
        first_reader = {i.value: self._block_of[s] for s in reversed(self.segments) for i in s.ins}
        for block in (block for block in self.blocks if block.recompute):
            readers = {i.value: s for s in block.segments for i in s.ins}
            for name, segment in readers.items():
                # Blocks are recomputed last to first: a kept input is freed by the first block that
                # reads it.
                if name not in self.kept or first_reader[name] is block:
                    self._last_read_recompute[segment].append(name)

    def _backward_steps(self, recomputed: bool) -> Iterator[Step]:
        for block in reversed(self.blocks):
            if block.recompute and not recomputed:
                yield from ((Kind.R, s) for s in block.segments)
            yield from ((Kind.B, s) for s in reversed(block.segments))

    def backward_runs(self, state: State) -> tuple[Run, ...]:
        """Return the runs of a backward, without recomputation where an R has done it already."""
        return self._backward_runs[state.recomputed]

    def forward(self, state: State) -> None:
        """Run every segment. Only segments that are not recomputed keep a tape, and none does in
        evaluation.
        """
        execute([Pass(self, state, self.forward_runs)])

    def backward(self, state: State, on_complete: SegmentCallback | None = None) -> None:
        """Run the segments in reverse, recomputing those without a tape. ``state`` has the outputs'
        gradients already.

        on_complete: called after each segment, when its weight gradients are in ``main_grad``.
        """
        execute([Pass(self, state, self.backward_runs(state), on_complete=on_complete)])

    def perform(self, state: State, step: Step, defer: bool = False) -> None:
        """Run one step. defer: a backward leaves its weight gradients to `finish_weights`."""
        kind, segment = step
        block = self._block_of[segment]
        ends = segment is block.segments[-1]
        if kind is Kind.B:
            if ends and state.offloaded is not None:
                state.offloaded.take(segment.unit)
            self._backward(state, segment, defer)
            return
        recompute = kind is Kind.R
        keeps_tape = not block.recompute
        self._forward(state, segment, state.training and (keeps_tape or recompute), recompute)
        for name in (self._last_read_recompute if recompute else self._last_read_forward)[segment]:
            if recompute or not (state.training and name in self.kept):
                state.values.pop(name, None)
        if ends and not recompute and state.offloaded is not None:
            needed = (state.values[name] for name in self.kept if name in state.values)
            state.offloaded.send(segment.unit, needed)

    def take(self, state: State, name: str) -> Tensor:
        """Return a value of ``outputs`` and free it in ``state``, unless a recomputation will read
        it.
        """
        if state.training and name in self.kept:
            return state.value(name)
        state.wait(name)
        return state.values.pop(name)

    def finish_weights(
        self,
        state: State,
        on_complete: SegmentCallback | None = None,
        sharded_pass: ShardedPass | None = None,
    ) -> None:
        """Compute the weight gradients that a backward deferred, in its order."""
        for segment, products in state.queue:
            if sharded_pass is not None:
                sharded_pass.reach(segment.unit)
            self.weights.drain(products)
            if on_complete is not None:
                on_complete(segment)
        state.queue.clear()
        if sharded_pass is not None:
            sharded_pass.end()

    def _forward(self, state: State, segment: Segment, tape: bool, recompute: bool) -> None:
        self._wait_for_parameters(segment)
        if segment.random and state.training:
            state.common.seed(segment)
        values = [state.value(i.value) for i in segment.ins]
        if state.training:
            # Also where the tape is dropped, use grad mode and not no_grad: kernels are selected by
            # requires_grad, and the recomputation must run the same ones as the forward.
            values = [
                Enter.apply(v, self._token) if i.grad else v
                for i, v in zip(segment.ins, values, strict=True)
            ]
            entries = [
                get_gradient_edge(v) if i.grad else None
                for i, v in zip(segment.ins, values, strict=True)
            ]
            with nullcontext() if state.offloaded is None else state.offloaded.recording(segment):
                regathers = self._regathers(state, segment, values) if tape else {}
                self.weights.getters = {**regathers}
                self.weights.pack = partial(_keep, segment, state.offloaded)
                outs = segment.fn(state.common, *values)
            self.weights.getters = {}
            self.weights.pack = Tensor.detach
            if tape:
                exits = [get_gradient_edge(t) if t.requires_grad else None for t in outs]
                state.tape[segment] = Tape(entries, exits, tuple(regathers.values()))
        else:
            with torch.no_grad():
                outs = segment.fn(state.common, *values)
        if self.observer is not None:
            self.observer(Kind.R if recompute else Kind.F, segment, state.common, values, outs)
        for out, tensor in zip(segment.outs, outs, strict=True):
            # What other blocks read is not launched again: none would wait for it (`leftovers`).
            if recompute and out.value not in self._block_of[segment].reads:
                continue
            if out.value in self._only_counts:
                continue
            tensor = tensor.detach()
            if tape and out.value in self._regathered:
                state.shards[out.value] = (tensor, self._regathered[out.value])
            if out.counts:
                counts = RowCounts.of(_named(out.counts, segment, values, outs))
                state.rows[out.value] = counts
                state.arriving(out.value, *self._exchange(tensor, counts, out.axis))
            elif out.collective:
                arriving = self._launch(tensor, out.collective, out.axis, out.inplace)
                state.arriving(out.value, *arriving)
            else:
                state.values[out.value] = tensor

    def _gathers_again(self, segment: Segment, read: In) -> bool:
        # Keys and values were gathered right before, where a backward recomputes.
        right_before = self._block_of[segment].recompute and read.axis is LayerAxis.CP
        return read.regather and not right_before

    def _regathers(
        self, state: State, segment: Segment, values: Sequence[Tensor]
    ) -> dict[Tensor, Regather]:
        regathers = {}
        for i, value in zip(segment.ins, values, strict=True):
            if self._gathers_again(segment, i):
                kept = _keep(segment, state.offloaded, state.take_shard(i.value))
                regathers[value] = Regather(kept, i.axis)
        return regathers

    def _backward(self, state: State, segment: Segment, defer: bool) -> None:
        entries, exits, regathers = state.tape.pop(segment)
        roots = []
        grads = []
        for out, edge in zip(segment.outs, exits, strict=True):
            grad = state.take_grad(out.value)
            if edge is not None and grad is not None:
                roots.append(edge)
                grads.append(own_gradient(grad, out.collective, self._groups[out.axis]))
        products: list[Deferred] = []
        if roots:
            input_edges = [edge for edge in entries if edge is not None]
            queued = defer or (self.overlap and any(i.collective for i in segment.ins))
            self.weights.queue = products if queued else None
            for regather in regathers:
                regather.start(self._launch)
            # Request parameters whose gradient `weights` accumulates, too: autograd runs only what
            # leads to a request.
            results = torch.autograd.grad(
                roots, input_edges + self._edges[segment], grads, allow_unused=True
            )
            if self.observer is not None:
                self.observer(Kind.B, segment, state.common, grads, results)
            self.weights.queue = products if defer else None
            # The graph's functions have what autograd did not save, such as a value that was
            # gathered again: that goes before gradients take memory.
            del roots, exits
            regathers = ()
            inputs = [i for i, edge in zip(segment.ins, entries, strict=True) if edge is not None]
            queued_tensors = [tensor for product in products for tensor in product.tensors]
            self._route(state, inputs, results[: len(input_edges)], (*grads, *queued_tensors))
            for parameter, grad in zip(
                self._trained[segment], results[len(input_edges) :], strict=True
            ):
                if grad is not None:
                    self.weights.add(parameter, grad)
            self.weights.queue = None
        if defer:
            state.queue.append((segment, products))
        else:
            self.weights.drain(products)

    def _route(
        self,
        state: State,
        inputs: Sequence[In],
        grads: Sequence[Tensor | None],
        others: Sequence[Tensor],
    ) -> None:
        # A gradient is all-reduced in place unless it shares memory with another gradient, with one
        # of the caller or with an operand of a queued weight gradient.
        storages = [g.untyped_storage().data_ptr() for g in (*grads, *others) if g is not None]
        for source, grad in zip(inputs, grads, strict=True):
            if grad is None:
                continue
            if source.collective is Collective.ROWS:
                counts = state.rows[source.value].reversed()
                arriving = self._exchange(grad, counts, source.axis)
                state.arriving_grad(source.value, *arriving)
            elif source.collective:
                exclusive = storages.count(grad.untyped_storage().data_ptr()) == 1
                arriving = self._launch(grad, source.collective, source.axis, exclusive)
                state.arriving_grad(source.value, *arriving)
            else:
                state.add_grad(source.value, grad)

    def _launch(
        self, tensor: Tensor, kind: Collective, axis: LayerAxis, inplace: bool
    ) -> tuple[Tensor, Work]:
        self._pulse.launched(kind)
        return self._launched(*launch(tensor, kind, self._groups[axis], inplace))

    def _exchange(self, rows: Tensor, counts: RowCounts, axis: LayerAxis) -> tuple[Tensor, Work]:
        self._pulse.launched(Collective.ROWS)
        return self._launched(*exchange_rows(rows, counts, self._groups[axis]))

    def _launched(self, tensor: Tensor, work: Work) -> tuple[Tensor, Work]:
        work = self._pulse.timed(work)
        if not self.overlap:
            work.wait()
            work = Done()
        return tensor, work


@dataclass(frozen=True)
class Pass:
    """A forward, recomputation or backward of one micro-batch, or of a half of it, through a stage.

    defer:        a backward leaves its weight gradients to a W.
    on_complete:  called after each segment's backward.
    sharded_pass: gathers sharded parameters and reduces sharded gradients; None where nothing is
                  sharded.
    """

    engine: Interpreter
    state: State
    runs: tuple[Run, ...]
    defer: bool = False
    on_complete: SegmentCallback | None = None
    sharded_pass: ShardedPass | None = None

    def perform(self, run: Run) -> None:
        for step in run:
            if self.sharded_pass is not None:
                self.sharded_pass.reach(step[1].unit)
            self.engine.perform(self.state, step, self.defer)
            if self.on_complete is not None and step[0] is Kind.B:
                self.on_complete(step[1])
        if self.sharded_pass is not None and run is self.runs[-1]:
            self.sharded_pass.end()


def execute(passes: Sequence[Pass]) -> None:
    """Interleave the passes run by run, so that the collectives of one overlap with the computation
    of the others.
    """
    for turn in zip_longest(*(p.runs for p in passes)):
        for current, run in zip(passes, turn, strict=True):
            if run is not None:
                current.perform(run)


def _keep(segment: Segment, offloaded: OffloadedTapes | None, tensor: Tensor) -> Packed | Tensor:
    """Return what a segment's tape keeps in the place of a tensor."""
    # detached: an output that is on its own tape would keep itself alive
    own = tensor.detach()
    return own if offloaded is None else offloaded.keep(segment, own)


def _named(name: str, segment: Segment, values: Sequence[Tensor], outs: Sequence[Tensor]) -> Tensor:
    """Return what a segment has read, or computed, under a name."""
    names = [read.value for read in segment.ins] + [computed.value for computed in segment.outs]
    return (*values, *outs)[names.index(name)]


def _blocks(segments: Sequence[Segment], recompute: Collection[Sequence[int]]) -> tuple[Block, ...]:
    run_of = {unit: tuple(run) for run in recompute for unit in run}
    segments_of: dict[tuple[int, ...], list[Segment]] = {}
    for segment in segments:
        segments_of.setdefault(run_of.get(segment.unit, (segment.unit,)), []).append(segment)
    return tuple(
        Block(tuple(members), units[0] in run_of) for units, members in segments_of.items()
    )


def _runs(steps: Iterator[Step] | Sequence[Step]) -> tuple[Run, ...]:
    """Split steps into runs: a new run begins at a step that waits for a collective launched by the
    current run.
    """
    runs: list[list[Step]] = [[]]
    values: dict[str, None] = {}
    grads: dict[str, None] = {}
    for kind, segment in steps:
        backward = kind is Kind.B
        waits = (
            any(o.value in grads for o in segment.outs)
            if backward
            else any(i.value in values for i in segment.ins)
        )
        if waits:
            runs.append([])
            values.clear()
            grads.clear()
        runs[-1].append((kind, segment))
        if backward:
            grads |= {i.value: None for i in segment.ins if i.collective}
        else:
            values |= {o.value: None for o in segment.outs if o.collective}
    return tuple(tuple(run) for run in runs if run)
