"""The ranks of one attempt of a job find each other in a store that outlives attempts.

torchrun restarts a job whose rank died, and keeps one store over all attempts (torch 2.13; a
comment of its ``rendezvous.py`` says otherwise). What a dead rank wrote there looks like what a
living one writes: gloo reads the addresses of dead ranks, and waits for them. Launchers have no
number of the attempt that is the same on every host: each counts its own restarts. So ranks name
the attempt themselves:

    each rank                                 the first rank
    hello/RANK := a number of its own
                                              greets every number that it reads, old ones too
    waits for greeting/NUMBER
    answer/GREETING/NUMBER := 1, where the greeting is the first rank's own number
                                              until all that it reads have answered: reads again,
                                              greets new ones
                                              attempt/NUMBER := the name of the attempt, for each
    waits for attempt/NUMBER

A number is random, so only a living rank answers. Every key has one reader, who removes it.
"""

import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ..counting import named_ranks
from ..errors import LaunchError

# The variable in which a launcher that starts single ranks again gives every rank the name of the
# job's only attempt.
ATTEMPT = "MERAK_ATTEMPT"
_LOOK_AGAIN = 0.02  # seconds after which the first rank looks again for those that are missing
_REMEDY = (
    "Start every host with the same number of hosts and ranks, and look at what the "
    "missing ones say"
)
_REPORT = 30.0  # seconds after which the first rank says for whom it waits


def name_attempt(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    say: Callable[[str], object],
) -> str:
    """Return the name of this attempt of the job, equal on all of its ranks and new for each
    attempt.

    Collective over all ranks. Raises LaunchError, which names the ranks that did not come.

    store:   of the job, maybe of earlier attempts too; its own timeout is not used.
    rank:    of this process.
    size:    number of ranks.
    timeout: how long to wait for the others.
    say:     called with a line, on the first rank, when others are late.
    """
    number = secrets.token_hex(16)
    store.set(f"hello/{rank}", number)
    if rank == 0:
        return _gather(store, number, size, timeout, say=say)
    try:
        store.wait([f"greeting/{number}"], timeout)
        first = store.get(f"greeting/{number}").decode()
        store.delete_key(f"greeting/{number}")
        store.set(f"answer/{first}/{number}", "1")
        store.wait([f"attempt/{number}"], timeout)
    except dist.DistStoreError as error:
        seconds = timeout.total_seconds()
        reason = f"the first rank did not gather all ranks within {seconds:.0f} s"
        raise LaunchError("job", f"rank {rank} of {size}", reason, _REMEDY) from error
    except dist.DistNetworkError as error:
        reason = "the job's store was lost before all ranks had met: who keeps it has ended"
        remedy = "Look at what the first rank and the launchers say"
        raise LaunchError("job", f"rank {rank} of {size}", reason, remedy) from error
    name = store.get(f"attempt/{number}").decode()
    store.delete_key(f"attempt/{number}")
    return name


def job_keys(store: dist.Store, attempt: str) -> dist.Store:
    """Return the view of a store for one attempt of a job; launchers may use one store for several
    attempts.
    """
    return dist.PrefixStore(f"megatron_merak, attempt {attempt}", store)


def _gather(
    store: dist.Store,
    own: str,
    size: int,
    timeout: timedelta,
    say: Callable[[str], object],
) -> str:
    """The first rank's part of ``name_attempt``."""
    began = time.monotonic()
    reported = False
    numbers: dict[int, str] = {}
    waiting = list(range(1, size))
    while waiting:
        for rank in waiting:
            number = _read(store, f"hello/{rank}")
            if number is not None and numbers.get(rank) != number:
                if rank in numbers:  # of a dead rank, which did not take its greeting
                    store.delete_key(f"greeting/{numbers[rank]}")
                numbers[rank] = number
                store.set(f"greeting/{number}", own)
        waiting = [rank for rank in waiting if not _answered(store, own, numbers.get(rank))]
        if not waiting:
            break
        waited = time.monotonic() - began
        if waited > timeout.total_seconds():
            reason = f"they did not come within {timeout.total_seconds():.0f} s"
            raise LaunchError("job", f"{named_ranks(waiting)} of {size}", reason, _REMEDY)
        if waited > _REPORT and not reported:
            say(f"waiting for {named_ranks(waiting)} of {size}")
            reported = True
        time.sleep(_LOOK_AGAIN)
    name = secrets.token_hex(8)
    for number in numbers.values():
        store.delete_key(f"answer/{own}/{number}")
        store.set(f"attempt/{number}", name)
    return name


def _read(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _answered(store: dist.Store, first: str, number: str | None) -> bool:
    """Whether a rank answered this first rank; it may have answered one that died."""
    return number is not None and store.check([f"answer/{first}/{number}"])
