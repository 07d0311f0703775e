"""Roles of ranks in a job with parameter servers: workers, each a replica of the model, and the
servers.

Of ranks 0 to 9, with two servers and replicas of four ranks (TP2 x PP2):

    rank     0 1 2 3   4 5 6 7   8          9
    role     worker 0  worker 1  server 0   server 1
    place    0 1 2 3   0 1 2 3

`place` is the rank inside a worker. Every server has a piece of the parameters of each place.
Without dedicated server ranks, each rank of a worker also serves a piece of its own place, to the
ranks at that place of all workers.
"""

from dataclasses import dataclass, field

from ..config import ParallelConfig
from ..counting import counted
from ..parallel.team import Team


@dataclass(frozen=True)
class Role:
    """The role of one rank.

    rank:    in the job.
    size:    number of ranks of the job.
    places:  number of ranks of one worker.
    servers: number of dedicated server ranks, the last ones; 0: every rank of a worker also serves.
    secret:  of the job, which who connects to a server has to know.
    """

    rank: int
    size: int
    places: int
    servers: int
    secret: bytes = field(default=b"", repr=False, compare=False)

    @property
    def workers(self) -> int:
        return (self.size - self.servers) // self.places

    @property
    def clients_of_all(self) -> int:
        """Number of ranks that belong to workers."""
        return self.workers * self.places

    @property
    def only_serves(self) -> bool:
        return self.rank >= self.clients_of_all

    @property
    def worker(self) -> int:
        """Index of the worker that this rank belongs to."""
        assert not self.only_serves
        return self.rank // self.places

    @property
    def place(self) -> int:
        """Index of this rank in its worker."""
        assert not self.only_serves
        return self.rank % self.places

    @property
    def team(self) -> Team:
        """The ranks that this one computes with, those of its worker; of a server: the servers,
        unconnected.
        """
        if self.only_serves:
            return Team("servers", self.rank - self.clients_of_all, self.servers, connected=False)
        servers = (
            counted(self.servers, "parameter server")
            if self.servers
            else "parameters served by themselves"
        )
        text = f"{counted(self.workers, 'worker')} of {{}}, {servers}"
        return Team(f"worker {self.worker}", self.place, self.places, text=text)

    @property
    def endpoints(self) -> tuple[int, ...]:
        """The ranks that serve this one; the i-th has the i-th piece of its parameters."""
        if self.servers:
            return tuple(range(self.clients_of_all, self.size))
        return tuple(range(self.place, self.size, self.places))

    @property
    def clients(self) -> tuple[int, ...]:
        """The ranks that this one serves."""
        if self.only_serves:
            return tuple(range(self.clients_of_all))
        return () if self.servers else self.endpoints


def role_of(parallel: ParallelConfig, rank: int, size: int) -> Role | None:
    """Return the role of a rank of a job; None without parameter servers."""
    return (
        Role(rank, size, parallel.ranks_of_replica, parallel.num_parameter_servers)
        if parallel.served
        else None
    )


def ended_key(rank: int) -> str:
    """Return the key that is set in the job's store when a launcher saw a worker's rank end for any
    reason.
    """
    return f"rank {rank} ended"
