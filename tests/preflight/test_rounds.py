"""Pairs in rounds: each rank is in one pair of a round at most, and all that are to meet do once."""

from collections import Counter
from itertools import combinations

import pytest

from megatron_merak.preflight.rounds import rounds, tournament


@pytest.mark.parametrize("size", range(1, 12))
def test_every_member_meets_every_other_once(size):
    found = tournament(range(size))
    assert sorted(pair for each in found for pair in each) == [*combinations(range(size), 2)]
    assert len(found) <= size
    for each in found:
        assert max(Counter(rank for pair in each for rank in pair).values()) == 1


def test_a_small_job_meets_in_full():
    assert sum(map(len, rounds([0, 0, 1, 1, 2]))) == 10


@pytest.mark.parametrize("sizes", [[8] * 64, [8, 8, 8, 8, 4], [3, 40]])
def test_a_large_job_meets_within_hosts_and_between_all_of_them(sizes):
    hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
    found = rounds(hosts)
    pairs = [pair for each in found for pair in each]
    assert len(pairs) == len(set(pairs))
    assert all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in found)
    met = set(pairs)
    inside = [
        pair for pair in combinations(range(len(hosts)), 2) if hosts[pair[0]] == hosts[pair[1]]
    ]
    assert met >= set(inside)
    between = {(hosts[one], hosts[other]) for one, other in pairs if hosts[one] != hosts[other]}
    assert between == set(combinations(range(len(sizes)), 2))
    assert len(found) <= max(sizes) + len(sizes)
