"""The Plan: rank order, shardings, validation and storage."""

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import PlanError
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import (
    Grid,
    Plan,
    StagePlan,
    TensorSharding,
    Unit,
    held_parameters,
    placement,
    plan_table,
)

degree = st.integers(1, 4)
grids = st.builds(Grid, degree, degree, degree, degree)
axes = ("tp", "cp", "dp", "pp")
ordered = st.builds(Grid, degree, degree, degree, degree, st.permutations(axes).map("-".join))


@given(grids)
@settings(max_examples=50, deadline=None)
def test_rank_order_is_a_reshaped_range(grid):
    """Ranks laid out as [pp][dp][cp][tp], row-major, with tensor parallelism fastest."""
    ranks = iter(range(grid.size))
    for pp in range(grid.pp):
        for dp in range(grid.dp):
            for cp in range(grid.cp):
                for tp in range(grid.tp):
                    rank = next(ranks)
                    assert grid.rank(tp, cp, dp, pp) == rank
                    assert grid.coordinates(rank) == (tp, cp, dp, pp)
    assert next(ranks, None) is None


@given(ordered)
@settings(max_examples=50, deadline=None)
def test_ranks_run_over_the_axes_in_their_order(grid):
    """Counting ranks up, the first axis moves at every step, the next when that is through, and so
    on.
    """
    place = dict.fromkeys(axes, 0)
    for rank in range(grid.size):
        assert grid.rank(**place) == rank and grid.coordinates(rank) == tuple(
            place[axis] for axis in axes
        )
        for axis in grid.order.split("-"):
            assert getattr(grid, axis) == 1 or grid.rank(**{axis: 1}) == grid.stride(axis)
            if place[axis] + 1 < getattr(grid, axis):
                place[axis] += 1
                break
            place[axis] = 0
    assert set(place.values()) == {0}


def test_orders_that_place_ranks_alike_are_one():
    same = "tp-dp-pp tp-cp-dp-pp tp-cp-ep-dp-pp tp-dp-cp-pp TP-DP-PP cp-tp-ep-dp-pp".split()
    assert {Grid(2, 1, 2, 2, order=order) for order in same} == {Grid(2, 1, 2, 2)}
    assert [Grid(2, 2, 2, 2, order).order for order in ("tp-dp-cp-pp", "dp-tp-pp")] == [
        "tp-dp-cp-pp",
        "dp-tp-cp-pp",
    ]
    every = ["-".join(names) for names in permutations(("tp", "dp", "pp"))]
    grids = {tuple(map(Grid(2, 1, 3, 2, order=order).coordinates, range(12))) for order in every}
    assert len(grids) == len(every)


@given(ordered, st.sampled_from(["tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp-dp-pp"]))
@settings(max_examples=100, deadline=None)
def test_groups_split_the_ranks_along_their_axes(grid, axis):
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    fixed = [
        place for place, name in enumerate(("tp", "cp", "dp", "pp")) if name not in axis.split("-")
    ]
    for group in groups:
        assert group == sorted(group)
        assert len({tuple(grid.coordinates(rank)[place] for place in fixed) for rank in group}) == 1
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert len({len(group) for group in groups}) == 1


def test_the_groups_of_eight_ranks():
    grid = Grid(tp=2, dp=2, pp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.groups("tp-pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_units_that_continue_the_one_before():
    """Not the first of a stage, none at the begin or the end of what is recomputed together, and
    none beside what waits in host memory.
    """
    assert StagePlan(2, 6).continued == (3, 4, 5)
    assert StagePlan(0, 6, recompute=(1, 2, 3)).continued == (5,)
    assert StagePlan(0, 6, recompute=(1, 2, 3), span=2).continued == (2, 5)
    assert StagePlan(0, 6, offload=(2,)).continued == (1, 4, 5)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: Grid(tp=0),
        lambda: Grid(tp=2).coordinates(2),
        lambda: Grid(tp=2).rank(tp=2),
        lambda: Grid().groups("ep"),
        lambda: Grid(order="tp-dp"),
        lambda: Grid(order="tp-dp-pp-tp"),
        lambda: Grid(order="tp-dp-pp-xp"),
        lambda: Grid(order=""),
        lambda: StagePlan(2, 2),
        lambda: StagePlan(0, 2, recompute=(2,)),
        lambda: TensorSharding("w", (4, 4), dim=2),
        lambda: TensorSharding("w", (4, 4), dim=0, padded=3),
        lambda: TensorSharding("w", (6, 4), dim=0).intervals(0, 4),
        lambda: TensorSharding("w", (6,), dim=0, blocks=3).intervals(0, 4),
    ],
)
def test_mistakes_are_plan_errors(mistake):
    with pytest.raises(PlanError):
        mistake()


@given(
    tp=st.integers(1, 8), part=st.integers(1, 5), blocks=st.integers(1, 4), dim=st.integers(0, 2)
)
@settings(max_examples=100, deadline=None)
def test_every_index_is_held_once(tp, part, blocks, dim):
    shape = tuple(tp * part * blocks if axis == dim else 7 for axis in range(3))
    sharding = TensorSharding("w", shape, dim, blocks)
    held = [
        list(range(start, stop))
        for rank in range(tp)
        for start, stop in sharding.intervals(rank, tp)
    ]
    assert sorted(index for interval in held for index in interval) == list(range(shape[dim]))
    block = shape[dim] // blocks
    for rank in range(tp):
        assert sharding.local_shape(rank, tp) == tuple(
            part * blocks if axis == dim else 7 for axis in range(3)
        )
        mine = [
            index for start, stop in sharding.intervals(rank, tp) for index in range(start, stop)
        ]
        wanted = [b * block + rank * part + i for b in range(blocks) for i in range(part)]
        assert mine == wanted


@given(tp=st.integers(1, 8), part=st.integers(1, 5), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_padded_vocabulary_is_clipped(tp, part, data):
    rows = data.draw(st.integers(1, tp * part))
    sharding = TensorSharding("wte", (rows, 3), 0, padded=tp * part)
    held = [
        index
        for rank in range(tp)
        for start, stop in sharding.intervals(rank, tp)
        for index in range(start, stop)
    ]
    assert held == list(range(rows))
    for rank in range(tp):
        (interval,) = sharding.intervals(rank, tp)
        assert interval == (min(rank * part, rows), min(rank * part + part, rows))
        assert sharding.local_shape(rank, tp) == (interval[1] - interval[0], 3)


def test_intervals_of_a_fused_projection_and_of_a_replicated_tensor():
    fused = TensorSharding("c_attn", (4, 12), 1, blocks=3)
    assert [fused.intervals(rank, 2) for rank in (0, 1)] == [
        ((0, 2), (4, 6), (8, 10)),
        ((2, 4), (6, 8), (10, 12)),
    ]
    assert fused.intervals(0, 1) == ((0, 12),)
    norm = TensorSharding("ln_1", (4,))
    assert norm.intervals(1, 2) == () and norm.local_shape(1, 2) == (4,)


def small_plan() -> Plan:
    units = (
        Unit("embedding", "embedding", 4, 0, 0, 64, (("wte", 96),)),
        Unit(
            "layer.0",
            "layer",
            40,
            1000,
            256,
            64,
            reduces=(2, 2),
            reduced_bytes=(128, 128),
            operations=(5, 9),
        ),
        Unit("layer.1", "layer", 40, 1000, 256, 64, passed_bytes=8),
        Unit("head", "head", 8, 2000, 128, 4, (("wte", 96),), transient_bytes=512),
    )
    stages = (StagePlan(0, 2, (1,)), StagePlan(2, 4, (2,)))
    shardings = (TensorSharding("wte", (11, 8), 0, padded=12), TensorSharding("ln_f", (8,)))
    schedule, cluster = build_schedule("1f1b", 2, 4), CLUSTERS["laptop"]
    more = cluster, 0.5, 0.25, (1000, 2**21), (("wte", "its rows are token ids"),)
    return Plan(Grid(2, 1, 3, 2), units, stages, schedule, 2, 16, "bfloat16", shardings, *more)


def test_a_plan_survives_json_exactly():
    plan = small_plan()
    again = Plan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan)
    assert json.loads(plan.to_json())["schedule"]["ranks"][1][:2] == ["1F0", "1B0"]


def test_what_a_plan_derives():
    plan = small_plan()
    assert (plan.num_microbatches, plan.global_batch_size) == (4, 24)
    assert [plan.stages_of(rank) for rank in (0, 1)] == [(0,), (1,)]
    assert [plan.stage_parameters(stage) for stage in (0, 1)] == [140, 40 + 8 + 96]
    assert [unit.name for unit in plan.stage_units(1)] == ["layer.1", "head"]


@pytest.mark.parametrize(
    ("grid", "node", "line"),
    [
        (Grid(2, 1, 2, 2), 8, ""),
        (Grid(2, 1, 2, 2, "tp-pp-dp"), 8, "ranks are ordered tp-pp-dp"),
        (
            Grid(4, 1, 8, 12),
            8,
            "48 nodes of 8, ranks ordered tp-dp-pp: tp inside a node, dp 2 ranks in each of 4 nodes, "
            "pp 1 rank in each of 12 nodes",
        ),
        (
            Grid(4, 1, 8, 12, "tp-pp-dp"),
            8,
            "48 nodes of 8, ranks ordered tp-pp-dp: tp inside a node, dp 1 rank in each of 8 nodes, "
            "pp 2 ranks in each of 6 nodes",
        ),
        (
            Grid(3, 1, 4, 2),
            8,
            "3 nodes of 8, ranks ordered tp-dp-pp: tp over up to 2 nodes, dp over up to 2 nodes, "
            "pp 1 rank in each of 2 nodes",
        ),
        (Grid(1, 1, 12, 1), 8, "2 nodes of 8, ranks ordered tp-dp-pp: dp over up to 2 nodes"),
    ],
)
def test_a_plan_says_how_groups_lie_in_nodes(grid, node, line):
    assert placement(grid, node) == line
    made = replace(
        small_plan(),
        grid=replace(grid, pp=2),
        cluster=replace(CLUSTERS["laptop"], ranks_per_node=node),
    )
    assert placement(made.grid, node) in plan_table(made)


def test_a_stage_holds_one_copy_of_a_tied_tensor():
    units = tuple(
        Unit(str(i), "layer", 5, 0, 0, 0, (("shared", 7), (f"pair{i // 2}", 1))) for i in range(4)
    )
    assert [held_parameters(units[:end]) for end in range(5)] == [0, 13, 18, 24, 29]
    assert held_parameters(units[1:3]) == 10 + 7 + 2


def test_samples_that_are_no_sequences_have_no_length():
    assert "4 micro-batches of 2 on each of 3 replicas" in plan_table(
        replace(small_plan(), sequence_length=0)
    )


def test_a_plan_prints_as_an_aligned_table():
    lines = plan_table(small_plan()).splitlines()
    assert lines[0] == "12 ranks = tp 2 x cp 1 x dp 3 x pp 2"
    header, first, second = lines[lines.index("") + 1 :][:3]
    assert "embedding .. layer.0" in first and "25.0%" in first and "1000 B" in first
    assert "layer.1 .. head" in second and "75.0%" in second and "2.0 MiB" in second
    assert header.index("units") == first.index("embedding") == second.index("layer.1")
    assert lines[-2:] == str(small_plan().schedule).splitlines()[1:]


@pytest.mark.parametrize(
    "change",
    [
        {"stages": [{"first": 0, "last": 2}, {"first": 3, "last": 4}]},
        {"stages": [{"first": 0, "last": 2}, {"first": 2, "last": 3}]},
        {"stages": [{"first": 0, "last": 4}]},
        {"grid": {"pp": 3}},
        {"grid": {"ep": 3}},
        {"grid": {"tp": 2, "dp": 3, "pp": 2, "order": "tp-dp"}},
        {"grid": {"tp": 2, "dp": 3, "pp": 2, "order": 3}},
        {"dtype": "float8"},
        {"dtype": "float32", "fp32_residual": True},
        {"dtype": "float32", "grad_reduce_in_bf16": True},
        {"dtype": "float16", "grad_reduce_in_bf16": True},
        {"fp32_residual": 1},
        {"schedule": {"name": "1f1b"}},
        {"schedule": {"microbatches": None}},
        {"schedule": {"microbatches": {}}},
        {"schedule": {"stages": "2"}},
        {"colour": "red"},
        {"units": [{"name": "layer.0"}]},
        {"units": 3},
        {"micro_batch_size": "2"},
        {"device": "cpu"},
        {"cluster": None},
        {"cluster": "abacus"},
        {"overlap_grad_reduce": 1},
        {"predicted_time": [1.0]},
        {"predicted_bytes": [1]},
        {"predicted_bytes": ["1000", "2000"]},
        {"reasons": [["layer.*"]]},
        {"stages": [{"first": 0, "last": 2, "recompute": [0.5]}, {"first": 2, "last": 4}]},
    ],
)
def test_a_stored_plan_that_does_not_fit_is_refused(change):
    plan = small_plan().to_dict()
    if "name" not in change.get("schedule", {"name": ""}):
        change = {"schedule": plan["schedule"] | change["schedule"]}
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(plan | change))


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        ({"tp": 1, "dp": 1}, "no two ranks have the same layer. Leave it out, or use more ranks"),
        (
            {"tp": 2, "dp": 1},
            "experts are divided over the 2 tensor-parallel ranks of their layer. Use 2",
        ),
        (
            {"tp": 1, "dp": 8},
            "experts are divided over some of the 8 ranks that have the same layer. Use 2 or 4",
        ),
        (
            {"tp": 2, "cp": 2, "dp": 4},
            "experts are divided over the 2 tensor-parallel ranks of a layer, in some of its 8 "
            "copies. Use 2 or 4",
        ),
    ],
    ids=["one rank", "a layer", "replicas", "both"],
)
def test_experts_need_ranks_that_divide_them(grid, reason):
    plan = small_plan()
    with pytest.raises(PlanError) as caught:
        replace(plan, grid=replace(plan.grid, **grid), expert_parallel=3)
    assert str(caught.value) == f"expert_parallel 3: {reason}."


def test_copies_that_divide_experts_are_no_instances():
    plan = small_plan()
    grid = replace(plan.grid, dp=4)
    sharded = replace(plan, grid=grid, sharding="optim", expert_parallel=4)
    assert sharded.expert_copies == 2
    with pytest.raises(PlanError, match="sharding_instances 2: 4 ranks divide experts"):
        replace(sharded, sharding_instances=2)


def test_a_plan_written_by_hand_may_name_clusters_devices_and_links():
    plain = small_plan().to_dict()
    assert Plan.from_dict(plain | {"cluster": "dgx-a100"}).cluster is CLUSTERS["dgx-a100"]
    own = {
        "device": "A100",
        "ranks_per_node": 8,
        "inside": "nvlink3",
        "between": "infiniband-hdr",
        "name": "dgx-a100",
    }
    assert Plan.from_dict(plain | {"cluster": own}).cluster == CLUSTERS["dgx-a100"]


def test_plans_stored_before_there_were_orders_have_the_default():
    plain = small_plan().to_dict()
    assert plain["grid"].pop("order") == "tp-cp-dp-pp"
    assert Plan.from_json(json.dumps(plain)) == small_plan()
    plain["grid"]["order"] = "tp-pp-dp"  # as a hand writes it
    again = Plan.from_json(json.dumps(plain))
    assert again.grid.groups("pp")[0] == [0, 2] and Plan.from_json(again.to_json()) == again


@pytest.mark.parametrize(
    "was, sharding", [(True, "optim"), (False, "no_shard"), (None, "no_shard")]
)
def test_a_plan_stored_when_optimizer_state_alone_was_shared_is_read(was, sharding):
    plain = small_plan().to_dict()
    del plain["sharding"]
    again = Plan.from_json(
        json.dumps(plain | ({} if was is None else {"distributed_optimizer": was}))
    )
    assert again == replace(small_plan(), sharding=sharding)
    with pytest.raises(PlanError, match="distributed_optimizer"):
        Plan.from_dict(plain | {"distributed_optimizer": was, "sharding": "optim"})


def test_precisions_that_a_plan_adds_to_its_dtype():
    plain = small_plan().to_dict()
    older = {
        key: value
        for key, value in plain.items()
        if key not in ("fp32_residual", "grad_reduce_in_bf16")
    }
    assert Plan.from_dict(older) == small_plan(), "plans stored before have neither"
    both = Plan.from_dict(older | {"fp32_residual": True, "grad_reduce_in_bf16": True})
    assert (
        Plan.from_json(both.to_json()) == both
        and both.gradient_bytes == 2
        and small_plan().gradient_bytes == 4
    )
    assert "replicas, bfloat16, residual stream in fp32, gradients sent in bf16" in plan_table(both)
    assert replace(small_plan(), dtype="float16", fp32_residual=True).fp32_residual
    with pytest.raises(
        PlanError,
        match="--grad-reduce-in-bf16 True: gradients of a model in float16 have more digits",
    ):
        replace(small_plan(), dtype="float16", grad_reduce_in_bf16=True)
    with pytest.raises(
        PlanError, match="--fp32-residual-connection True: all of a model in float32 is fp32"
    ):
        replace(small_plan(), dtype="float32", fp32_residual=True)


def test_what_is_sharded_over_how_many_ranks():
    plans = [replace(small_plan(), sharding=sharding) for sharding in SHARDINGS]
    assert [plan.optimizer_shards for plan in plans] == [1, 3, 3, 3]
    assert [plan.shards_gradients for plan in plans] == [False, False, True, True]
    assert [plan.shards_parameters for plan in plans] == [False, False, False, True]
    alone = replace(plans[3], grid=Grid(2, 1, 1, 2))
    assert (alone.optimizer_shards, alone.shards_gradients, alone.shards_parameters) == (
        1,
        False,
        False,
    )
    assert "optimizer state, gradients and weights: sharded over 3 replicas\n" in plan_table(
        plans[3]
    )
    assert "weights: not sharded, as there is one replica\n" in plan_table(alone)
    with pytest.raises(
        PlanError, match="sharding zero: there is no such one. Use one of no_shard, optim, "
    ):
        replace(small_plan(), sharding="zero")


def test_what_ranks_that_divide_sequences_exchange():
    plan = small_plan()
    divided = replace(plan, grid=replace(plan.grid, cp=2))
    assert "divided over 2 context-parallel ranks\n" in plan_table(divided)
    for kind, does in (
        ("a2a", "exchange heads"),
        ("all_gather", "gather keys and values"),
        ("p2p", "pass keys and values around"),
    ):
        units = tuple(replace(unit, cp_comm_type=kind) for unit in plan.units)
        line = f"divided over 2 context-parallel ranks, which {does} ({kind})\n"
        assert line in plan_table(replace(divided, units=units))
    with pytest.raises(
        PlanError,
        match=r"cp_comm_type ring: there is no such one. Use one of a2a, a2a\+p2p, all_gather, p2p",
    ):
        replace(divided, cp_comm_type="ring")


def test_levels_of_ranks_that_divide_sequences():
    plan = small_plan()
    divided = replace(plan, grid=replace(plan.grid, cp=6), cp_comm_type="a2a+p2p", cp_inner=2)
    assert divided.cp_sizes == ("2", "3") and plan.cp_sizes == ()
    assert Plan.from_json(divided.to_json()) == divided
    units = tuple(replace(unit, cp_comm_type="a2a+p2p") for unit in plan.units)
    assert (
        "divided over 6 context-parallel ranks, which exchange heads and pass keys and values around "
        "(a2a+p2p), 3 groups of 2 that exchange heads\n"
    ) in plan_table(replace(divided, units=units))
    for inner in (0, 1, 4, 6):
        message = (
            f"cp_inner {inner}: it does not divide 6 context-parallel ranks into several groups"
        )
        with pytest.raises(PlanError, match=message):
            replace(divided, cp_inner=inner)
    for changes in ({"cp_comm_type": "p2p"}, {"grid": plan.grid}):
        with pytest.raises(PlanError, match=r"cp_inner 2: it is for cp_comm_type a2a\+p2p and sev"):
            replace(divided, **changes)


def test_groups_of_both_levels():
    grid = Grid(tp=2, cp=4, pp=2)
    inner, outer = grid.context_levels(2)
    assert inner[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert outer[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    for groups in (inner, outer):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(16))


def _without(key):
    return lambda plain: plain.pop(key)


def _in_cluster(key, **change):
    return lambda plain: plain["cluster"][key].update(change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("cluster"), "plan: cluster (missing): a plan is priced for one"),
        (lambda plain: plain.update(device=plain.pop("cluster")["device"]["name"]),
         "plan: device cpu: the plan was stored when plans named a device, and no longer says for which links it was "
         "priced. Make it again with tools/plan.py."),
        (_in_cluster("inside", bandwidth=0), "plan: cluster: inside: bandwidth 0: it cannot be"),
        (_in_cluster("device", fused_attention=1), "plan: cluster: device: fused_attention 1: it is not true or false"),
        (_in_cluster("device", speed=1), "plan: cluster: device: key speed: it is unknown"),
        (lambda plain: plain["cluster"].pop("ranks_per_node"), "plan: cluster: key ranks_per_node: it is missing"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_is_told_by_its_field(change, message):
    plain = small_plan().to_dict()
    change(plain)
    with pytest.raises(PlanError) as error:
        Plan.from_dict(plain)
    assert message in str(error.value)


def test_a_tensor_that_is_divided_twice_is_named():
    plan = small_plan()
    with pytest.raises(PlanError, match="sharding of wte: the plan says twice"):
        replace(plan, shardings=(*plan.shardings, TensorSharding("wte", (11, 8))))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        Plan.from_json(text)
