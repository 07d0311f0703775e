"""Runs segments forward, again and backward. Autograd works inside a segment; between segments the engine decides.

So a tensor-parallel collective is launched as soon as its value exists and awaited where the value is first read, in
both directions, and what else there is to do runs meanwhile: the weight gradients of the segment that launched it, the
other half of the micro-batch, or another micro-batch.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..pipeline_parallel.ops import Kind
from ..segment import Collective, Common, In, Segment
from .collectives import Done, launch, own_gradient
from .regather import Regather
from .units import Tour
from .weights import Product, WeightGradients

Step = tuple[Kind, Segment]  # F, R (forward again) or B of one segment
Run = tuple[Step, ...]  # steps none of which waits for a collective that another of them launched
Report = Callable[[Segment], None]


class Enter(torch.autograd.Function):
    """Starts a tape at a value without keeping the value alive, as a leaf tensor would."""

    @staticmethod
    def forward(ctx, value, token):
        return value.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, None


class Tape(NamedTuple):
    """Of one segment that ran: where its gradients come out and go in, and inputs that are gathered again."""

    entries: list[GradientEdge | None]
    exits: list[GradientEdge | None]
    regathers: tuple[Regather, ...]


class State:
    """Everything alive of one micro-batch, or of a half of it, on one stage.

    A value or gradient whose transfer is under way is in ``values`` (or ``pending``) with its work, awaited at first
    use. ``shards``: this rank's of values that the backward gathers again, until their reader has run. ``queue``:
    products whose weight gradients wait for a W.
    """

    def __init__(self, common: Common, training: bool):
        self.common, self.training = common, training
        self.values: dict[str, Tensor] = {}
        self.shards: dict[str, Tensor] = {}
        self.works: dict[str, dist.Work] = {}
        self.grads: dict[str, Tensor] = {}
        self.pending: dict[str, list[tuple[dist.Work, Tensor]]] = {}
        self.tape: dict[Segment, Tape] = {}
        self.queue: list[tuple[Segment, list[Product]]] = []
        self.recomputed = False

    def arriving(self, name: str, value: Tensor, work: dist.Work) -> None:
        self.values[name], self.works[name] = value, work

    def value(self, name: str) -> Tensor:
        self.wait(name)
        return self.values[name]

    def wait(self, name: str) -> None:
        """Return when the value ``name`` has arrived. A work is awaited once: gloo hangs at a second time."""
        if name in self.works:
            self.works.pop(name).wait()

    def arriving_grad(self, name: str, grad: Tensor, work: dist.Work) -> None:
        self.pending.setdefault(name, []).append((work, grad))

    def add_grad(self, name: str, grad: Tensor) -> None:
        self.grads[name] = self.grads[name] + grad if name in self.grads else grad

    def take_grad(self, name: str) -> Tensor | None:
        self.wait_grad(name)
        return self.grads.pop(name, None)

    def wait_grad(self, name: str) -> None:
        """Return when the gradients of ``name`` have arrived: awaited apart from its value, whose readers may come
        before them.
        """
        for work, grad in self.pending.pop(name, ()):
            work.wait()
            self.add_grad(name, grad)

    def leftovers(self) -> list[str]:
        """What a finished micro-batch should not have left behind."""
        tapes = (f"tape of unit {s.unit}" for s in self.tape)
        queued = (f"weight gradients of unit {s.unit}" for s, _ in self.queue)
        return [*self.works, *self.shards, *self.grads, *self.pending, *tapes, *queued]


@dataclass(frozen=True, eq=False)
class Block:
    """Segments of one unit, or of a run of units that are recomputed together from what enters the first."""

    segments: tuple[Segment, ...]
    recompute: bool

    @property
    def reads(self) -> dict[str, None]:
        return {i.value: None for s in self.segments for i in s.ins}

    @property
    def enters(self) -> dict[str, None]:
        made = {o.value: None for s in self.segments for o in s.outs}
        return {name: None for name in self.reads if name not in made}


class Engine:
    """Runs the segments of one stage.

    segments: in forward order. recompute: runs of units that keep no tape, only what enters each run. outputs: values
    that leave the stage. group: tensor-parallel ranks, None for one. weights: where weight gradients go. overlap: let
    collectives run while other work is done; else wait for each at once. arrive: called before a segment's forward,
    returns when its parameters are there. ``kept``: values that a forward keeps for recomputation.
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
        arrive: Report = lambda segment: None,
    ):
        self._arrive = arrive
        self.segments, self.group, self.weights, self.overlap = tuple(segments), group, weights, overlap
        self._token = torch.zeros((), requires_grad=True, device=device)
        self._trained = {s: [p for p in s.parameters if p.requires_grad] for s in self.segments}
        self._edges = {s: [get_gradient_edge(p) for p in trained] for s, trained in self._trained.items()}
        self.blocks = _blocks(self.segments, recompute)
        self._analyse(outputs)
        again = [(Kind.R, s) for block in reversed(self.blocks) if block.recompute for s in block.segments]
        self.forward_runs = _runs((Kind.F, s) for s in self.segments)
        self.recompute_runs = _runs(again)
        self._backward_runs = {done: _runs(self._backward_steps(done)) for done in (False, True)}

    def _analyse(self, outputs: Collection[str]) -> None:
        """Who reads a value last, in the forward and in the recomputation of its block."""
        self._block_of = {s: block for block in self.blocks for s in block.segments}
        self._regathered = frozenset(i.value for s in self.segments for i in s.ins if i.regather)
        self.kept = frozenset(name for block in self.blocks if block.recompute for name in block.enters)
        self._dies: dict[Segment, list[str]] = {s: [] for s in self.segments}
        self._dies_again: dict[Segment, list[str]] = {s: [] for s in self.segments}
        for name, segment in {i.value: s for s in self.segments for i in s.ins}.items():
            if name not in outputs:
                self._dies[segment].append(name)
        first_reader = {i.value: self._block_of[s] for s in reversed(self.segments) for i in s.ins}
        for block in (block for block in self.blocks if block.recompute):
            readers = {i.value: s for s in block.segments for i in s.ins}
            for name, segment in readers.items():
                # Blocks recompute last to first: a kept input dies with the first block that reads it.
                if name not in self.kept or first_reader[name] is block:
                    self._dies_again[segment].append(name)

    def _backward_steps(self, recomputed: bool) -> Iterator[Step]:
        for block in reversed(self.blocks):
            if block.recompute and not recomputed:
                yield from ((Kind.R, s) for s in block.segments)
            yield from ((Kind.B, s) for s in reversed(block.segments))

    def backward_runs(self, state: State) -> tuple[Run, ...]:
        """What a backward has left to do: all, or all but what was recomputed before."""
        return self._backward_runs[state.recomputed]

    def forward(self, state: State) -> None:
        """Run every segment; those of recomputed units keep no tape, none does when the state is not training."""
        execute([Pass(self, state, self.forward_runs)])

    def backward(self, state: State, done: Report | None = None) -> None:
        """Run the segments in reverse, recomputing what has no tape. Gradients of the outputs are already in ``state``.

        ``done`` is called after each segment, when its weight gradients are in ``main_grad``.
        """
        execute([Pass(self, state, self.backward_runs(state), done=done)])

    def perform(self, state: State, step: Step, hold: bool = False) -> None:
        """Do one step. ``hold``: a backward leaves its weight gradients to `finish_weights`."""
        kind, segment = step
        if kind is Kind.B:
            self._backward(state, segment, hold)
            return
        again = kind is Kind.R
        keeps = not self._block_of[segment].recompute
        self._forward(state, segment, state.training and (keeps or again), again)
        for name in (self._dies_again if again else self._dies)[segment]:
            if again or not (state.training and name in self.kept):
                state.values.pop(name, None)

    def take(self, state: State, name: str) -> Tensor:
        """A value of ``outputs``; the state forgets it unless a recomputation will read it."""
        if state.training and name in self.kept:
            return state.value(name)
        state.wait(name)
        return state.values.pop(name)

    def finish_weights(self, state: State, done: Report | None = None, tour: Tour | None = None) -> None:
        """Work off the weight gradients that a backward with ``hold`` left, in its order."""
        for segment, products in state.queue:
            if tour is not None:
                tour.reach(segment.unit)
            self.weights.drain(products)
            if done is not None:
                done(segment)
        state.queue.clear()
        if tour is not None:
            tour.end()

    def _forward(self, state: State, segment: Segment, tape: bool, again: bool) -> None:
        self._arrive(segment)
        if segment.random and state.training:
            state.common.seed(segment)
        values = [state.value(i.value) for i in segment.ins]
        if state.training:
            # Grad mode with the tape dropped, not no_grad: kernels are chosen by requires_grad, and a recomputed
            # forward must be the same one.
            values = [Enter.apply(v, self._token) if i.grad else v for i, v in zip(segment.ins, values, strict=True)]
            entries = [get_gradient_edge(v) if i.grad else None for i, v in zip(segment.ins, values, strict=True)]
            regathers = self._regathers(state, segment, values) if tape else {}
            self.weights.getters = regathers
            outs = segment.fn(state.common, *values)
            self.weights.getters = {}
            if tape:
                exits = [get_gradient_edge(t) if t.requires_grad else None for t in outs]
                state.tape[segment] = Tape(entries, exits, tuple(regathers.values()))
        else:
            with torch.no_grad():
                outs = segment.fn(state.common, *values)
        for out, tensor in zip(segment.outs, outs, strict=True):
            if again and out.value not in self._block_of[segment].reads:
                continue
            tensor = tensor.detach()
            if tape and out.value in self._regathered:
                state.shards[out.value] = tensor
            if out.collective:
                state.arriving(out.value, *self._launch(tensor, out.collective, out.inplace))
            else:
                state.values[out.value] = tensor

    def _regathers(self, state: State, segment: Segment, values: Sequence[Tensor]) -> dict[Tensor, Regather]:
        pairs = zip(segment.ins, values, strict=True)
        return {value: Regather(state.shards.pop(i.value)) for i, value in pairs if i.regather}

    def _backward(self, state: State, segment: Segment, hold: bool) -> None:
        entries, exits, regathers = state.tape.pop(segment)
        roots, grads = [], []
        for out, edge in zip(segment.outs, exits, strict=True):
            grad = state.take_grad(out.value)
            if edge is not None and grad is not None:
                roots.append(edge)
                grads.append(own_gradient(grad, out.collective, self.group))
        products: list[Product] = []
        if roots:
            wanted = [edge for edge in entries if edge is not None]
            later = hold or (self.overlap and any(i.collective for i in segment.ins))
            self.weights.queue = products if later else None
            for regather in regathers:
                regather.start(self._launch)
            # Parameters whose gradient the sink takes are asked for too: autograd runs only what leads to a request.
            found = torch.autograd.grad(roots, wanted + self._edges[segment], grads, allow_unused=True)
            self.weights.queue = products if hold else None
            del roots, exits
            inputs = [i for i, edge in zip(segment.ins, entries, strict=True) if edge is not None]
            held = [tensor for product in products for tensor in product.tensors]
            self._route(state, inputs, found[: len(wanted)], (*grads, *held))
            for parameter, grad in zip(self._trained[segment], found[len(wanted) :], strict=True):
                if grad is not None:
                    self.weights.add(parameter, grad)
            self.weights.queue = None
        if hold:
            state.queue.append((segment, products))
        else:
            self.weights.drain(products)

    def _route(
        self, state: State, inputs: Sequence[In], found: Sequence[Tensor | None], others: Sequence[Tensor]
    ) -> None:
        # A gradient is summed in place unless its memory is also another's, the caller's or a queued weight gradient's.
        storages = [g.untyped_storage().data_ptr() for g in (*found, *others) if g is not None]
        for source, grad in zip(inputs, found, strict=True):
            if grad is None:
                continue
            if source.collective:
                alone = storages.count(grad.untyped_storage().data_ptr()) == 1
                state.arriving_grad(source.value, *self._launch(grad, source.collective, alone))
            else:
                state.add_grad(source.value, grad)

    def _launch(self, tensor: Tensor, kind: Collective, inplace: bool) -> tuple[Tensor, dist.Work]:
        tensor, work = launch(tensor, kind, self.group, inplace)
        if not self.overlap:
            work.wait()
            work = Done()
        return tensor, work


@dataclass(frozen=True)
class Pass:
    """A forward, recomputation or backward of one micro-batch, or of a half, through a stage.

    hold: weight gradients wait for a W. done: called after each segment's backward. tour: brings what is sharded.
    """

    engine: Engine
    state: State
    runs: tuple[Run, ...]
    hold: bool = False
    done: Report | None = None
    tour: Tour | None = None

    def perform(self, run: Run) -> None:
        for step in run:
            if self.tour is not None:
                self.tour.reach(step[1].unit)
            self.engine.perform(self.state, step, self.hold)
            if self.done is not None and step[0] is Kind.B:
                self.done(step[1])
        if self.tour is not None and run is self.runs[-1]:
            self.tour.end()


def execute(passes: Sequence[Pass]) -> None:
    """Let the passes take turns, run by run: what one launched is under way while the others compute."""
    for turn in zip_longest(*(p.runs for p in passes)):
        for one, run in zip(passes, turn, strict=True):
            if run is not None:
                one.perform(run)


def _blocks(segments: Sequence[Segment], recompute: Collection[Sequence[int]]) -> tuple[Block, ...]:
    run_of = {unit: tuple(run) for run in recompute for unit in run}
    found: dict[tuple[int, ...], list[Segment]] = {}
    for segment in segments:
        found.setdefault(run_of.get(segment.unit, (segment.unit,)), []).append(segment)
    return tuple(Block(tuple(members), units[0] in run_of) for units, members in found.items())


def _runs(steps: Iterator[Step] | Sequence[Step]) -> tuple[Run, ...]:
    """Cut before every step that waits for a collective of the run that it would belong to."""
    runs: list[list[Step]] = [[]]
    values: dict[str, None] = {}
    grads: dict[str, None] = {}
    for kind, segment in steps:
        backward = kind is Kind.B
        waits = any(o.value in grads for o in segment.outs) if backward else any(i.value in values for i in segment.ins)
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
