"""The look itself: all ranks of a job measure what a training job needs of them, in the same order."""

from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from ..parallel.agree import gather_json, together
from ..parallel.launch import World
from ..parallel.nodes import Nodes
from .clocks import skews
from .disks import disks
from .facts import facts_of
from .findings import Findings, RankFacts, RankLink
from .judge import LEAST_RATE, suspects
from .links import Meter
from .products import product_rate
from .rounds import rounds

_MEASURED_AGAIN = 8  # links at most
_MORE_RELIABLE = 3  # times that a suspect is measured


def look(
    world: World,
    control: dist.ProcessGroup | None,
    nodes: Nodes,
    directory: str = "",
    least_rate: float = LEAST_RATE,
    say: Callable[[str], object] = lambda _: None,
) -> Findings:
    """Return what all ranks find. Collective over all ranks of a job, which have it alike.

    control:    all ranks, for agreement on the CPU.
    nodes:      their hosts.
    directory:  of checkpoints; empty: none is looked at.
    least_rate: see `judge`.
    say:        called on each rank with what is being done.
    """
    say("facts")
    with together(control, "cpu"):
        own = facts_of(world.device)
    facts = [RankFacts.of(values) for values in gather_json(vars(own), control, "cpu")]
    hosts = nodes.of or _by_name(facts)
    say("matrix products")
    products = gather_json(product_rate(world.device), control, "cpu")
    wire = Meter(world.rank, world.device, _all_ranks(world), control)
    links = wire.links(rounds(hosts), say)
    found = Findings(
        facts,
        hosts,
        links,
        wire.reductions(say),
        products=products,
        skews=skews(world.rank, hosts, control),
    )
    found = replace(found, links=_again(found, wire, least_rate, say))
    if directory:
        say(f"directory {directory}")
        found = replace(
            found, directory=directory, disks=disks(directory, world.rank, hosts, control)
        )
    return found


def _all_ranks(world: World) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world.size > 1 else None


def _by_name(facts: list[RankFacts]) -> list[int]:
    """Return the host of each rank where no launcher tells: by their names."""
    names = list(dict.fromkeys(each.host for each in facts))
    return [names.index(each.host) for each in facts]


def _again(
    found: Findings, wire: Meter, least_rate: float, say: Callable[[str], object]
) -> list[RankLink]:
    """Return the links, those that seem slow measured again: alone, and the better result counts.

    Others that were measured at the same time may have been in their way.
    """
    best = {(link.source, link.destination): link for link in found.links}
    pairs = {tuple(sorted((link.source, link.destination))) for link in suspects(found, least_rate)}
    chosen = sorted(pairs)[:_MEASURED_AGAIN]
    alone = [[(one, other)] for one, other in chosen] * _MORE_RELIABLE
    for link in wire.links(alone, say, "links that seem slow, alone"):
        ends = (link.source, link.destination)
        best[ends] = max(best[ends], link, key=lambda each: each.rate)
    return list(best.values())
