"""What data-parallel ranks gather of one another, where each of them updates its own shards of the parameters."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import Bucket, Flat, ParameterBuffer, Sharding
from ..parallel.pieces import Pieces
from ..parallel.scattered import Scattered
from ..tensor_parallel.sequence import gather_single


class ShardGatherer:
    """All-gathers of a sharded `ParameterBuffer`; where the buffer is not sharded nothing is sent, and nothing waits.

    Per step: `launch()` after the optimizer; then `wait(names)` before parameters are read, or `finish()` for all.
    Where parameters are sharded, each pass gathers its own, and `launch` only releases what is out of date; between
    passes `bring()` gathers some of them, and the buffer's `seal` takes over what was written then.
    `full()` needs the gradient's memory. Between `hold_gradient()` and the optimizer's step it keeps what this rank
    owns of the gradient aside, and `restore_gradient()` puts that back.

    buffer: whose shards they are. group: the data-parallel ranks that share it, in the order of their shards.
    overlap: `launch` returns while parameters travel, and the next forward waits for each bucket; else it waits.
    """

    def __init__(self, buffer: ParameterBuffer, group: dist.ProcessGroup | None, overlap: bool = True):
        self.buffer, self.group, self.overlap = buffer, group, overlap
        self._buckets = [bucket for bucket in reversed(buffer.buckets) if bucket.sharded]  # the forward's order
        self._bucket_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket.names}
        self._works: dict[int, dist.Work] = {}
        self._holds = False
        self._aside: list[Tensor] | None = None

    @property
    def pending(self) -> bool:
        """Whether parameters are under way."""
        return bool(self._works)

    def launch(self) -> None:
        """Start to gather the updated parameters. Collective over ``group``, in which all ranks have the same order."""
        self.finish()
        self._holds, self._aside = False, None
        if isinstance(self.buffer.data, Pieces):
            self.buffer.data.release_all()
            return
        self._works = dict(enumerate(self._gather(self.buffer.data)))
        if not self.overlap:
            self.finish()

    def wait(self, names: Iterable[str]) -> None:
        """Return when the parameters ``names`` have arrived (on CUDA: for the current stream)."""
        for number in dict.fromkeys(self._bucket_of[name] for name in names if name in self._bucket_of):
            if number in self._works:
                self._works.pop(number).wait()

    def finish(self) -> None:
        """Return when all parameters have arrived."""
        for number in list(self._works):
            self._works.pop(number).wait()

    @torch.no_grad()
    def bring(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Return when ``buffer.data`` has the parameters of ``buckets``, all by default, until the next pass.

        Where parameters are sharded it loses all others. Collective over ``group``.
        """
        self.finish()
        buffer, data = self.buffer, self.buffer.data
        if isinstance(data, Pieces):
            buckets = buffer.buckets if buckets is None else buckets
            buffer.allocate(data, buckets)
            for bucket in buckets:
                number = buffer.piece_of(bucket)
                start, stop, _ = buffer.owned[number]
                data[start:stop].copy_(buffer.own_data[number])
            for work in self._gather(data, buckets):
                work.wait()

    @torch.no_grad()
    def full(self, state: Tensor | Scattered, buckets: Sequence[Bucket] | None = None) -> Flat:
        """A rank's optimizer state ([buffer.owned_size], or scattered) as that of all ranks: [buffer.size]; of
        ``buckets`` only, where given.

        Where the buffer is sharded, or the state scattered, this is its ``main_grad``, overwritten. Collective over
        ``group`` where it is sharded.
        """
        scattered = isinstance(state, Scattered)
        overwrites = self.buffer.sharding == Sharding.OPTIMIZER or (scattered and not self.buffer.sharded)
        if self._holds and self._aside is None and overwrites:
            self._aside = [own.clone() for own in self.buffer.own_grads]
        flat = state.spread(buckets) if scattered else self.buffer.spread(state, buckets)
        for work in self._gather(flat, buckets):
            work.wait()
        return flat

    def hold_gradient(self, holds: bool) -> None:
        """Whether ``main_grad`` has a gradient that an optimizer's step will read."""
        self._holds, self._aside = holds, None

    @torch.no_grad()
    def restore_gradient(self) -> None:
        """Let ``main_grad`` have what this rank owns of the gradient, if `full` overwrote it."""
        if self._aside is not None:
            for own, kept in zip(self.buffer.own_grads, self._aside, strict=True):
                own.copy_(kept)
            self._aside = None

    def _gather(self, flat: Flat, buckets: Sequence[Bucket] | None = None) -> list[dist.Work]:
        works = []
        for bucket in self._buckets:
            if buckets is not None and bucket not in buckets:
                continue
            start, stop = self.buffer.shard_of(bucket)
            whole = flat[bucket.start : bucket.stop].data  # has a version of its own: other buckets are in use already
            own = whole[start - bucket.start : stop - bucket.start]
            works.append(gather_single(whole, own, group=self.group, async_op=True))
        return works
