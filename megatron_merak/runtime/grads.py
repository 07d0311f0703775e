"""Reduction of gradients over data-parallel ranks, bucket by bucket, overlapped with the
backward.
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from megatron_merak.parallel.buffers import ParameterBuffer
from megatron_merak.parallel.in_flight import Work
from megatron_merak.parallel.relay import Relay
from megatron_merak.runtime.wire import Wire


class GradientReducer:
    """Sums `buffer.main_grad` over `group`, without averaging: one asynchronous all-reduce per
    bucket.

    A sharded bucket is reduce-scattered instead, and its shard then all-reduced over the ranks that
    own the same one.

    Per step: `start()`, then `ready(name)` once per parameter when its gradient is final on this
    rank, then `finish()`. Ranks may report parameters in different orders: bucket k+1 is never
    launched before bucket k, so that all ranks launch the same collectives in the same order.

    group:           data-parallel ranks, with buffers of the same layout; None or one rank: nothing
                     is sent.
    overlap:         launch a bucket as soon as it is ready; otherwise all of them in `finish()`.
    shard_group:     the ranks of ``group`` over which a bucket is sharded, in the order of their
                     shards; None: all.
    replicate_group: the ranks of ``group`` that own the same shards; None: only this one.
    relay:           launches the all-reduce that follows a reduce-scatter; required with
                     ``replicate_group``.
    in_bf16:         see `Wire`.
    experts:         the ranks with the same experts, where those of ``group`` divide them; None:
                     this one alone.

    Attribute ``before_reduction``: called with each bucket's gradient on this rank; None: nobody
    looks at it.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        group: dist.ProcessGroup | None,
        overlap: bool = True,
        shard_group: dist.ProcessGroup | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        relay: Relay | None = None,
        in_bf16: bool = False,
        experts: dist.ProcessGroup | None = None,
    ):
        self.buffer = buffer
        self.relay = relay
        self.before_reduction: Callable[[Tensor], None] | None = None
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.overlap = overlap
        self._all, self._over_shards = (
            Wire(self.group, in_bf16),
            Wire(shard_group or self.group, in_bf16),
        )
        self._across_replicas = Wire(replicate_group, in_bf16)
        self._of_experts = Wire(experts, in_bf16)
        self._bucket_of = {
            name: number for number, bucket in enumerate(buffer.buckets) for name in bucket.names
        }
        self.start()

    def start(self) -> None:
        """Begin a step: no parameter is ready."""
        self._missing = {name: None for bucket in self.buffer.buckets for name in bucket.names}
        self._unready = [len(bucket.names) for bucket in self.buffer.buckets]
        self._works: list[Work] = []
        for wire in (self._all, self._over_shards, self._across_replicas, self._of_experts):
            wire.start()
        self._launched = 0
        self._finished = False
        if self.relay is not None:
            self.relay.start()

    @property
    def eager(self) -> bool:
        """Whether a bucket is sent while others are still computed."""
        return self.overlap and self.group is not None

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the parameters that are not ready yet, from the last one of the model to the
        first.
        """
        return tuple(self._missing)

    @property
    def launched(self) -> int:
        """Number of buckets whose reduction was launched in this step."""
        return self._launched

    def ready(self, name: str) -> None:
        """The gradient of `name` is final: nothing on this rank adds to it before `finish()`
        returns.
        """
        assert name in self._bucket_of, f"no parameter {name} in the buffer"
        assert not self._finished, f"{name} is ready after finish() and before start()"
        assert name in self._missing, f"{name} is ready twice in one step"
        del self._missing[name]
        self._unready[self._bucket_of[name]] -= 1
        if self.overlap:
            while self._launched < len(self._unready) and self._unready[self._launched] == 0:
                self._launch()

    def finish(self) -> None:
        """Launch the remaining buckets and wait for all. `main_grad` then has the sum of what this
        rank owns.

        On CUDA it is valid for work on the current stream. Parameters that never became ready (no
        gradient in this step) are summed as they are; `missing` names them.
        """
        assert not self._finished, "finish() twice in one step"
        while self._launched < len(self.buffer.buckets):
            self._launch()
        for work in self._works:
            work.wait()
        self._works.clear()
        if self.relay is not None:
            self.relay.finish()
        self._finished = True

    def _launch(self) -> None:
        bucket = self.buffer.buckets[self._launched]
        self._launched += 1
        if self.before_reduction is not None:
            self.before_reduction(self.buffer.main_grad[bucket.start : bucket.stop])
        group = self._of_experts.group if bucket.experts else self.group
        if group is None:
            return
        grad = self.buffer.main_grad
        view = grad[bucket.start : bucket.stop]
        if bucket.sharded:
            start, stop = self.buffer.shard_of(bucket)
            own = grad[start:stop]
            wire = self._of_experts if bucket.experts else self._over_shards
            work = wire.reduce_scatter(own, view)
            if self.relay is None:
                self._works.append(work)
            else:
                self.relay.follow(work, partial(self._across_replicas.all_reduce, own))
        else:
            wire = self._of_experts if bucket.experts else self._all
            self._works.append(wire.all_reduce(view))
