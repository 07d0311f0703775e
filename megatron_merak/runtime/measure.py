"""What a rank keeps for its backwards, counted while it runs: the measured side of the planner's memory model."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..pipeline_parallel.ops import Entry, ops_of
from .executor import Executor, StepLoss
from .stage import Batch, Part
from .weights import Gradient


class _Saved:
    """A tensor on a tape. Its end is the end of its place on the tape."""

    __slots__ = ("tensor", "__weakref__")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class MeasuredExecutor(Executor):
    """An executor that notes in ``peak`` the most bytes that it kept at once for backwards, of all its stages.

    Kept is what is on tapes, what recomputations will read, and what weight gradients of a later W are made of; a
    storage counts once, and parameters and what a batch gives (masks, tables) do not. It looks whenever a tape grows
    and between ops; the numbers are those of an ordinary run, its speed is not.
    """

    def run(self, batches: Sequence[Batch], *args: Any, **more: Any) -> StepLoss | None:
        self.peak = 0
        self._begun: set[tuple[int, int]] = set()
        self._tapes: dict[int, _Count] = {}
        sinks = list(dict.fromkeys(stage.held.weights for stage in self.stages.values()))
        usual = [sink.grads for sink in sinks]
        for sink in sinks:
            sink.grads = _ByPlace(sink.grads)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
                return super().run(batches, *args, **more)
        finally:
            for sink, grads in zip(sinks, usual, strict=True):
                sink.grads = grads

    def _run(self, entry: Entry) -> None:
        if ops_of(entry)[0].kind.is_compute:
            self._begun |= {(op.stage, op.microbatch) for op in ops_of(entry)}
        super()._run(entry)
        self._look()

    def _pack(self, tensor: Tensor) -> _Saved:
        # Detached: a tensor that is on its own tape would keep it alive.
        key, saved = _storage(tensor), _Saved(tensor.detach())
        count = self._tapes.setdefault(key, _Count(tensor.untyped_storage().nbytes()))
        count.places += 1
        weakref.finalize(saved, _release, self._tapes, key)
        self._look()
        return saved

    def _look(self) -> None:
        kept = {key: count.size for key, count in self._tapes.items()}
        kept |= {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in self._held()}
        for tensor in self._outside():
            kept.pop(_storage(tensor), None)
        self.peak = max(self.peak, sum(kept.values()))

    def _admitted(self) -> Iterator[Part]:
        """Micro-batches whose forward has begun; for others there may be received values, which nothing keeps yet."""
        for index, stage in self.stages.items():
            for microbatch, parts in stage.parts.items():
                if (index, microbatch) in self._begun:
                    yield from parts

    def _held(self) -> Iterator[Tensor]:
        """Values that the states keep for recomputation, shards that are gathered again, and what waits for a W."""
        for part in self._admitted():
            for name, value in part.state.values.items():
                if name in part.runner.engine.kept:
                    yield value
            running = part.runner.engine.weights.getters.values()
            regathers = [*running, *(each for tape in part.state.tape.values() for each in tape.regathers)]
            yield from (each.shard for each in regathers)
            for _, products in part.state.queue:
                for product in products:
                    yield from product.tensors

    def _outside(self) -> Iterator[Tensor]:
        for part in self._admitted():
            yield from part.state.common.values()
            for segment in part.program.segments:
                yield from segment.parameters


class _ByPlace(dict[Tensor, Gradient]):
    """Parameter -> gradient, found by where the parameter is: what a hook unpacks is never the parameter itself."""

    def __init__(self, grads: Mapping[Tensor, Gradient]):
        super().__init__(grads)
        self._found = {self._place(parameter): grad for parameter, grad in grads.items()}

    @staticmethod
    def _place(tensor: Tensor) -> tuple[int, torch.Size]:
        return tensor.data_ptr(), tensor.shape

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and self._place(tensor) in self._found

    def __getitem__(self, tensor: Tensor) -> Gradient:
        return self._found[self._place(tensor)]


class _Count:
    """Bytes of a storage, and at how many places of tapes it is."""

    def __init__(self, size: int):
        self.size, self.places = size, 0


def _release(tapes: dict[int, _Count], key: int) -> None:
    tapes[key].places -= 1
    if not tapes[key].places:
        del tapes[key]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
