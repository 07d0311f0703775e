"""Measures the memory that a rank keeps for its backwards, to compare with the planner's memory
model.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_merak.pipeline_parallel.ops import Entry, ops_of
from megatron_merak.runtime import regather
from megatron_merak.runtime.engine import Interpreter, State
from megatron_merak.runtime.executor import Executor, StepLoss
from megatron_merak.runtime.stage import Batch, MicroBatchPart
from megatron_merak.runtime.weights import Gradient
from megatron_merak.segment import Segment


class _Saved:
    """A tensor saved on a tape; the tape drops this object when it no longer needs the tensor."""

    __slots__ = ("tensor", "__weakref__")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class MeasuredExecutor(Executor):
    """An executor that records in ``peak`` the most bytes kept for backwards at one time, over all
    its stages.

    Counted are tensors saved on tapes, inputs of recomputations, and operands of deferred weight
    gradients. A storage counts once; parameters and tensors derived from the batch alone (masks,
    tables) do not count. It measures between ops, whenever a tape grows and after the backward of
    each unit, so a run is slower, but its numerical results are those of an `Executor`.
    """

    def run(self, batches: Sequence[Batch], *args: Any, **more: Any) -> StepLoss | None:
        self.peak = 0
        self._begun: set[tuple[int, int]] = set()
        self._tapes: dict[int, _Count] = {}
        sinks = list(dict.fromkeys(stage.parameters.weights for stage in self.stages.values()))
        original = [sink.grads for sink in sinks]
        for sink in sinks:
            sink.grads = _ByAddress(sink.grads)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor),
                mock.patch.object(regather, "_pack", partial(self._pack_beside, regather._pack)),
                mock.patch.object(regather, "unpack", partial(_unpack, regather.unpack)),
                mock.patch.object(Interpreter, "_backward", self._measured(Interpreter._backward)),
            ):
                return super().run(batches, *args, **more)
        finally:
            for sink, grads in zip(sinks, original, strict=True):
                sink.grads = grads

    def _run(self, entry: Entry) -> None:
        if ops_of(entry)[0].kind.is_compute:
            self._begun |= {(op.stage, op.microbatch) for op in ops_of(entry)}
        super()._run(entry)
        self._measure()

    def _measured(self, backward: Callable[..., None]) -> Callable[..., None]:
        """The backward of a unit may leave more operands of weight gradients than its tape had."""

        def measured(interpreter: Interpreter, state: State, segment: Segment, *args: Any) -> None:
            backward(interpreter, state, segment, *args)
            if all(other.unit != segment.unit for other in state.tape):
                self._measure()

        return measured

    def _pack(self, tensor: Tensor) -> _Saved:
        # Detached: a tensor that is on its own tape would keep it alive.
        key = _storage(tensor)
        saved = _Saved(tensor.detach())
        count = self._tapes.setdefault(key, _Count(tensor.untyped_storage().nbytes()))
        count.uses += 1
        weakref.finalize(saved, _release, self._tapes, key)
        self._measure()
        return saved

    def _pack_beside(self, pack, getters, keep, tensor: Tensor) -> Any:
        """Where a tape does not keep gathered values, its hooks are the only ones."""
        packed = pack(getters, keep, tensor)
        return self._pack(packed) if isinstance(packed, Tensor) else packed

    def _measure(self) -> None:
        kept = {key: count.size for key, count in self._tapes.items()}
        kept |= {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in self._kept()}
        for tensor in self._excluded():
            kept.pop(_storage(tensor), None)
        self.peak = max(self.peak, sum(kept.values()))

    def _begun_parts(self) -> Iterator[MicroBatchPart]:
        """Yield the parts of micro-batches whose forward has begun; others may only have received
        values.
        """
        for index, stage in self.stages.items():
            for microbatch, parts in stage.parts.items():
                if (index, microbatch) in self._begun:
                    yield from parts

    def _kept(self) -> Iterator[Tensor]:
        """Yield inputs of recomputations, shards to all-gather again, operands of deferred weight
        gradients, and what is on the device of offloaded tapes.
        """
        for part in self._begun_parts():
            for name, value in part.state.values.items():
                if name in part.runner.engine.kept:
                    yield value
            running: list[Any] = [*part.runner.engine.weights.getters.values()]  # some a `Regather`
            for tape in part.state.tape.values():
                running += tape.regathers
            shards = (getattr(each, "shard", None) for each in running)
            yield from (shard for shard in shards if isinstance(shard, Tensor))
            if part.state.offloaded is not None:
                yield from part.state.offloaded.on_device()
            for _, products in part.state.queue:
                for product in products:
                    yield from product.tensors

    def _excluded(self) -> Iterator[Tensor]:
        for part in self._begun_parts():
            yield from part.state.common.values()
            for segment in part.program.segments:
                yield from segment.parameters


class _ByAddress(dict[Tensor, Gradient]):
    """Parameter -> gradient, looked up by address and shape: a hook never unpacks the parameter
    object itself.
    """

    def __init__(self, grads: Mapping[Tensor, Gradient]):
        super().__init__(grads)
        self._grads = {self._key(parameter): grad for parameter, grad in grads.items()}

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, torch.Size]:
        return tensor.data_ptr(), tensor.shape

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and self._key(tensor) in self._grads

    def __getitem__(self, tensor: Tensor) -> Gradient:
        return self._grads[self._key(tensor)]


class _Count:
    """Size of a storage in bytes, and how many saved tensors use it."""

    def __init__(self, size: int):
        self.size = size
        self.uses = 0


def _unpack(unpack, packed: Any) -> Tensor:
    return packed.tensor if isinstance(packed, _Saved) else unpack(packed)


def _release(tapes: dict[int, _Count], key: int) -> None:
    tapes[key].uses -= 1
    if not tapes[key].uses:
        del tapes[key]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
