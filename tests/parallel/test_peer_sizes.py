"""The largest message of peer memory: one fact, which its documentation repeats, and the arithmetic
behind it.
"""

from pathlib import Path

import pytest

from megatron_merak.cluster import DEVICES, LINKS, Link, all_reduce
from megatron_merak.parallel.peer_memory import _ONE_SHOT, CAPACITY

DOCS = Path(__file__).resolve().parents[2] / "docs"
MEMORY = DEVICES["H200"].memory_bandwidth


def copied_in(message: float) -> float:
    """Seconds in which a message is read and written in a rank's own memory."""
    return 2 * message / MEMORY


def in_chunks(ranks: int, message: float, chunks: int, link: Link) -> float:
    """Two shots, with one meeting for each chunk and one more. Seconds."""
    meetings = (chunks + 1) * link.latency
    return (
        meetings + copied_in(message / chunks) + 2 * (ranks - 1) / ranks * message / link.bandwidth
    )


def in_one_shot(ranks: int, message: float, link: Link) -> float:
    return link.latency + copied_in(message) + (ranks - 1) * message / link.bandwidth


def rows() -> list[list[str]]:
    text = (DOCS / "gpu.md").read_text(encoding="utf-8")
    table = text.split("test_peer_sizes.py -->\n")[1].split("\n<!-- end of the sizes")[0]
    found = []
    for line in table.split("\n")[2:]:
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} ranks, {row[1]} MiB")
def test_what_the_documentation_reckons(row):
    ranks, mebibytes = int(row[0]), int(row[1])
    message, link = mebibytes << 20, LINKS["nvlink4"]
    ways = {chunks: in_chunks(ranks, message, chunks, link) for chunks in range(1, 65)}
    if ranks == 2:
        ways[1] = in_one_shot(ranks, message, link)
    best = min(ways, key=ways.__getitem__)
    seconds = (all_reduce(ranks, message, link), ways[1], ways[best])
    ring, whole, least = (f"{1e6 * each:.0f}" for each in seconds)
    assert row[2:] == [ring, whole, f"{least}, {best}"]
    assert ways[best] > 0.96 * ways[1], "chunks are worth their while"


@pytest.mark.parametrize("link", ["nvlink3", "nvlink4"])
def test_two_ranks_gain_nothing_beyond_the_limit(link):
    for message in (CAPACITY, 2 * CAPACITY, 8 * CAPACITY):
        gained = all_reduce(2, message, LINKS[link]) / in_one_shot(2, message, LINKS[link])
        assert gained < 1.02


def test_the_limit_is_one_fact():
    largest = f"up to {CAPACITY >> 20} MiB"
    for page in ("gpu.md", "native.md", "flags.md"):
        assert largest in (DOCS / page).read_text(encoding="utf-8"), page
    assert max(_ONE_SHOT.values()) == CAPACITY
