"""Write the tables of docs/cluster.md: the cost table's links, what groups see of them, where ranks
lie.

python tools/cluster_page.py --write
"""

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_merak.cluster import CLUSTERS, GIB, Cluster, Link, all_reduce
from megatron_merak.plan import Grid
from megatron_merak.planner.links import link_along

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "cluster.md"
BLOOM, OPT = Grid(tp=4, dp=8, pp=12), Grid(tp=8, dp=124)
ORDERS = ("tp-dp-pp", "tp-pp-dp")
MESSAGE = 2**30  # bytes
PLACED = {  # what a group is -> its ranks, on DGX A100s
    "8 in one node": range(8),
    "8, one in each of 8 nodes": range(0, 64, 8),
    "8, two in each of 4 nodes": range(0, 32, 4),
    "16, all of 2 nodes": range(16),
    "64, all of 8 nodes": range(64),
}


def _table(*rows: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _link(link: Link) -> str:
    return f"{link.name}: {link.bandwidth / 1e9:g} GB/s, {link.latency * 1e6:g} us"


def clusters() -> str:
    head = (
        "`--device`",
        "device",
        "memory",
        "ranks in a node",
        "inside a node, of a rank",
        "one network card",
        "cards",
    )
    return _table(head, *(_row(name, cluster) for name, cluster in CLUSTERS.items()))


def _row(name: str, cluster: Cluster) -> tuple[str, ...]:
    memory = f"{cluster.device.memory / GIB:.0f} GiB" if cluster.device.memory else "shared"
    cards = f"{cluster.nics} of a node" if cluster.nics else "1 of a rank"
    ranks = str(cluster.ranks_per_node)
    return (
        f"`{name}`",
        cluster.device.name,
        memory,
        ranks,
        _link(cluster.inside),
        _link(cluster.between),
        cards,
    )


def groups() -> str:
    rows = []
    for name, ranks in PLACED.items():
        link = CLUSTERS["dgx-a100"].link(ranks)
        seconds = all_reduce(len(ranks), MESSAGE, link)
        rows.append(
            (
                name,
                f"{link.bandwidth / 1e9:g} GB/s",
                f"{link.latency * 1e6:.1f} us",
                f"{seconds * 1e3:.1f} ms",
            )
        )
    return _table(
        ("ranks of a group", "bandwidth", "latency of a step", "all-reduce of 1 GiB"), *rows
    )


def nodes(grid: Grid, shown: int, ranks_per_node: int = 8) -> str:
    """The first nodes and the last: their ranks, and which part of the model these have."""
    count = grid.size // ranks_per_node
    rows = [("node", "ranks", "pipeline ranks", "replicas", "tensor-parallel ranks")]
    for node in [*range(shown), count - 1]:
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        tp, _, dp, pp = zip(*map(grid.coordinates, ranks), strict=True)
        rows.append((str(node), *(_span(values) for values in (ranks, pp, dp, tp))))
    rows.insert(-1, ("...",) * 5)
    return _table(*rows)


def _span(values: tuple[int, ...] | range) -> str:
    first, last = min(values), max(values)
    return str(first) if first == last else f"{first}-{last}"


def links() -> str:
    """Of the groups of rank 0 under each order; of a pipeline, between neighbours."""
    rows, cluster = [("order", "group", "ranks", "bandwidth")], CLUSTERS["dgx-a100"]
    for order in ORDERS:
        grid = replace(BLOOM, order=order)
        steps = [(stage, stage + 1) for stage in range(grid.pp - 1)]
        for axis, places in (("tp", [None]), ("dp", [None]), ("pp", steps)):
            speeds = sorted(
                {link_along(cluster, grid, axis, each).bandwidth / 1e9 for each in places}
            )
            ranks = grid.groups(axis)[0]
            few = (
                f"{', '.join(map(str, ranks[:4]))}{f', ..., {ranks[-1]}' if len(ranks) > 4 else ''}"
            )
            rows.append(
                (f"`{order}`", axis, few, f"{' or '.join(f'{speed:g}' for speed in speeds)} GB/s")
            )
    return _table(*rows)


BLOCKS = {
    "clusters": clusters,
    "groups": groups,
    "bloom": lambda: nodes(BLOOM, 5),
    "links": links,
    "opt": lambda: nodes(OPT, 2),
}


def document() -> str:
    """The page with every table written anew."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, make in BLOCKS.items():
        before, begin, rest = text.partition(f"<!-- {name}: written by tools/cluster_page.py -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{begin}{make()}\n{end}{after}"
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/cluster.md instead of printing it"
    )
    if parser.parse_args().write:
        DOCUMENT.write_text(document(), encoding="utf-8")
        print(f"wrote {DOCUMENT}")
    else:
        print(document())
