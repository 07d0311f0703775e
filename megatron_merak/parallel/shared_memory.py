"""A process-group backend "merak_shm": collectives of the ranks of one host through shared memory,
others by gloo.

All-reduce and reduce-scatter (sum and max; floats of 16, 32 and 64 bits, integers of 32 and 64),
all-gather and broadcast (any type) use a segment that all ranks map; ``csrc/comm`` says how, and
why it cannot deadlock. Other types, operations, messages and barriers are left to a gloo group of
the same ranks. Sums are computed in the order of ranks, in float32 for 16-bit types, so that all
ranks and all runs have equal bits.

A collective is launched by the call and completed in a wait, its own or a later one's; nothing
makes progress in between. So a wait behaves like a blocking collective.

If the ranks are on several hosts, the compiled part is missing or the mount of shared memory is too
full, the group is a gloo group, and its first rank reports why.
"""

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from .. import _native
from .shared_segment import NAME, NotHere, SegmentSettings, SeveralHosts, connect
from .work import FinishedByWaiting, gloo_of, ranks_of

_CPU = torch.device("cpu")
_NAMED = 8  # ranks in a warning

# results that are not contiguous, and their contiguous copies
Copies = Sequence[tuple[Tensor, Tensor]]


def compiled() -> bool:
    """Whether this process has the compiled part."""
    return getattr(_native.host(), "shared_memory", None) is not None


def register(settings: SegmentSettings | None = None, one_host: bool = True) -> None:
    """Make ``dist.new_group(backend="merak_shm")`` and ``init_process_group("merak_shm")`` work for
    later groups.

    one_host: whether to warn about a group of ranks on several hosts.

    All ranks register alike.
    """
    settings = settings or SegmentSettings()

    def create(options, _) -> dist.ProcessGroup | dist.ProcessGroupGloo:
        ranks = ranks_of(options)
        gloo = gloo_of(options)
        if len(ranks) == 1:
            return gloo
        try:
            return SharedMemoryGroup(
                gloo, connect(gloo, ranks, options.group_id, settings), options.timeout
            )
        except NotHere as reason:
            if options.group_rank == 0 and (one_host or not isinstance(reason, SeveralHosts)):
                few = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
                warnings.warn(f"{NAME}: ranks {few} use gloo: {reason}.", stacklevel=2)
            return gloo

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


class SharedMemoryWork(FinishedByWaiting):
    """A collective in flight. Waiting a second time does nothing."""

    def __init__(
        self,
        group: "SharedMemoryGroup",
        outputs: list[Tensor],
        alive: Sequence[Tensor],
        copies: Copies,
    ):
        super().__init__(outputs)
        self.number = 0
        self._group: SharedMemoryGroup | None = group
        self._alive = alive
        self._copies = copies

    def settle(self) -> None:
        """Release the tensors of a completed collective."""
        for tensor, dense in self._copies:
            tensor.detach().copy_(dense)
        self._group = None
        self._alive = ()
        self._copies = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete it, within the group's timeout or another. Raises RuntimeError that names
        missing ranks.
        """
        if (group := self._group) is not None:
            group.finish(self.number, timeout.total_seconds() if timeout else None)
        return True

    def is_completed(self) -> bool:
        """Whether it is complete, after making all progress that needs no waiting."""
        return (group := self._group) is None or group.try_to_finish(self.number)

    def is_success(self) -> bool:
        return self._group is None


class Several(FinishedByWaiting):
    """Works that are waited for together."""

    def __init__(self, works: list[Work], outputs: list[Tensor]):
        super().__init__(outputs)
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self._works:  # once each: gloo hangs at a second time
            self._works.pop(0).wait(timeout or timedelta())
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return not self._works


class SharedMemoryGroup(dist.ProcessGroup):
    """The ranks of a group: a communicator for what it supports, gloo for the rest. Created by
    ``register``.

    Other methods are the base class's, which uses gloo as its backend of CPU tensors. The choice
    depends on operation and type alone, so that all ranks make the same.
    """

    def __init__(self, gloo: Any, core: Any, timeout: timedelta):
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # the stubs leave this constructor out
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.gloo = gloo
        self._core = core
        self._seconds = timeout.total_seconds()
        self._lock = threading.Lock()
        self._works: deque[SharedMemoryWork] = deque()  # launched, in that order, and not settled
        part: Any = getattr(_native.host(), "shared_memory")  # noqa: B009  # which `connect` found
        self._elements = {
            getattr(torch, name): element for name, element in part.Element.__members__.items()
        }
        self._reductions = (
            (dist.ReduceOp.SUM, part.Reduction.sum),
            (dist.ReduceOp.MAX, part.Reduction.max),
        )

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        if len(tensors) != 1 or (how := self._how(tensors[0], opts.reduceOp)) is None:
            return self.gloo.allreduce(tensors, opts)
        dense, copies = _dense(tensors[0])
        at = dense.data_ptr()
        return self._launch(
            self._core.all_reduce,
            (at, at, dense.nbytes, *how),
            tensors,
            [dense],
            copies,
            opts.asyncOp,
        )

    def broadcast(self, tensors, opts):
        if len(tensors) != 1 or not _plain(tensors[0]):
            return self.gloo.broadcast(tensors, opts)
        dense, copies = _dense(tensors[0])
        arguments = dense.data_ptr(), dense.nbytes, opts.rootRank
        return self._launch(self._core.broadcast, arguments, tensors, [dense], copies, opts.asyncOp)

    def allgather(self, outputs, inputs, opts=None):
        if len(inputs) != 1 or not self._divides(outputs[0], inputs[0]):
            return self.gloo.allgather(outputs, inputs)
        source = inputs[0].contiguous()
        parts = [_dense(part) for part in outputs[0]]
        alive = [source, *(dense for dense, _ in parts)]
        copies = [pair for _, pairs in parts for pair in pairs]
        arguments = source.data_ptr(), [dense.data_ptr() for dense, _ in parts], source.nbytes
        return self._launch(
            self._core.all_gather,
            arguments,
            outputs[0],
            alive,
            copies,
            opts is None or opts.asyncOp,
        )

    def all_gather_single(self, output, input, opts=None, **_):
        if not self._holds(output, input):
            return self.gloo._allgather_base(output, input)
        source = input.contiguous()
        dense, copies = _dense(output)
        arguments = source.data_ptr(), self._places(dense, source.nbytes), source.nbytes
        later = opts is None or opts.asyncOp
        return self._launch(
            self._core.all_gather, arguments, [output], [source, dense], copies, later
        )

    def reduce_scatter(self, outputs, inputs, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        suits = len(outputs) == 1 and self._divides(inputs[0], outputs[0])
        if not suits or (how := self._how(outputs[0], opts.reduceOp)) is None:
            return self.gloo.reduce_scatter(outputs, inputs, opts)
        sources = [part.contiguous() for part in inputs[0]]
        dense, copies = _dense(outputs[0])
        arguments = [part.data_ptr() for part in sources], dense.data_ptr(), dense.nbytes, *how
        return self._launch(
            self._core.reduce_scatter, arguments, outputs, [*sources, dense], copies, opts.asyncOp
        )

    def reduce_scatter_single(self, output, input, opts=None, **_):
        opts = opts or dist.ReduceScatterOptions()
        if not self._holds(input, output) or (how := self._how(output, opts.reduceOp)) is None:
            return self.gloo._reduce_scatter_base(output, input, opts)
        source = input.contiguous()
        dense, copies = _dense(output)
        arguments = self._places(source, dense.nbytes), dense.data_ptr(), dense.nbytes, *how
        return self._launch(
            self._core.reduce_scatter, arguments, [output], [source, dense], copies, opts.asyncOp
        )

    # By gloo, and not by the base class: that one keeps the interpreter while it waits for gloo's
    # lock, which a thread of gloo may hold that waits for the interpreter to let go of a tensor.
    def alltoall_base(self, output, input, output_splits, input_splits, opts=None, **_):
        return self.gloo.alltoall_base(output, input, output_splits, input_splits)

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # its name since torch 2.13

    def allreduce_coalesced(self, tensors, opts=None):
        each = dist.AllreduceOptions()
        each.reduceOp = opts.reduceOp if opts else dist.ReduceOp.SUM
        return Several([self.allreduce([tensor], each) for tensor in tensors], tensors)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return Several([self.all_gather_single(output, input) for output, input in pairs], outputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return Several(
            [self.reduce_scatter_single(output, input, opts) for output, input in pairs], outputs
        )

    # The names of these before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def finish(self, number: int, seconds: float | None) -> None:
        """Complete the collectives up to ``number``."""
        self._core.wait(number, self._seconds if seconds is None else seconds)
        self._settle()

    def try_to_finish(self, number: int) -> bool:
        done = self._core.test(number, self._seconds)
        self._settle()
        return done

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self.gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        """End every wait of every rank of the group with an error."""
        self._core.abort(f"rank {self.rank()} of the group aborted it")

    def shutdown(self) -> None:
        """Leave; works that nobody waited for are dropped."""
        self._core.close()
        self._works.clear()

    def _launch(
        self,
        launch: Callable[..., int],
        arguments: tuple,
        outputs: list[Tensor],
        alive: Sequence[Tensor],
        copies: Copies,
        later: bool,
    ) -> SharedMemoryWork:
        work = SharedMemoryWork(self, outputs, alive, copies)
        with self._lock:  # works stand in the order of their numbers
            work.number = launch(*arguments, self._seconds)
            self._works.append(work)
        if not later:
            work.wait()
        return work

    def _settle(self) -> None:
        with self._lock:
            done = self._core.done()
            while self._works and self._works[0].number <= done:
                self._works.popleft().settle()

    def _how(self, tensor: Tensor, op: dist.ReduceOp) -> tuple | None:
        """Return (element, reduction) of the communicator; None if it does not support them."""
        if tensor.dtype in self._elements and _plain(tensor):
            for theirs, reduction in self._reductions:
                if op == theirs:
                    return self._elements[tensor.dtype], reduction
        return None

    def _divides(self, parts: Sequence[Tensor], part: Tensor) -> bool:
        """Whether there is a part like ``part`` for every rank."""
        same = all(one.numel() == part.numel() and one.dtype == part.dtype for one in parts)
        return len(parts) == self.size() and same and _plain(part, *parts)

    def _holds(self, full: Tensor, part: Tensor) -> bool:
        """Whether the tensor ``full`` consists of a part like ``part`` for every rank."""
        return (
            full.numel() == part.numel() * self.size()
            and full.dtype == part.dtype
            and _plain(full, part)
        )

    def _places(self, full: Tensor, nbytes: int) -> list[int]:
        return [full.data_ptr() + place * nbytes for place in range(self.size())]


def _plain(*tensors: Tensor) -> bool:
    return all(tensor.layout is torch.strided and tensor.device.type == "cpu" for tensor in tensors)


def _dense(tensor: Tensor) -> tuple[Tensor, Copies]:
    """Return ``tensor``, or a contiguous tensor from which the result is copied to it."""
    if tensor.is_contiguous():
        return tensor, ()
    dense = tensor.contiguous()
    return dense, [(tensor, dense)]
