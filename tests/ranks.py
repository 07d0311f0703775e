"""``run_ranks(fn, world_size, *args)``: a distributed test is a plain function ``fn(rank,
world_size, *args)``.

Processes come from a forkserver that has imported torch and the package already and never ran
anything with them: starting a rank costs a fork, and the traps of forking a process that has used
threads or CUDA do not exist. Ranks talk to each other over the loopback interface only.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

PRELOAD = (
    # before what imports pyarrow
    "tests.threadless",
    "torch",
    "torch.distributed",
    "torch.distributed.nn",
    "numpy",
    "pytest",
    "transformers.modeling_utils",
    "transformers.trainer_callback",
    # what a capture imports at its first use
    "torch.export._trace",
    "networkx",
    "megatron_merak.stages.captured",
    "megatron_merak.stages.gpt_model",
    # a rank would take 0.7 s for HuggingFace's trainer and ours, and 0.2 s for the job of flags
    "megatron_merak.hf_trainer.trainer",
    "megatron_merak.training.job",
    # the last one: a collection takes 0.3 s if it looks at half a million objects of modules
    "tests.frozen",
)
SETTLE_SECONDS = 5.0  # after a failure: how long to look for the rank that caused it


class RankFailure(AssertionError):
    """A rank raised, died or did not finish. ``rank`` is the one to look at; the original exception
    is the cause.
    """

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


def run_ranks(fn, world_size: int, *args, timeout: float = 60.0, backend: str = "gloo") -> list:
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` processes that share a process group;
    return every result.

    ``fn`` is a top-level function of an importable module; arguments and results travel by pickle.
    One failing or dying rank ends all others at once and raises ``RankFailure`` with that rank's
    traceback; after ``timeout`` seconds everything is killed and the error shows where each rank
    stood.
    """
    call = pickle.dumps((fn, args))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks = []
        try:
            for rank in range(world_size):
                ranks.append(_Rank(context, rank, world_size, call, directory, timeout, backend))
            return _collect(ranks, time.monotonic() + timeout, timeout)
        finally:
            for rank in ranks:
                rank.kill()


class _Rank:
    """The parent's end of one process."""

    def __init__(self, context, rank, world_size, call, directory, timeout, backend):
        self.rank = rank
        self.stacks = Path(directory) / f"stacks.{rank}"
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, rank, world_size, call, directory, timeout, backend)
        self.process = context.Process(
            target=_child, args=arguments, name=f"rank {rank}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.answer = None

    def poll(self) -> None:
        """Take the answer if there is one: ("result", bytes), ("error", text, exception or None) or
        ("died", code).
        """
        if self.answer is None and self.pipe.poll():
            try:
                self.answer = pickle.loads(self.pipe.recv_bytes())
            except EOFError:
                self.process.join()
                self.answer = ("died", self.process.exitcode)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(ranks: list, deadline: float, timeout: float) -> list:
    while not all(rank.answer for rank in ranks):
        waiting = [rank for rank in ranks if rank.answer is None]
        if not wait([rank.pipe for rank in waiting], max(0.0, deadline - time.monotonic())):
            raise _timed_out(waiting, len(ranks), timeout)
        for rank in waiting:
            rank.poll()
        if any(rank.answer and rank.answer[0] != "result" for rank in ranks):
            raise _failure(ranks)
    for rank in ranks:  # every result is in: now the processes tear their groups down and leave
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            raise _timed_out([rank], len(ranks), timeout)
        if rank.process.exitcode != 0:
            raise RankFailure(
                rank.rank,
                f"rank {rank.rank} gave its result, then exited with {rank.process.exitcode}",
            )
    return [pickle.loads(rank.answer[1]) for rank in ranks]


def _failure(ranks: list) -> RankFailure:
    """The rank to blame: one that died before one that raised, since its peers raise 'connection
    closed' in answer.
    """
    settled = time.monotonic() + SETTLE_SECONDS
    first = next(rank for rank in ranks if rank.answer and rank.answer[0] != "result")
    while first.answer[0] != "died" and (left := settled - time.monotonic()) > 0:
        waiting = [rank for rank in ranks if rank.answer is None]
        if not waiting or not wait([rank.pipe for rank in waiting], left):
            break
        for rank in waiting:
            rank.poll()
        first = next((rank for rank in ranks if rank.answer and rank.answer[0] == "died"), first)
    number, world_size = first.rank, len(ranks)
    if first.answer[0] == "died":
        return RankFailure(
            number, f"rank {number} of {world_size} died with exit code {first.answer[1]}"
        )
    _, text, exception = first.answer
    failure = RankFailure(number, f"rank {number} of {world_size} raised:\n{text}")
    failure.__cause__ = exception
    return failure


def _timed_out(waiting: list, world_size: int, timeout: float) -> RankFailure:
    for rank in waiting:
        if rank.process.is_alive():
            os.kill(rank.process.pid, signal.SIGUSR1)
    written = time.monotonic() + 10 * SETTLE_SECONDS
    while time.monotonic() < written and not all(
        r.stacks.exists() and r.stacks.stat().st_size for r in waiting
    ):
        time.sleep(0.05)
    lines = [f"{len(waiting)} of {world_size} ranks did not finish within {timeout:g} s"]
    for rank in waiting:
        stack = rank.stacks.read_text() if rank.stacks.exists() else ""
        lines.append(f"rank {rank.rank} stood at:\n{stack or '(not started)'}")
    return RankFailure(waiting[0].rank, "\n".join(lines))


def _child(
    pipe, rank: int, world_size: int, call: bytes, directory: str, timeout: float, backend: str
) -> None:
    parent = multiprocessing.parent_process()
    # never outlive the test run
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=open(f"{directory}/stacks.{rank}", "w"))  # noqa: SIM115
    try:
        result = _run(rank, world_size, call, directory, timeout, backend)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(("error", traceback.format_exc(), _portable(error))))
        # keep connections open, so that no peer fails too and hides this error; the parent kills us
        parent.join()
    pipe.send_bytes(result)


def _run(
    rank: int, world_size: int, call: bytes, directory: str, timeout: float, backend: str
) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback[0]
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{directory}/store", world_size)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    fn, args = pickle.loads(call)
    result = pickle.dumps(("result", pickle.dumps(fn(rank, world_size, *args))))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return result


def _portable(error: BaseException) -> BaseException | None:
    """The exception itself if it survives pickle, so that a test can look at its type."""
    try:
        return pickle.loads(pickle.dumps(error)) and error
    except Exception:
        return None
