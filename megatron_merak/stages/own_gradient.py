"""The reduced gradient that an optimizer consumes, as increments have it, and what forwards change.

An `OwnGradient` copies what this rank writes of it; `fill_gradient` reads it again, in any layout.

Ranks write what they own, each element once: where several own the same, as replicas without
sharding do, each writes a part of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.increments import Increment, PlacedTensor, kind_of, read_gradient
from ..checkpoint.shard import Shard
from ..checkpoint.stored import read_stored
from ..errors import CheckpointError
from ..parallel.buffers import ParameterBuffer
from ..parallel.mesh import Mesh
from ..parallel.pieces import Pieces
from .trained_model import TrainedModel

_RUNNING = "running/"  # what the names of state that forwards change begin with


@dataclass(frozen=True)
class _Span:
    """Elements [start, stop) of the owned range ``number``, that this rank writes."""

    number: int
    start: int
    stop: int


class OwnGradient:
    """Copies on the host of what this rank writes of the gradient, in memory that all steps use.

    model: whose gradient it is.

    layout: where tensors are among what this rank writes, see ``IncrementWriter``.
    shards: the copies, as an increment has them.
    bytes:  of these.
    """

    def __init__(self, model: TrainedModel):
        buffer = model.buffer
        mesh = model.mesh
        self._buffer = buffer
        self._on_gpu = buffer.device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        spans = [*_written(buffer, mesh)]
        total = sum(span.stop - span.start for span in spans)
        self._host = torch.empty(total, dtype=torch.float32, pin_memory=self._on_gpu)
        self.bytes = self._host.nbytes
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.shards: list[Shard] = []
        names: list[str] = []
        offset = 0
        for span in spans:
            start = buffer.owned[span.number].start
            own = buffer.own_grads[span.number][span.start - start : span.stop - start]
            host = self._host[offset : offset + own.numel()]
            offset += own.numel()
            self._copies.append((host, own))
            for name, slot in buffer.slots.items():
                first = max(span.start, slot.start)
                last = min(span.stop, slot.stop)
                if slot.counted and first < last:
                    names.append(name)
                    self.shards.append(
                        Shard(
                            _key(name, buffer, mesh),
                            (slot.stop - slot.start,),
                            0,
                            ((first - slot.start, last - slot.start),),
                            tensor=host[first - span.start : last - span.start],
                        )
                    )
        self.layout = _layout(model, names)

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the gradient, which must be final; on a GPU, behind what its stream has to do."""
        for host, own in self._copies:
            host.copy_(own, non_blocking=self._on_gpu)
        if self._on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> None:
        """Wait until the last copy is complete; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()


def _key(name: str, buffer: ParameterBuffer, mesh: Mesh) -> str:
    """Return the name of a rank's parameter in increments; one for each rank that shards it."""
    return f"{mesh.sharing(buffer.slots[name].experts)[0]}/{name}"


def _written(buffer: ParameterBuffer, mesh: Mesh) -> Iterator[_Span]:
    """Yield what this rank writes: of what it owns, its part among the ranks that own the same.

    Parameters that another rank counts are left out; padding between two that it counts is not.
    """
    for at, bucket in enumerate(reversed(buffer.buckets)):
        # the order of `owned`, where the buffer is sharded; else there is one range of all
        number = at if buffer.sharded else 0
        start = bucket.start
        stop = bucket.stop
        index, copies = mesh.same(bucket.experts)
        if bucket.sharded:
            start, stop = buffer.shard_of(bucket)
            copies = 1 if bucket.experts else mesh.instances
            index = 0 if bucket.experts else mesh.copy_rank // mesh.shard_ranks
        low = start + (stop - start) * index // copies
        high = start + (stop - start) * (index + 1) // copies
        run: list[int] = []
        for slot in buffer.slots.values():
            first = max(low, slot.start)
            last = min(high, slot.stop)
            if first >= last:
                continue
            if slot.counted:
                run = [run[0] if run else first, last]
            elif run:
                yield _Span(number, *run)
                run = []
        if run:
            yield _Span(number, *run)


def _layout(model: TrainedModel, names: Sequence[str]) -> dict[str, list[PlacedTensor]]:
    """Return where the tensors of HuggingFace are in these parameters."""
    buffer = model.buffer
    flat = buffer.main_grad
    layout: dict[str, list[PlacedTensor]] = {}
    wanted = dict.fromkeys(names)
    for buckets in buffer.turns(flat):
        buffer.allocate(flat, buckets)  # views need memory
        for name in (name for bucket in buckets for name in bucket.names if name in wanted):
            start = int(buffer.view(flat, name).storage_offset())
            layout[_key(name, buffer, model.mesh)] = [
                PlacedTensor.of(shard, start) for shard in model.shards(flat, [name])
            ]
    buffer.allocate(flat, ())
    return layout


@torch.no_grad()
def running_copies(model: TrainedModel) -> list[Shard]:
    """Return copies on the host of what this rank writes of the state that forwards change."""
    return [
        replace(
            shard, name=_RUNNING + shard.name, tensor=shard.tensor.detach().to("cpu", copy=True)
        )
        for shard in model.running_state()
        if shard.is_written
    ]


@torch.no_grad()
def fill_running(model: TrainedModel, increment: Increment, iteration: int) -> None:
    """Read the state that forwards change, as it was behind a step.

    Raises `CheckpointError`; local to one rank.
    """
    kind = kind_of(iteration)
    stored = increment.manifest.tensors.get(kind, {})
    for shard in model.running_state():
        name = _RUNNING + shard.name
        if name not in stored or stored[name].shape != tuple(shard.shape):
            reason = f"it has no {shard.name} of this shape"
            remedy = "Load it into the model that saved it"
            raise CheckpointError("increment", increment.path, reason, remedy)
        shard.tensor.copy_(read_stored(increment.path, increment.manifest, kind, name))


@torch.no_grad()
def fill_gradient(model: TrainedModel, increment: Increment, iteration: int) -> None:
    """Read the gradient of a step into what this rank owns of ``buffer.main_grad``.

    Raises `CheckpointError`; local to one rank.
    """
    buffer = model.buffer
    flat = buffer.main_grad
    for buckets in buffer.turns(flat):
        buffer.allocate(flat, buckets)
        for bucket in buckets:
            flat[bucket.start : bucket.stop].zero_()
        names = [name for bucket in buckets for name in bucket.names]
        read_gradient(increment, iteration, [*model.shards(flat, names)])
        for bucket in buckets if isinstance(flat, Pieces) else ():
            number = buffer.piece_of(bucket)
            start, stop, _ = buffer.owned[number]
            buffer.own_grads[number].copy_(flat[start:stop])
    buffer.allocate(flat, ())
