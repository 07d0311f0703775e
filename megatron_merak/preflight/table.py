"""The findings as text: hosts, links, collectives and the directory, a table each."""

from collections.abc import Sequence
from statistics import median

from ..counting import counted
from .findings import Findings, RankLink
from .units import rate_text, size_text, time_text

_MOST_ROWS = 40  # links that are listed one by one


def table(found: Findings) -> str:
    """Return all of it, in parts."""
    parts = [_hosts(found), _links(found), _reductions(found), _directory(found)]
    return "\n\n".join(part for part in parts if part)


def summary(found: Findings) -> str:
    """Return the numbers of ranks and hosts, and what links have in the median, in a line."""
    ranks = counted(len(found.ranks), "rank")
    parts = [f"{ranks} on {counted(len(found.host_names), 'host')}"]
    for kind, links in _kinds(found).items():
        parts.append(f"{rate_text(median(link.rate for link in links))} {kind}")
    return ", ".join(parts)


def _kinds(found: Findings) -> dict[str, list[RankLink]]:
    """Return the links within a host and those between hosts, where there are any."""
    kinds: dict[str, list[RankLink]] = {"within a host": [], "between hosts": []}
    for link in found.links:
        kinds["within a host" if found.within(link) else "between hosts"].append(link)
    return {kind: links for kind, links in kinds.items() if links}


def _hosts(found: Findings) -> str:
    rows = [("host", "ranks", "device", "cores", "threads", "products of a rank", "clock")]
    notes = []
    for host, name in enumerate(found.host_names):
        ranks = [rank for rank, where in enumerate(found.hosts) if where == host]
        first = found.ranks[ranks[0]]
        rate = median(found.products[rank] for rank in ranks)
        rows.append(
            (
                name,
                f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
                first.device,
                str(first.cores),
                str(first.threads),
                f"{rate / 1e9:,.1f} GFLOP/s",
                f"{found.skews[host] * 1e3:+,.1f} ms",
            )
        )
        memory = f"{size_text(first.memory)} of memory free" if first.memory else ""
        of_device = f"{size_text(first.device_memory)} on a GPU" if first.device_memory else ""
        network = ", ".join(first.interfaces) or "no network interface"
        more = [part for part in (memory, of_device, first.driver, network) if part]
        notes.append(f"  {name}: {'; '.join(more)}")
    return "\n".join([_aligned(rows), *notes])


def _links(found: Findings) -> str:
    if not found.links:
        return ""
    rows = [("messages", "links", "latency", "slowest", "median", "fastest")]
    for kind, links in _kinds(found).items():
        rates = [link.rate for link in links]
        rows.append(
            (
                kind,
                str(len(links)),
                time_text(median(link.latency for link in links)),
                rate_text(min(rates)),
                rate_text(median(rates)),
                rate_text(max(rates)),
            )
        )
    text = _aligned(rows)
    if len(found.links) <= _MOST_ROWS:
        text += "\n\n" + _matrix(found.links, len(found.ranks))
    return text


def _matrix(links: Sequence[RankLink], ranks: int) -> str:
    """Rates from each rank (row) to each (column), in MB/s."""
    rates = {(link.source, link.destination): link.rate for link in links}
    rows = [("MB/s from", *(f"to {rank}" for rank in range(ranks)))]
    for source in range(ranks):
        cells = [
            f"{rates[source, other] / 1e6:,.0f}" if (source, other) in rates else "-"
            for other in range(ranks)
        ]
        rows.append((str(source), *cells))
    return _aligned(rows)


def _reductions(found: Findings) -> str:
    if not found.reductions:
        return ""
    ranks = len(found.ranks)
    rows = [(f"all-reduce over {counted(ranks, 'rank')}", "time", "bus bandwidth")]
    for size, seconds in found.reductions.items():
        rate = 2 * (ranks - 1) / ranks * size / seconds
        rows.append((size_text(size), time_text(seconds), rate_text(rate)))
    return _aligned(rows)


def _directory(found: Findings) -> str:
    if not found.disks:
        return ""
    rows = [(f"{found.directory}", "free", "written and synced", "sync of a small file", "shared")]
    for disk in found.disks:
        name = found.host_names[disk.host]
        if disk.error:
            rows.append((name, disk.error, "-", "-", "-"))
            continue
        alone = len(found.disks) == 1
        rows.append(
            (
                name,
                size_text(disk.free),
                rate_text(disk.rate),
                time_text(disk.sync),
                "one host" if alone else "no" if disk.missing else "yes",
            )
        )
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
