"""Who is who in a job with parameter servers: workers, each a replica of the model, and the ranks that serve them.

Of ranks 0 to 9, with two servers and replicas of four ranks (TP2 x PP2):

    rank     0 1 2 3   4 5 6 7   8          9
    role     worker 0  worker 1  server 0   server 1
    place    0 1 2 3   0 1 2 3

Every server has a piece of the parameters of each place. With no ranks that only serve, each worker's rank also serves
a piece of its own place, to the ranks at the same place of all workers.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Role:
    """What one rank of the job is.

    rank, size: the job's. places: ranks of one worker. servers: ranks that only serve, the last ones; 0: there are
    none, and every rank of a worker serves beside it.
    """

    rank: int
    size: int
    places: int
    servers: int

    @property
    def workers(self) -> int:
        return (self.size - self.servers) // self.places

    @property
    def clients_of_all(self) -> int:
        """How many ranks belong to workers."""
        return self.workers * self.places

    @property
    def only_serves(self) -> bool:
        return self.rank >= self.clients_of_all

    @property
    def worker(self) -> int:
        """Which worker this rank belongs to."""
        assert not self.only_serves
        return self.rank // self.places

    @property
    def place(self) -> int:
        """Where in its worker this rank stands."""
        assert not self.only_serves
        return self.rank % self.places

    @property
    def endpoints(self) -> tuple[int, ...]:
        """The ranks that serve this one: the i-th has the i-th piece of its parameters."""
        if self.servers:
            return tuple(range(self.clients_of_all, self.size))
        return tuple(range(self.place, self.size, self.places))

    @property
    def clients(self) -> tuple[int, ...]:
        """The ranks that this one serves."""
        if self.only_serves:
            return tuple(range(self.clients_of_all))
        return () if self.servers else self.endpoints


def job_keys(store: dist.Store, attempt: str = "0") -> dist.Store:
    """What the ranks of one attempt at a job write into a store that its launcher may use for several."""
    return dist.PrefixStore(f"megatron_merak, attempt {attempt}", store)


def ended_key(rank: int) -> str:
    """Is in the job's store when a launcher saw that rank of a worker end, however it came about."""
    return f"rank {rank} ended"
