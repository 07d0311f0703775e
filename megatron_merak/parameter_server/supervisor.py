"""Starts the ranks of a job with parameter servers on one host, and survives those that die.

torchrun ends all ranks when one dies. Here the others go on when a worker dies. A server that dies
is restarted in its place, and continues from its last snapshot.
"""

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import TCPStore

from ..errors import LaunchError
from ..parallel.interruption import SIGNALS
from ..parallel.listening import new_secret, open_server
from ..parallel.meeting import ATTEMPT, job_keys
from ..parallel.position import SECRET
from .roles import ended_key

_ATTEMPT = "only"  # single ranks start again, never the job
_POLL = 0.1  # seconds between two looks at the processes
_GRACE = 10.0  # seconds that ranks have to end when they are told to


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    ranks_here:    ranks of this host.
    nodes, node:   number of hosts, all with as many ranks, and the index of this one.
    address, port: of the first one, where ranks meet.
    """

    ranks_here: int
    nodes: int = 1
    node: int = 0
    address: str = "127.0.0.1"
    port: int = 29500

    @property
    def size(self) -> int:
        return self.ranks_here * self.nodes

    @property
    def ranks(self) -> range:
        return range(self.node * self.ranks_here, (self.node + 1) * self.ranks_here)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank, by torchrun's names."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank - self.ranks[0]),
            "LOCAL_WORLD_SIZE": str(self.ranks_here),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            ATTEMPT: _ATTEMPT,
            "TORCHELASTIC_RUN_ID": f"megatron_merak-{self.port}",
        }


@dataclass
class Supervisor:
    """Runs the ranks of this host.

    command, environment: of every rank.
    hosts:                where they run.
    servers:              number of ranks, the last ones, that only serve.
    restarts:             how often each of these is restarted.
    say:                  called with a line for each event of a rank.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    hosts: Hosts
    servers: int
    restarts: int = 3
    say: Callable[[str], object] = print
    running: dict[int, subprocess.Popen] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    restarted: dict[int, int] = field(default_factory=dict)
    meeting: tempfile.TemporaryDirectory = field(default_factory=tempfile.TemporaryDirectory)
    _stopping: bool = False

    def run(self) -> int:
        """Start the ranks of this host and return when all have ended.

        Returns 0 if a worker finished, else the first status that is not 0. SIGNALS are passed on
        to the ranks.
        """
        self.store = self._store()
        # several would each make their own: give them one, in the environment
        if self.hosts.nodes == 1:
            self.environment = {SECRET: new_secret()} | dict(self.environment)
        ours = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._stop) for number in ours}
        try:
            for rank in self.hosts.ranks:
                self._start(rank)
            while self.running:
                for rank, process in list(self.running.items()):
                    if (status := process.poll()) is not None:
                        self._ended(rank, status)
                if not any(
                    not self._serves(rank) for rank in self.hosts.ranks if rank in self.running
                ):
                    self._end_servers()
                time.sleep(_POLL)
        finally:
            self._kill(signal.SIGKILL)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.store = None
            self.meeting.cleanup()
        return self._status()

    def _store(self):
        """Create the job's key-value store, which outlives every rank."""
        first = self.hosts.node == 0
        try:
            if first:
                one_host = self.hosts.nodes == 1
                store = open_server(self.hosts.address, self.hosts.port, one_host, self.say)
            else:
                store = TCPStore(
                    self.hosts.address, self.hosts.port, is_master=False, wait_for_workers=False
                )
        except (RuntimeError, ValueError, OSError) as error:
            reason = (
                f"no store {'can be opened' if first else 'answers'} there "
                f"({str(error).splitlines()[0]})"
            )
            raise LaunchError(
                "--master-port", self.hosts.port, reason, "Name one that is free"
            ) from error
        return job_keys(store, _ATTEMPT)

    def _serves(self, rank: int) -> bool:
        return rank >= self.hosts.size - self.servers

    def _start(self, rank: int) -> None:
        meeting = Path(self.meeting.name) / "attempt_0" / str(rank)
        meeting.mkdir(parents=True, exist_ok=True)
        environment = (
            {"OMP_NUM_THREADS": "1"} | dict(self.environment) | self.hosts.environment(rank)
        )
        # where ranks agree on who tells a mistake
        environment["TORCHELASTIC_ERROR_FILE"] = str(meeting / "error.json")
        self.running[rank] = subprocess.Popen(self.command, env=environment)

    def _ended(self, rank: int, status: int) -> None:
        del self.running[rank]
        self.ended[rank] = status
        kind = "server" if self._serves(rank) else "worker's rank"
        again = self.restarted.get(rank, 0)
        # A status above 0 is an error that the rank told itself, such as a wrong flag: it would
        # come again.
        if self._serves(rank) and status < 0 and again < self.restarts and not self._stopping:
            self.restarted[rank] = again + 1
            self.say(
                f"{kind} {rank} was killed by signal {-status}: started again ({again + 1} of "
                f"{self.restarts})"
            )
            self._start(rank)
            return
        self.store.set(ended_key(rank), str(status))
        if status < 0 and not self._stopping:
            others = any(not self._serves(other) for other in self.running)
            more = ": the other workers go on" if others and not self._serves(rank) else ""
            self.say(f"{kind} {rank} was killed by signal {-status}{more}")

    def _end_servers(self) -> None:
        """End the servers of this host once none of its workers runs, if they do not end by
        themselves.
        """
        if self.hosts.nodes == 1 and any(not self._serves(rank) for rank in self.hosts.ranks):
            deadline = time.monotonic() + _GRACE
            while self.running and time.monotonic() < deadline:
                for rank, process in list(self.running.items()):
                    if (status := process.poll()) is not None:
                        self._ended(rank, status)
                time.sleep(_POLL)
            self._stopping = True
            self._kill(signal.SIGTERM)

    def _stop(self, number: int, _frame: object) -> None:
        self._stopping = True
        self._kill(number)

    def _kill(self, number: int) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(number)

    def _status(self) -> int:
        workers = [status for rank, status in sorted(self.ended.items()) if not self._serves(rank)]
        if 0 in workers:
            return 0
        bad = [status for status in workers or self.ended.values() if status]
        return (bad[0] if bad[0] > 0 else 128 - bad[0]) if bad else 0


def servers_of(arguments: Sequence[str]) -> int:
    """Return the number of ranks that only serve, by the flags of a script. Raises LaunchError."""
    flag = "--num-parameter-servers"
    servers = 0
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            value = value if equals else next(iter(arguments[place + 1 :]), "")
            if not value.isdigit():
                raise LaunchError(
                    flag, value or "(missing)", "it is not a number", "Give a number of ranks"
                )
            servers = int(value)
    return servers
