"""What data-parallel ranks gather of one another, where each of them updates its own shards of the parameters."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import ParameterBuffer
from ..tensor_parallel.sequence import gather_single


class ShardGatherer:
    """All-gathers of a sharded `ParameterBuffer`; where the buffer is not sharded nothing is sent, and nothing waits.

    Per step: `launch()` after the optimizer; then `wait(names)` before parameters are read, or `finish()` for all.
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
        self._holds, self._aside = False, None

    @property
    def pending(self) -> bool:
        """Whether parameters are under way."""
        return bool(self._works)

    def launch(self) -> None:
        """Start to gather the updated parameters. Collective over ``group``, in which all ranks have the same order."""
        self.finish()
        self._holds, self._aside = False, None
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
    def full(self, state: Tensor) -> Tensor:
        """A rank's optimizer state ([buffer.owned_size]) as that of all ranks: [buffer.size].

        Where the buffer is sharded this is its ``main_grad``, overwritten. Collective over ``group`` then.
        """
        if self._holds and self._aside is None and self.buffer.sharded:
            self._aside = self.buffer.own(self.buffer.main_grad)
        flat = self.buffer.spread(state)
        for work in self._gather(flat):
            work.wait()
        return flat

    def hold_gradient(self, holds: bool) -> None:
        """Whether ``main_grad`` has a gradient that an optimizer's step will read."""
        self._holds, self._aside = holds, None

    @torch.no_grad()
    def restore_gradient(self) -> None:
        """Let ``main_grad`` have what this rank owns of the gradient, if `full` overwrote it."""
        if self._aside is not None:
            self.buffer.spread(self._aside)
            self._aside = None

    @torch.no_grad()
    def take(self, state: Tensor, flat: Tensor) -> None:
        """The inverse of `full`, without communication: this rank's shards of ``flat`` into ``state``."""
        if state is not flat:
            state.copy_(self.buffer.own(flat))

    def _gather(self, flat: Tensor) -> list[dist.Work]:
        works, flat = [], flat.data  # with a version of its own: parameters of other buckets are in use already
        for bucket in self._buckets:
            start, stop = self.buffer.shard_of(bucket)
            whole = flat[bucket.start : bucket.stop]
            works.append(gather_single(whole, flat[start:stop], group=self.group, async_op=True))
        return works
