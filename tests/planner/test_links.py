"""What joins the ranks of a group follows from where the rank order puts them, for every group of
the grid.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.cluster import CLUSTERS
from megatron_merak.plan import AXES, Grid
from megatron_merak.planner.links import link_along

DGX = CLUSTERS["dgx-a100"]
degree = st.integers(1, 6)
grids = st.builds(Grid, degree, st.just(1), degree, degree, st.permutations(AXES).map("-".join))


@given(grids, st.integers(1, 9), st.sampled_from(["tp", "dp", "pp"]))
@settings(max_examples=200, deadline=None)
def test_the_link_of_an_axis_is_that_of_its_worst_group(grid, ranks_per_node, axis):
    cluster = replace(DGX, ranks_per_node=ranks_per_node)
    links = [cluster.link(group) for group in grid.groups(axis)]
    found = link_along(cluster, grid, axis)
    assert found == min(links, key=lambda link: (link.bandwidth, -link.latency)) and found in links


@given(grids, st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_some_places_along_an_axis(grid, ranks_per_node, data):
    cluster = replace(DGX, ranks_per_node=ranks_per_node)
    places = tuple(sorted(data.draw(st.sets(st.integers(0, grid.pp - 1), min_size=1))))
    links = [cluster.link([group[place] for place in places]) for group in grid.groups("pp")]
    assert link_along(cluster, grid, "pp", places) == min(
        links, key=lambda link: (link.bandwidth, -link.latency)
    )


@pytest.mark.parametrize(
    ("order", "dp", "border"),
    [("tp-dp-pp", 46, 23), ("tp-pp-dp", 23, 240), ("dp-tp-pp", 240, 23)],
)
def test_what_an_order_puts_inside_a_node_is_fast(order, dp, border):
    """TP 4 x DP 8 x PP 2 on eight nodes of eight, in GB/s."""
    grid = Grid(tp=4, dp=8, pp=2, order=order)
    assert link_along(DGX, grid, "dp").bandwidth / 1e9 == pytest.approx(dp)
    assert link_along(DGX, grid, "pp", (0, 1)).bandwidth / 1e9 == pytest.approx(border)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_an_exchange_sends_what_leaves_a_node_through_each_rank_s_own_card(nodes):
    """The formulas take (n - 1) / n of a rank's bytes; those for other nodes are (n - 8) / n."""
    ranks = 8 * nodes
    link = DGX.exchange_link(range(ranks))
    if nodes == 1:
        assert link == DGX.inside
        return
    seconds = (ranks - 1) / ranks / link.bandwidth
    assert seconds == pytest.approx((ranks - 8) / ranks / DGX.between.bandwidth)
    assert link.bandwidth < DGX.link(range(ranks)).bandwidth
