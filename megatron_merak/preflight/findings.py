"""What a look at the ranks of a job found, before anybody judges it; every rank has the same."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self


class FromJson:
    """A dataclass of which JSON makes another one."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


@dataclass(frozen=True)
class RankFacts(FromJson):
    """What one rank says of itself and its host.

    host:       the name of the host.
    interfaces: of its network, with address and speed.
    cores:      that this process may use.
    threads:    of one operation.
    memory:     bytes of the host that are available, 0 where unknown.
    device:     its name.
    device_memory: bytes, 0 on a CPU.
    driver:     of the GPU, and its ECC mode and errors; empty on a CPU.
    software:   versions, by name; also settings that decide numbers.
    """

    host: str
    interfaces: list[str]
    cores: int
    threads: int
    memory: int
    device: str
    device_memory: int = 0
    driver: str = ""
    software: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class RankLink(FromJson):
    """Messages from one rank to another.

    latency: seconds of a small one, half of a round trip.
    rate:    bytes per second of the largest size: small ones pass in bursts.
    rates:   bytes per second, by size in bytes.
    """

    source: int
    destination: int
    latency: float
    rate: float
    rates: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Disk(FromJson):
    """The directory of --save, as the first rank of a host finds it.

    host:    index.
    error:   why nothing can be written there; empty: it can.
    free:    bytes.
    rate:    bytes per second that are written and synced.
    sync:    seconds until a small file is.
    missing: hosts whose file this one does not see.
    """

    host: int
    error: str = ""
    free: int = 0
    rate: float = 0.0
    sync: float = 0.0
    missing: list[int] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Findings:
    """All that was found.

    ranks:       facts of each.
    hosts:       the host of each rank.
    links:       both directions of each pair that met.
    reductions:  seconds of an all-reduce over all ranks, by size in bytes.
    products:    FLOP per second of each rank's matrix products, all at once.
    skews:       seconds by which the clock of each host is ahead of the first one's.
    directory:   of --save; empty: none was given.
    disks:       one for each host.
    """

    ranks: list[RankFacts]
    hosts: list[int]
    links: list[RankLink]
    reductions: dict[int, float]
    products: list[float]
    skews: list[float]
    directory: str = ""
    disks: Sequence[Disk] = ()

    @property
    def host_names(self) -> list[str]:
        """The name of each host, with its index where several have one name."""
        first = [self.hosts.index(host) for host in range(max(self.hosts) + 1)]
        names = [self.ranks[rank].host for rank in first]
        return [
            f"{name} (host {host})" if names.count(name) > 1 else name
            for host, name in enumerate(names)
        ]

    def within(self, link: RankLink) -> bool:
        """Whether a link is inside a host."""
        return self.hosts[link.source] == self.hosts[link.destination]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as values of JSON."""
        return dataclasses.asdict(self) | {"host_names": self.host_names}
