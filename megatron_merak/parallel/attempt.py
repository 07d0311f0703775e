"""What the ranks of a job try together, and what may fail on some of them only, as where memory ends:
the others do not wait for these in vain, and the job goes on as if nobody had tried.

    rank 0   makes groups, computes, waits for rank 1 ........ its groups are closed: it fails, too
    rank 1   makes groups, computes, out of memory: notes it in the job's store, closes its groups
    both     tell each other what became of it, over the job's group, which nobody had used inside

All groups that are made inside end with it. A rank that has failed closes those that it has, which
ends waits of its peers over gloo and in shared memory; where a wait notices no such thing, as in
NCCL, a thread of each rank sees the note, and aborts the groups. Only ranks that are making groups
when another one fails, and need it for them, wait until the timeout of collectives: so agree, by
``together``, before groups are made, on what may fail.
"""

import gc
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import LaunchError, MerakError
from .agree import gather_json
from .mpi_group import NAME as MPI
from .peer_group import NAME as PEER_MEMORY
from .ranks import Ranks

_LOOK = 0.2  # seconds between two looks at the store
_PATIENCE = 30.0  # seconds for groups to close
_LONGEST = 300  # characters of a failure that are told


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt, the same on every rank.

    values:  what it returned on each rank, as JSON has it; empty where it failed.
    failure: why it failed, and on which rank unless on all alike; "" where it did not.
    """

    values: tuple[Any, ...] = ()
    failure: str = ""


def check_attempts(ranks: Ranks) -> None:
    """Raise LaunchError where a rank that waits for one that has failed would wait on."""
    backend = ranks.world.collectives or (dist.get_backend() if ranks.world.size > 1 else "")
    if backend in ("mpi", MPI, PEER_MEMORY):
        reason = (
            "its ranks cannot stop waiting for one that has failed, as a plan may that is tried"
        )
        raise LaunchError("--distributed-backend", backend, reason, "Use another one")


def attempt(ranks: Ranks, body: Callable[[Ranks], Any]) -> Outcome:
    """Call ``body`` on every rank, and return what became of it. Collective.

    body: gets the ranks, with a group for agreement that ends with it, as all that it makes must: it
          may leave nothing that is in flight. What it returns is JSON-safe.

    An Exception on some ranks is a failure. The clock starts anew, and the pulse forgets the steps.
    """
    world = ranks.world
    with world.pulse.trying():
        if ranks.control is None:
            own, _ = _tried(ranks, body, lambda: True)
        else:
            own = _among_groups(ranks, body)
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.clock.restart()
    reports = gather_json(own, ranks.control, "cpu")
    failed = [rank for rank, report in enumerate(reports) if "failure" in report]
    if not failed:
        return Outcome(tuple(report["value"] for report in reports))
    first = next((rank for rank in failed if reports[rank]["first"]), failed[0])
    text = reports[first]["failure"]
    everywhere = all(report.get("failure") == text for report in reports)
    return Outcome(failure=text if everywhere else f"on rank {first}, {text}")


def _among_groups(ranks: Ranks, body: Callable[[Ranks], Any]) -> dict[str, Any]:
    """Return this rank's report of a body. No reference to a group is left."""
    before = set(_names())
    control = dist.new_group(backend="gloo", timeout=ranks.timeout)
    key = f"attempt {control.group_name} has failed"
    # a connection of its own: the job's is taken while this rank waits for an answer
    job_store: Any = distributed_c10d._get_default_store()
    store = job_store.clone()
    watch = _Aborter(store, key, before)
    watch.start()

    def checked(inside: Ranks) -> Any:
        value = body(inside)
        dist.barrier(inside.control)  # no rank closes a group over which others still receive
        return value

    inside = replace(ranks, control=control)
    del control
    own, failed = _tried(inside, checked, lambda: store.add(key, 1) == 1)
    del inside
    watch.over.set()
    watch.join()
    _close(before, aborts=failed)
    # torch names groups by their number, which ranks that have failed may have counted less far
    numbers = gather_json(distributed_c10d._world.group_count, ranks.control, "cpu")
    distributed_c10d._world.group_count = max(numbers)
    return own


def _tried(
    ranks: Ranks, body: Callable[[Ranks], Any], note: Callable[[], bool]
) -> tuple[dict[str, Any], bool]:
    """Return the report of this rank, and whether it failed.

    note: called at a failure; returns whether it is the first one of all ranks.
    """
    try:
        return {"value": body(ranks)}, False
    except Exception as error:
        report = {"failure": _words(error), "first": note()}
        each: BaseException | None = error
        while each is not None:  # frames keep what was made alive
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        return report, True


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, MerakError) else f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class _Aborter(threading.Thread):
    """Aborts this rank's groups once a rank has failed.

    over: set when nobody waits any more.
    """

    def __init__(self, store: dist.Store, key: str, before: set[str]):
        super().__init__(name="megatron_merak attempt", daemon=True)
        self._store = store
        self._key = key
        self._before = before
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(_LOOK):
            if self._store.check([self._key]):
                _abort(self._before)


def _names() -> list[str]:
    """Return the names of all groups of this process."""
    return [*distributed_c10d._world.pg_names.values()]


def _made(before: set[str]) -> list[dist.ProcessGroup]:
    """Return the groups that were made since there were those with the names ``before``."""
    names = dict(distributed_c10d._world.pg_names)
    return [group for group, name in names.items() if name not in before]


def _abort(before: set[str]) -> None:
    for group in _made(before):
        with suppress(Exception):  # a kind that cannot, or one that has ended
            group.abort()


def _close(before: set[str], aborts: bool) -> None:
    """Close all groups that were made since.

    Each by a thread of its own: gloo waits there for works in flight, which end where peers close
    theirs, and these may wait for another of the groups.
    """
    if aborts:
        _abort(before)
    threads = []
    groups = _made(before)
    while groups:
        threads.append(threading.Thread(target=_end, args=[[groups.pop()]], daemon=True))
        threads[-1].start()
    gc.collect()  # what has failed may hold groups in a cycle
    for thread in threads:
        thread.join(_PATIENCE)


def _end(holder: list[dist.ProcessGroup]) -> None:
    """Destroy a group. holder: of the only reference to it."""
    with suppress(Exception):
        dist.destroy_process_group(holder[0])
    holder.clear()
