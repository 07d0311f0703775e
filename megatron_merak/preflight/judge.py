"""What of the findings is wrong, each as one error with its remedy. Every rank comes to the same."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from ..counting import named_ranks
from ..errors import LaunchError
from .findings import Findings, RankLink
from .units import rate_text

SLOW_LINK = 0.5  # of the median of links of its kind
# The same inside a host whose ranks compute on CPUs: messages go through memory that all share.
SLOW_IN_MEMORY = 0.2
SLOW_HOST = 0.8  # of the median of products
LEAST_RATE = 50e6  # bytes per second between hosts, below which nothing is a network for training
MOST_SKEW = 1.0  # seconds
LEAST_FREE = 1 << 30  # bytes
_SOME = 4  # links of a kind from which a median says something of each


def judge(found: Findings, least_rate: float = LEAST_RATE) -> list[LaunchError]:
    """Return what is wrong, the worst first.

    least_rate: bytes per second that a link between hosts has to reach.
    """
    return [
        *_software(found),
        *_directories(found),
        *_links(found, least_rate),
        *_products(found),
        *_clocks(found),
    ]


def suspects(found: Findings, least_rate: float = LEAST_RATE) -> list[RankLink]:
    """Return the links that are slow, to be measured once more without others beside them."""
    slow = [link for link in found.links if _is_slow(link, found, least_rate)]
    return sorted(slow, key=lambda link: link.rate)


def _is_slow(link: RankLink, found: Findings, least_rate: float) -> bool:
    return link.rate < bound(link, found, least_rate)[0]


def bound(link: RankLink, found: Findings, least_rate: float) -> tuple[float, str]:
    """Return below which rate a link is slow, and why there."""
    within = found.within(link)
    alike = [other.rate for other in found.links if found.within(other) == within]
    kind = "within a host" if within else "between hosts"
    bounds = [(0.0, "")]
    if len(alike) >= _SOME:
        middle = median(alike)
        in_memory = within and not found.ranks[link.source].device_memory
        share = SLOW_IN_MEMORY if in_memory else SLOW_LINK
        bounds.append((share * middle, f"links {kind} have {rate_text(middle)} in the median"))
    if not within:
        bounds.append((least_rate, f"training needs at least {rate_text(least_rate)}"))
    back = [
        other.rate
        for other in found.links
        if (other.source, other.destination) == (link.destination, link.source)
    ]
    if back and not within:
        bounds.append((SLOW_LINK * back[0], f"the other direction has {rate_text(back[0])}"))
    return max(bounds)


def _links(found: Findings, least_rate: float) -> list[LaunchError]:
    names = found.host_names
    slow = suspects(found, least_rate)
    problems = []
    between: dict[tuple[int, int], list[RankLink]] = defaultdict(list)
    for link in slow:
        if found.within(link):
            reason = f"{rate_text(link.rate)}, and {bound(link, found, least_rate)[1]}"
            where = f"from rank {link.source} to rank {link.destination} on {names[found.hosts[link.source]]}"
            remedy = "Look at what else runs there, and at how its devices are connected"
            problems.append(LaunchError("slow link", where, reason, remedy))
        else:
            ends = (found.hosts[link.source], found.hosts[link.destination])
            between[ends].append(link)
    slow_ends = [host for ends in between for host in ends]
    for host in sorted(set(slow_ends), key=lambda each: -slow_ends.count(each)):
        others = [ends for ends in _directions(found) if host in ends]
        if len(names) > 2 and len([ends for ends in others if ends in between]) > len(others) / 2:
            rates = [link.rate for ends in others for link in between.pop(ends, [])]
            reason = (
                f"most of its links to other hosts are slow, down to {rate_text(min(rates))}, "
                f"and {_median_of(found)}"
            )
            remedy = "Look at its network card, its cable and what else runs there"
            problems.append(LaunchError("slow host", names[host], reason, remedy))
    for (source, destination), links in between.items():
        worst = min(links, key=lambda link: link.rate)
        ranks = f"rank {worst.source} to rank {worst.destination}"
        reason = f"{rate_text(worst.rate)} ({ranks}), and {bound(worst, found, least_rate)[1]}"
        where = f"from {names[source]} to {names[destination]}"
        remedy = "Look at the network between them, and at the interface that is used"
        problems.append(LaunchError("slow link", where, reason, remedy))
    return problems


def _directions(found: Findings) -> set[tuple[int, int]]:
    return {
        (found.hosts[link.source], found.hosts[link.destination])
        for link in found.links
        if not found.within(link)
    }


def _median_of(found: Findings) -> str:
    rates = [link.rate for link in found.links if not found.within(link)]
    return f"links between hosts have {rate_text(median(rates))} in the median"


def _products(found: Findings) -> list[LaunchError]:
    """Hosts whose products are slow; of GPUs, ranks."""
    names = found.host_names
    problems = []
    by_host = [median(_of_host(found.products, found.hosts, host)) for host in range(len(names))]
    middle = median(by_host)
    for host, rate in enumerate(by_host):
        if len(by_host) > 1 and rate < SLOW_HOST * middle:
            reason = (
                f"its matrix products run at {rate / 1e9:,.1f} GFLOP/s, and those of hosts at "
                f"{middle / 1e9:,.1f} in the median"
            )
            remedy = "Look at what else runs there, at its clock rate and its temperature"
            problems.append(LaunchError("slow host", names[host], reason, remedy))
    middle = median(found.products)
    for rank, rate in enumerate(found.products):
        of_gpu = found.ranks[rank].device_memory > 0
        if (
            of_gpu
            and rate < SLOW_HOST * middle
            and by_host[found.hosts[rank]] >= SLOW_HOST * middle
        ):
            reason = (
                f"its matrix products run at {rate / 1e9:,.0f} GFLOP/s, and those of ranks at "
                f"{middle / 1e9:,.0f} in the median"
            )
            remedy = "Look at that GPU's clock rate, temperature and other processes"
            where = f"rank {rank} on {names[found.hosts[rank]]}"
            problems.append(LaunchError("slow GPU", where, reason, remedy))
    return problems


def _of_host(values: Sequence[float], hosts: Sequence[int], host: int) -> list[float]:
    return [value for value, where in zip(values, hosts, strict=True) if where == host]


def _clocks(found: Findings) -> list[LaunchError]:
    return [
        LaunchError(
            "clock",
            f"of {found.host_names[host]}",
            f"it is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} that of "
            f"{found.host_names[0]}: times in logs and of files do not compare",
            "Start a time service on all hosts",
        )
        for host, skew in enumerate(found.skews)
        if abs(skew) > MOST_SKEW
    ]


def _software(found: Findings) -> list[LaunchError]:
    problems = []
    for name, value in found.ranks[0].software.items():
        others = {
            rank: each.software.get(name, "(none)")
            for rank, each in enumerate(found.ranks)
            if each.software.get(name, "(none)") != value
        }
        if others:
            other = next(iter(others.values()))
            alike = [rank for rank, each in others.items() if each == other]
            verb = "has" if len(alike) == 1 else "have"
            reason = f"{named_ranks(alike)} {verb} it, and rank 0 has {value}"
            problems.append(LaunchError(name, other, reason, "Make it the same on all hosts"))
    return problems


def _directories(found: Findings) -> list[LaunchError]:
    problems = []
    names = found.host_names
    for disk in found.disks:
        what = f"directory {found.directory}"
        name = names[disk.host]
        if disk.error:
            remedy = "Name one that every host can write to"
            problems.append(LaunchError(what, f"on {name}", disk.error, remedy))
            continue
        if disk.missing:
            others = ", ".join(names[host] for host in disk.missing)
            reason = f"files that {others} wrote there are not seen: it is not one directory"
            remedy = "Name one on a file system that all hosts share"
            problems.append(LaunchError(what, f"on {name}", reason, remedy))
        if disk.free < LEAST_FREE:
            reason = f"{disk.free / (1 << 20):,.0f} MiB are free"
            problems.append(LaunchError(what, f"on {name}", reason, "Make room, or name another"))
    return problems
