"""Which pairs of ranks exchange messages at the same time: each rank is in one pair at most."""

from collections.abc import Sequence
from itertools import chain, zip_longest

Pair = tuple[int, int]

MOST_PAIRED = 32  # ranks of a job in which every rank meets every other


def rounds(hosts: Sequence[int]) -> list[list[Pair]]:
    """Return rounds of pairs of ranks, the smaller one first.

    In a job of up to `MOST_PAIRED` ranks all pairs meet. In a larger one all that share a host do,
    and of any two hosts those that have the same place on theirs.

    hosts: the host of each rank.
    """
    ranks = range(len(hosts))
    if len(hosts) <= MOST_PAIRED:
        return tournament(ranks)
    of_host = [[rank for rank in ranks if hosts[rank] == host] for host in sorted(set(hosts))]
    inside = [tournament(members) for members in of_host]
    found = [list(chain(*together)) for together in zip_longest(*inside, fillvalue=())]
    for meetings in tournament(range(len(of_host))):
        between: list[Pair] = []
        for one, other in meetings:
            between += zip(of_host[one], of_host[other], strict=False)
        found.append(between)
    return [each for each in found if each]


def tournament(members: Sequence[int]) -> list[list[Pair]]:
    """Return rounds in which each member meets each other once: one stays, the others move round
    a table.
    """
    table: list[int | None] = [*members]
    if len(table) % 2:
        table.append(None)
    found = []
    for _ in range(len(table) - 1):
        half = len(table) // 2
        opposite = zip(table[:half], reversed(table[half:]), strict=True)
        met = [
            (min(one, other), max(one, other))
            for one, other in opposite
            if one is not None and other is not None
        ]
        found.append(sorted(met))
        table[1:] = [table[-1], *table[1:-1]]
    return [each for each in found if each]
