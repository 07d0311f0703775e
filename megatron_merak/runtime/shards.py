"""All-gather of parameters over data-parallel ranks, each of which updates only its own shards."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.buffers import Bucket, Flat, ParameterBuffer, ShardedState
from ..parallel.in_flight import Work
from ..parallel.pieces import Pieces
from ..parallel.pulse import Pulse
from ..parallel.scattered import Scattered
from ..tensor_parallel.sequence import gather_single


class ShardGatherer:
    """All-gathers of a sharded `ParameterBuffer`; no-ops where the buffer is not sharded.

    Per step: `launch()` after the optimizer; then `wait(names)` before parameters are read, or
    `finish()` for all. Where the parameters themselves are sharded (ZeRO-3), each pass gathers what
    it reads, and `launch` only frees outdated parameters; between passes `gather()` gathers some of
    them, and `seal` of the buffer saves changes to them. `full()` overwrites the gradient. Between
    `preserve_gradient(True)` and the optimizer's step it first saves what this rank owns of the
    gradient, and `restore_gradient()` puts that back.

    buffer:  the sharded buffer.
    group:   the data-parallel ranks that it is sharded over, in the order of their shards.
    overlap: whether `launch` returns at once, and the next forward waits for each bucket; otherwise
             `launch` waits.
    pulse:   where waits are noted; None: nowhere.
    experts: the ranks with the same experts, where those of ``group`` divide them.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        group: dist.ProcessGroup | None,
        overlap: bool = True,
        pulse: Pulse | None = None,
        experts: dist.ProcessGroup | None = None,
    ):
        self.buffer = buffer
        self._pulse = Pulse() if pulse is None else pulse
        self.group = group
        self.experts = experts
        self.overlap = overlap
        # in the order of the forward
        self._buckets = [bucket for bucket in reversed(buffer.buckets) if bucket.sharded]
        self._bucket_of = {
            name: number for number, bucket in enumerate(self._buckets) for name in bucket.names
        }
        self._works: dict[int, Work] = {}
        self._preserves = False
        self._saved: list[Tensor] | None = None

    @property
    def pending(self) -> bool:
        """Whether an all-gather is in flight."""
        return bool(self._works)

    def launch(self) -> None:
        """Start to gather the updated parameters. Collective over ``group``, in the same order on
        all ranks.
        """
        self.finish()
        self._preserves = False
        self._saved = None
        if isinstance(self.buffer.data, Pieces):
            self.buffer.data.release_all()
            return
        self._works = dict(enumerate(self._gather(self.buffer.data)))
        if not self.overlap:
            self.finish()

    def wait(self, names: Iterable[str]) -> None:
        """Block until the parameters ``names`` are gathered (on CUDA: for work on the current
        stream).
        """
        for number in dict.fromkeys(
            self._bucket_of[name] for name in names if name in self._bucket_of
        ):
            if number in self._works:
                self._works.pop(number).wait()

    def finish(self) -> None:
        """Block until all parameters are gathered."""
        for number in list(self._works):
            self._works.pop(number).wait()

    @torch.no_grad()
    def gather(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Gather the parameters of ``buckets``, by default of all, into ``buffer.data`` until the
        next pass.

        Where parameters are sharded, those of other buckets are freed. Collective over ``group``.
        Blocks.
        """
        self.finish()
        buffer = self.buffer
        data = self.buffer.data
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
        """Return the optimizer state of all ranks, [buffer.size], given that of this rank.

        Where the buffer is sharded or the state scattered, the result is ``buffer.main_grad``,
        overwritten. Collective over ``group`` where the buffer is sharded.

        state:   [buffer.owned_size], or scattered.
        buckets: gather only these; None: all.
        """
        scattered = isinstance(state, Scattered)
        overwrites = self.buffer.sharding == ShardedState.OPTIMIZER or (
            scattered and not self.buffer.sharded
        )
        if self._preserves and self._saved is None and overwrites:
            self._saved = [own.clone() for own in self.buffer.own_grads]
        flat = (
            state.spread(buckets)
            if isinstance(state, Scattered)
            else self.buffer.spread(state, buckets)
        )
        for work in self._gather(flat, buckets):
            work.wait()
        return flat

    def preserve_gradient(self, preserve: bool) -> None:
        """Set whether ``main_grad`` has a gradient that an optimizer's step will read, so that
        `full` must save it.
        """
        self._preserves = preserve
        self._saved = None

    @torch.no_grad()
    def restore_gradient(self) -> None:
        """Put back into ``main_grad`` what this rank owns of the gradient, if `full`
        overwrote it.
        """
        if self._saved is not None:
            for own, saved in zip(self.buffer.own_grads, self._saved, strict=True):
                own.copy_(saved)
            self._saved = None

    def _gather(self, flat: Flat, buckets: Sequence[Bucket] | None = None) -> list[Work]:
        works = []
        for bucket in self._buckets:
            if buckets is not None and bucket not in buckets:
                continue
            start, stop = self.buffer.shard_of(bucket)
            # `.data` has its own version counter: autograd may already use other buckets.
            full = flat[bucket.start : bucket.stop].data
            own = full[start - bucket.start : stop - bucket.start]
            group = self.experts if bucket.experts else self.group
            work = gather_single(full, own, group=group, async_op=True)
            works.append(self._pulse.timed(work))
        return works
