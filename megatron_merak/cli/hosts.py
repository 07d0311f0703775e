"""The hosts of a job that starts again by itself: torch's rendezvous, whose hosts keep the places that
they were given and end when they have had notice.
"""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ..errors import LaunchError

ARRIVAL = 600  # seconds in which all hosts have to come, at the start and after a failure
_LOOK_AGAIN = 0.5  # seconds between two attempts
_LAST_OUT = 10.0  # seconds that the first host waits for the others to leave
# A host is lost after three signs of life that did not come, a second apart.
_SIGNS = ("keep_alive_interval=1", "keep_alive_max_attempt=3")


@dataclass(frozen=True)
class HostPlace:
    """A host of a job.

    node:    its index, from 0.
    nodes:   number of hosts.
    address: of the first one, as all others reach it.
    port:    there, of the rendezvous; 0, on one host: any that is free.
    """

    node: int
    nodes: int
    address: str
    port: int

    def words(self, backend: str) -> list[str]:
        """Torchrun's flags for a rendezvous by the name ``backend``."""
        conf = [f"join_timeout={ARRIVAL}", "last_call_timeout=5", *_SIGNS]
        conf.append(f"is_host={self.node == 0}")
        return [
            f"--nnodes={self.nodes}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={self.address}:{self.port}",
            "--rdzv-id=megatron-merak",
            f"--rdzv-conf={','.join(conf)}",
        ]


class Meetings(RendezvousHandler):
    """The rounds in which hosts meet: the first, and one after every failure.

    torch numbers hosts by the spelling of their names. Here they have the numbers that they were
    given, so that the ranks of hosts that are close to each other are, and the first one has rank 0.

    place:   this host.
    params:  of torch's rendezvous.
    noticed: returns the signal that asks this job to end, 0 without: then there is no next round.
    """

    def __init__(self, place: HostPlace, params: RendezvousParameters, noticed: Callable[[], int]):
        if place.node:
            _wait_for(place)
        try:
            backend, store = create_backend(params)
        except RendezvousConnectionError as error:
            if place.node:
                raise
            reason = "host 0 cannot listen there, or another job does"
            remedy = "Use a free port, and --node-rank 0 on one host only"
            raise LaunchError("--master-port", place.port, reason, remedy) from error
        self._rounds = create_handler(store, backend, params)
        self._store = dist.PrefixStore("megatron_merak", store)
        self._backend = params.backend
        self._place = place
        self._noticed = noticed

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        # Ranks that start again must not read the addresses that their predecessors left there.
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        number = self._noticed()
        if number:
            raise SignalException("notice was given", sigval=signal.Signals(number))
        found = self._rounds.next_rendezvous()
        store = dist.PrefixStore("places", found.store)
        store.set(f"{found.rank}", f"{self._place.node}")
        nodes = [int(store.get(f"{rank}")) for rank in range(found.world_size)]
        if sorted(nodes) != list(range(self._place.nodes)):
            text = ", ".join(map(str, sorted(nodes)))
            remedy = f"Give every host its own, from 0 to {self._place.nodes - 1}"
            raise LaunchError("--node-rank", self._place.node, f"the hosts have {text}", remedy)
        meeting = RendezvousStoreInfo.build(self._place.node, store, self._place.address)
        return RendezvousInfo(found.store, self._place.node, found.world_size, meeting)

    def leave(self) -> None:
        """Use the rendezvous no more; the first host waits for the others, since it keeps it.

        Where it is lost while a host is in a call to it, torch prints the stack of its C++ code.
        """
        end = time.monotonic() + _LAST_OUT
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            if self._place.node:
                self._store.add("left", 1)
                return
            others = self._place.nodes - 1
            while self._store.add("left", 0) < others and time.monotonic() < end:
                time.sleep(_LAST_OUT / 1000)

    def is_closed(self) -> bool:
        return self._rounds.is_closed()

    def set_closed(self) -> None:
        self._rounds.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._rounds.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._rounds.get_run_id()

    def shutdown(self) -> bool:
        return self._rounds.shutdown()


def register(name: str, place: HostPlace, noticed: Callable[[], int]) -> Sequence[Meetings]:
    """Let torch make ``Meetings`` for a rendezvous by a name; return those that it has made."""
    made: list[Meetings] = []

    def make(params: RendezvousParameters) -> Meetings:
        made.append(Meetings(place, params, noticed))
        return made[-1]

    rendezvous_handler_registry.register(name, make)
    return made


def _wait_for(place: HostPlace) -> None:
    """Wait until the first host accepts connections: its name may not be known yet, or it starts
    late. Raises LaunchError.
    """
    end = time.monotonic() + ARRIVAL
    while True:
        try:
            socket.create_connection((place.address, place.port), ARRIVAL).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                where = f"{place.address}:{place.port}"
                reason = f"nobody answers there for {ARRIVAL} s ({error.strerror or error})"
                remedy = "Start host 0 too, where the others reach it"
                raise LaunchError("--master-addr:--master-port", where, reason, remedy) from error
        time.sleep(_LOOK_AGAIN)
