"""Ranks forked from this process, so that what was captured here need not be captured again by each
of them.
"""

import datetime
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_merak.errors import MerakError


def fork_ranks(fn: Callable[[int, int], Any], world_size: int, timeout: float = 60.0) -> list[Any]:
    """``fn(rank, world_size)`` in as many forked processes with a gloo group; every rank's result.

    Only safe while this process has no threads of its own beside the interpreter's. A MerakError of
    a rank is raised here as it is; any other failure, or a rank that is not done in time, as
    RuntimeError with its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="zoo-") as directory:
        pipes, processes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (fn, rank, world_size, f"{directory}/store", timeout, theirs)
                processes.append(context.Process(target=_rank, args=arguments))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            return _collect(pipes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list, deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in answers]
            raise RuntimeError(f"ranks {missing} of {len(pipes)} are not done in time")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "failed", "its process died"
            if kind == "refused":
                raise value
            if kind == "failed":
                raise RuntimeError(f"rank {rank} of {len(pipes)}: {value}")
            answers[rank] = value
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    fn: Callable[[int, int], Any], rank: int, world_size: int, store: str, timeout: float, pipe
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
        pipe.send(("result", fn(rank, world_size)))
        dist.barrier()
    except MerakError as error:
        pipe.send(("refused", error))
    except Exception:
        pipe.send(("failed", traceback.format_exc()[-1500:]))
        time.sleep(1.0)  # the first failure, not its echo in the peers, is to arrive first
    finally:
        pipe.close()
        os._exit(0)


def one_thread() -> None:
    """Before anything is computed here: forked children must not inherit a pool of threads that do
    not exist there.
    """
    torch.set_num_threads(1)
