"""Searches on clusters whose nodes differ find what trying everything finds."""

import math
from dataclasses import replace

import pytest

from megatron_merak.cluster import GIB, Cluster, NodeGroup, find_cluster
from megatron_merak.errors import PlanError
from megatron_merak.planner.search.bound import Bounds
from megatron_merak.planner.search.choice import Layer
from megatron_merak.planner.search.report import Breakdown, memory_line, stages_on_nodes
from tests.choice import later
from tests.planner.search.test_search import configuration, search
from tests.planner.search.tried import everything


def mixed(name: str, ranks_per_node: int, *groups: tuple[int, float, float]) -> Cluster:
    """A cluster of groups: nodes, GiB of a rank, speed."""
    cluster = find_cluster(name)
    nodes = tuple(
        NodeGroup(count, replace(cluster.device, name=f"{size} GB", memory=int(size * GIB)), speed)
        for count, size, speed in groups
    )
    return replace(cluster, ranks_per_node=ranks_per_node, nodes=nodes)


CASES = [
    # slower nodes; both orders of ranks, of which one has unequal nodes in a pipeline rank
    (mixed("dgx-a100", 4, (1, 80, 1.0), (1, 40, 0.6)), 8, {"tp": 2, "mb": 2, "sp": False, "pp": 2}),
    # smaller ones: pipelines whose last ranks have less memory
    (mixed("dgx-h100", 4, (1, 6, 1.0), (1, 3, 0.8)), 8, {"tp": 2, "mb": 1, "sp": False}),
    # three kinds, and replicas on unequal nodes
    (mixed("rtx3090", 2, (1, 24, 0.5), (1, 24, 1.0), (2, 12, 0.85)), 8, {"mb": 1, "tp": 1}),
]
QUICK = {"overlap": "weight-gradient", "sharding": "optim"}


@pytest.mark.parametrize("case", [0, *map(later, range(1, len(CASES)))])
def test_a_search_finds_what_trying_everything_finds(case):
    cluster, ranks, pins = CASES[case]
    pins = pins | QUICK if case == 2 else pins
    one = search(configuration("ten"), cluster)
    fitting = [made for _, made in everything(one, ranks, 32, pins)]
    assert len(fitting) > 20
    least = min(made.predicted_time for made in fitting)
    found = one.run(ranks, [32], pins)
    assert found.fastest.seconds == least
    assert found.made < len(fitting) / 2 and found.rest is None


def test_degrees_have_a_bound():
    cluster, ranks, pins = CASES[1]
    one = search(configuration("ten"), cluster)
    space = one.space(ranks, [32], pins)
    bounds = Bounds(one.request, one.cluster, one.memory)
    fastest: dict[int, float] = {}
    for choice, made in everything(one, ranks, 32, pins | QUICK):
        fastest[choice.pp] = min(made.predicted_time, fastest.get(choice.pp, math.inf))
    assert len(fastest) > 1
    for degrees in space.degrees(Layer(2), 12):
        bound = bounds.of_degrees(one._of(degrees, False), degrees, space.orders(degrees))
        assert 0 < bound <= fastest.get(degrees.pp, math.inf)


def test_what_is_found_says_which_stage_is_on_which_nodes():
    cluster, ranks, pins = CASES[0]
    one = search(configuration("ten"), cluster)
    found = one.run(ranks, [32], pins | {"schedule": "1f1b", "order": "tp-dp-pp"}).best
    lines = stages_on_nodes(found.plan).splitlines()
    assert lines[0] == "node 0: 80 GB, node 1: 40 GB at 0.6"
    assert lines[2].endswith("  1 of 80 GB") and lines[3].endswith("  1 of 40 GB at 0.6")
    assert "of 76.0 GiB, rank 1" in memory_line(found.plan, one.memory)
    assert memory_line(found.plan, one.memory).endswith("of 36.0 GiB")
    sizes = [len(stage.units) for stage in found.plan.stages]
    assert sizes[0] > sizes[1]


def test_the_parts_of_a_step_add_up():
    cluster, ranks, pins = CASES[2]
    one = search(configuration("ten"), cluster)
    for order in ("tp-dp-pp", "tp-pp-dp"):
        own = pins | QUICK | {"schedule": "1f1b", "order": order, "pp": 4}
        for each in one.run(ranks, [32], own).found:
            parts = vars(Breakdown.of(each.plan))
            assert sum(parts.values()) == pytest.approx(each.seconds, rel=1e-9)
            assert min(parts.values()) >= -1e-9 * each.seconds


def test_a_search_with_fewer_ranks_has_the_first_nodes():
    cluster, ranks, pins = CASES[0]
    one = search(configuration("ten"), cluster)
    half = one.run(4, [32], pins).best
    plain = search(configuration("ten"), cluster.used_by(4))
    assert half == plain.run(4, [32], pins).best and half.plan.cluster.nodes == ()
    with pytest.raises(PlanError, match="ranks 16: the cluster .* has 2 nodes of 4"):
        one.run(16, [32], pins)
