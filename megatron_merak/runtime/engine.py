"""Runs segments forward, again and backward. Autograd works inside a segment; between segments the engine decides.

So a tensor-parallel all-reduce is launched as soon as its value exists and awaited where the value is first read, in
both directions, and the weight gradients of the segment that launched it run meanwhile.
"""

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..segment import Common, In, Segment
from .weights import WeightGradients

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Enter(torch.autograd.Function):
    """Starts a tape at a value without keeping the value alive, as a leaf tensor would."""

    @staticmethod
    def forward(ctx, value, token):
        return value.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, None


class State:
    """Everything alive of one micro-batch on one stage.

    A value or gradient whose transfer is under way is in ``values`` (or ``pending``) with its work, awaited at first
    use.
    """

    def __init__(self, common: Common, training: bool):
        self.common, self.training = common, training
        self.values: dict[str, Tensor] = {}
        self.works: dict[str, dist.Work] = {}
        self.grads: dict[str, Tensor] = {}
        self.pending: dict[str, list[tuple[dist.Work, Tensor]]] = {}
        self.tape: dict[Segment, tuple[list[GradientEdge | None], list[GradientEdge | None]]] = {}

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
        return [*self.works, *self.grads, *self.pending, *(f"tape of unit {s.unit}" for s in self.tape)]


class Engine:
    """Runs the segments of one stage.

    segments: in forward order. recompute: units that keep no tape. outputs: values that leave the stage.
    group: tensor-parallel ranks, None for one. weights: where weight gradients go.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        recompute: Collection[int],
        outputs: Collection[str],
        group: dist.ProcessGroup | None,
        weights: WeightGradients,
        device: torch.device,
    ):
        self.segments, self.recompute, self.group, self.weights = tuple(segments), frozenset(recompute), group, weights
        self._token = torch.zeros((), requires_grad=True, device=device)
        self._trained = {s: [p for p in s.parameters if p.requires_grad] for s in self.segments}
        self._edges = {s: [get_gradient_edge(p) for p in trained] for s, trained in self._trained.items()}
        self._by_unit: dict[int, list[Segment]] = {}
        for segment in self.segments:
            self._by_unit.setdefault(segment.unit, []).append(segment)
        self._analyse(outputs)

    def _analyse(self, outputs: Collection[str]) -> None:
        """Who reads a value last, in the forward and in the recomputation of its unit."""
        unit_of = {o.value: s.unit for s in self.segments for o in s.outs}
        last = {i.value: s for s in self.segments for i in s.ins}
        self._kept = frozenset(
            i.value for s in self.segments for i in s.ins if s.unit in self.recompute and unit_of.get(i.value) != s.unit
        )
        self._dies: dict[Segment, list[str]] = {s: [] for s in self.segments}
        self._dies_again: dict[Segment, list[str]] = {s: [] for s in self.segments}
        for name, segment in last.items():
            if name not in outputs:
                self._dies[segment].append(name)
        first_reader = {i.value: s.unit for s in reversed(self.segments) for i in s.ins}
        for unit in self.recompute:
            readers = {i.value: s for s in self._by_unit[unit] for i in s.ins}
            for name, segment in readers.items():
                # Units recompute last to first: a kept input dies with the first unit that reads it.
                if name not in self._kept or first_reader[name] == unit:
                    self._dies_again[segment].append(name)
        self._inner = {unit: frozenset(i.value for s in ss for i in s.ins) for unit, ss in self._by_unit.items()}

    def forward(self, state: State) -> None:
        """Run every segment; those of units that recompute keep no tape, none does when the state is not training."""
        for segment in self.segments:
            self._forward(state, segment, tape=state.training and segment.unit not in self.recompute)
            for name in self._dies[segment]:
                if not (state.training and name in self._kept):
                    state.values.pop(name, None)

    def take(self, state: State, name: str) -> Tensor:
        """A value of ``outputs``; the state forgets it unless a recomputation will read it."""
        if state.training and name in self._kept:
            return state.value(name)
        state.wait(name)
        return state.values.pop(name)

    def backward(self, state: State, done: Callable[[Segment], None] | None = None) -> None:
        """Run the segments in reverse, recomputing what has no tape. Gradients of the outputs are already in ``state``.

        ``done`` is called after each segment, when its weight gradients are in ``main_grad``.
        """
        for unit, segments in reversed(self._by_unit.items()):
            if unit in self.recompute:
                self._recompute(state, unit)
            for segment in reversed(segments):
                self._backward(state, segment)
                if done is not None:
                    done(segment)

    def _recompute(self, state: State, unit: int) -> None:
        for segment in self._by_unit[unit]:
            self._forward(state, segment, tape=True, again=True)
            for name in self._dies_again[segment]:
                state.values.pop(name, None)

    def _forward(self, state: State, segment: Segment, tape: bool, again: bool = False) -> None:
        if segment.random and state.training:
            state.common.seed(segment)
        values = [state.value(i.value) for i in segment.ins]
        if state.training:
            # Grad mode with the tape dropped, not no_grad: kernels are chosen by requires_grad, and a recomputed
            # forward must be the same one.
            values = [Enter.apply(v, self._token) if i.grad else v for i, v in zip(segment.ins, values, strict=True)]
            entries = [get_gradient_edge(v) if i.grad else None for i, v in zip(segment.ins, values, strict=True)]
            outs = segment.fn(state.common, *values)
            if tape:
                state.tape[segment] = entries, [get_gradient_edge(t) if t.requires_grad else None for t in outs]
        else:
            with torch.no_grad():
                outs = segment.fn(state.common, *values)
        for out, tensor in zip(segment.outs, outs, strict=True):
            if again and out.value not in self._inner[segment.unit]:
                continue
            tensor = tensor.detach()
            if out.reduce:
                tensor, work = self._launch(tensor, out.inplace, out.reduce)
                state.arriving(out.value, tensor, work)
            else:
                state.values[out.value] = tensor

    def _backward(self, state: State, segment: Segment) -> None:
        entries, exits = state.tape.pop(segment)
        roots, grads = [], []
        for out, edge in zip(segment.outs, exits, strict=True):
            grad = state.take_grad(out.value)
            if edge is not None and grad is not None:
                roots.append(edge)
                grads.append(grad)
        if not roots:
            return
        wanted = [edge for edge in entries if edge is not None]
        self.weights.deferred = any(i.reduce for i in segment.ins)
        # Parameters whose gradient the sink takes are asked for too: autograd runs only what leads to a request.
        found = torch.autograd.grad(roots, wanted + self._edges[segment], grads, allow_unused=True)
        self.weights.deferred = False
        del roots, exits
        inputs = [i for i, edge in zip(segment.ins, entries, strict=True) if edge is not None]
        self._route(state, inputs, found[: len(wanted)], grads)
        for parameter, grad in zip(self._trained[segment], found[len(wanted) :], strict=True):
            if grad is not None:
                self.weights.add(parameter, grad)
        self.weights.drain()

    def _route(
        self, state: State, inputs: Sequence[In], found: Sequence[Tensor | None], roots: Sequence[Tensor]
    ) -> None:
        # A gradient is summed in place unless its memory is also another's, the caller's or a queued weight gradient's.
        shared = (*found, *roots, *self.weights.queued)
        storages = [g.untyped_storage().data_ptr() for g in shared if g is not None]
        for source, grad in zip(inputs, found, strict=True):
            if grad is None:
                continue
            if source.reduce:
                grad, work = self._launch(grad, storages.count(grad.untyped_storage().data_ptr()) == 1, "sum")
                state.arriving_grad(source.value, grad, work)
            else:
                state.add_grad(source.value, grad)

    def _launch(self, tensor: Tensor, inplace: bool, reduce: str) -> tuple[Tensor, dist.Work]:
        if not (inplace and tensor.is_contiguous()):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor, dist.all_reduce(tensor, op=_REDUCTIONS[reduce], group=self.group, async_op=True)
