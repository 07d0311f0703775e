"""What is wrong is named, by host where one has most of it, and what is right is not."""

from dataclasses import replace
from itertools import permutations

import pytest

from megatron_merak.preflight.findings import Disk, Findings, RankFacts, RankLink
from megatron_merak.preflight.judge import judge, suspects
from megatron_merak.preflight.table import summary, table

GOOD = 10e9


def found(hosts: int = 3, ranks: int = 2, memory: int = 80 << 30) -> Findings:
    """Hosts on which nothing is wrong."""
    places = [host for host in range(hosts) for _ in range(ranks)]
    facts = [
        RankFacts(f"h{host}", ["eth0"], 8, 1, memory=1 << 34, device="GPU", device_memory=memory)
        for host in places
    ]
    links = [
        RankLink(one, other, 1e-5, 10 * GOOD if places[one] == places[other] else GOOD)
        for one, other in permutations(range(len(places)), 2)
    ]
    return Findings(
        facts, places, links, {4096: 1e-4}, products=[100e12] * len(places), skews=[0.0] * hosts
    )


def slowed(given: Findings, rate: float, *ends: tuple[int, int]) -> Findings:
    links = [
        replace(link, rate=rate) if (link.source, link.destination) in ends else link
        for link in given.links
    ]
    return replace(given, links=links)


def told(given: Findings) -> list[str]:
    return [str(problem) for problem in judge(given)]


def test_nothing_is_wrong():
    assert told(found()) == []
    assert told(found(hosts=1, ranks=1)) == []
    assert (
        summary(found())
        == "6 ranks on 3 hosts, 100.00 GB/s within a host, 10.00 GB/s between hosts"
    )


def test_a_slow_link_within_a_host():
    (line,) = told(slowed(found(), 4e9, (0, 1)))
    assert line.startswith(
        "slow link from rank 0 to rank 1 on h0: 4.00 GB/s, and links within a host have 100"
    )


def test_memory_that_all_share_is_judged_mildly():
    assert told(slowed(found(memory=0), 30e9, (0, 1))) == []
    assert len(told(slowed(found(memory=0), 10e9, (0, 1)))) == 1


def test_a_slow_link_between_two_hosts():
    between = [(one, other) for one in (0, 1) for other in (2, 3)]
    (line,) = told(slowed(found(), 2e9, *between))
    assert line.startswith("slow link from h0 to h1: 2.00 GB/s (rank 0 to rank 2), and ")


def test_the_only_link_is_beside_its_other_direction():
    between = [(one, other) for one in (0, 1) for other in (2, 3)]
    (line,) = told(slowed(found(hosts=2), 1e9, *between))
    assert "from h0 to h1" in line
    assert "the other direction has 10.00 GB/s" in line
    both = [*between, *((other, one) for one, other in between)]
    lines = told(slowed(found(hosts=2), 1e7, *both))
    assert len(lines) == 2
    assert all("training needs at least 50.0 MB/s" in line for line in lines)


def test_a_host_whose_links_are_slow_is_named_and_not_each_of_them():
    given = found(hosts=5)
    of_host = [
        (link.source, link.destination)
        for link in given.links
        if 2 in (given.hosts[link.source], given.hosts[link.destination])
        and link.source // 2 != link.destination // 2
    ]
    (line,) = told(slowed(given, 1e9, *of_host))
    assert line.startswith(
        "slow host h2: most of its links to other hosts are slow, down to 1.00 GB/s"
    )


def test_suspects_come_slowest_first():
    given = slowed(slowed(found(), 4e9, (0, 1)), 1e9, (0, 2))
    assert [(link.source, link.destination) for link in suspects(given)] == [(0, 2), (0, 1)]


@pytest.mark.parametrize(("share", "named"), [(0.85, False), (0.75, True)])
def test_a_host_whose_products_are_slow(share, named):
    given = found()
    rates = [100e12 * (share if host == 1 else 1) for host in given.hosts]
    lines = told(replace(given, products=rates))
    assert [line.partition(":")[0] for line in lines] == ["slow host h1"] * named


def test_one_slow_gpu_of_a_host():
    given = found(ranks=4)
    rates = [100e12 * (0.5 if rank == 5 else 1) for rank in range(12)]
    (line,) = told(replace(given, products=rates))
    assert line.startswith("slow GPU rank 5 on h1: its matrix products run at 50,000 GFLOP/s")


def test_a_clock_that_is_wrong():
    (line,) = told(replace(found(), skews=[0.0, 0.4, -3.0]))
    assert line.startswith("clock of h2: it is 3.0 s behind that of h0")


def test_versions_that_differ():
    given = found()
    ranks = [replace(each, software={"torch": "2.13"}) for each in given.ranks]
    ranks[4] = replace(ranks[4], software={"torch": "2.12"})
    (line,) = told(replace(given, ranks=ranks))
    assert line.startswith("torch 2.12: rank 4 has it, and rank 0 has 2.13")


def test_directories_that_differ_or_cannot_be_written():
    fine = [Disk(host, free=1 << 40, rate=1e9, sync=1e-3) for host in range(3)]
    given = replace(found(), directory="/run", disks=fine)
    assert told(given) == []
    assert "yes" in table(given)
    apart = [fine[0], replace(fine[1], missing=[0, 2]), fine[2]]
    (line,) = told(replace(given, disks=apart))
    assert line.startswith("directory /run on h1: files that h0, h2 wrote there are not seen")
    full = [replace(fine[0], free=5 << 20), fine[1], Disk(2, error="Permission denied")]
    lines = told(replace(given, disks=full))
    assert [line.partition(". ")[0] for line in lines] == [
        "directory /run on h0: 5 MiB are free",
        "directory /run on h2: Permission denied",
    ]


def test_hosts_of_one_name_are_told_apart():
    given = found(hosts=2)
    ranks = [replace(each, host="vm") for each in given.ranks]
    assert replace(given, ranks=ranks).host_names == ["vm (host 0)", "vm (host 1)"]
