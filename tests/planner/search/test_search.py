"""The search finds what trying everything finds, and says what is nearest where nothing fits."""

import math
from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS, GIB, Cluster, find_cluster
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import ConfigError
from megatron_merak.plan import LAYERS, UNSHARDED, Plan, Unit, time_text
from megatron_merak.planner import plan
from megatron_merak.planner.request import Request
from megatron_merak.planner.search import Choice, Search, pins_of
from megatron_merak.planner.search.bound import Bounds, Case, Fluid, Room, least_seconds
from megatron_merak.planner.search.choice import Layer
from megatron_merak.planner.search.formulas import FormulaChain
from megatron_merak.planner.search.report import Breakdown, binding, left_out
from megatron_merak.planner.search.space import Space
from megatron_merak.planner.search.work import ChainWork
from tests.choice import later
from tests.planner.search.tried import everything

SHAPES = {
    "deep": {"num_layers": 14, "hidden_size": 2048, "num_attention_heads": 16},
    "wide": {"num_layers": 5, "hidden_size": 6144, "num_attention_heads": 48},
    "ten": {"num_layers": 10, "hidden_size": 1024, "num_attention_heads": 16},
}


def configuration(shape: str = "deep", **parallel) -> Config:
    model = ModelConfig(**SHAPES[shape], seq_length=2048, vocab_size=32000)
    train = TrainConfig(micro_batch_size=1, global_batch_size=32, bf16=True)
    return Config(model=model, train=train, parallel=ParallelConfig(**parallel))


def search(config: Config, cluster: Cluster) -> Search:
    request = Request(
        parallel=config.parallel,
        sequence_length=config.model.seq_length,
        dtype=config.train.dtype,
        graph_sharding=LAYERS,
    )
    return Search(FormulaChain(config, cluster), request, cluster)


def small(name: str, memory_gb: float, ranks_per_node: int = 8) -> Cluster:
    cluster = find_cluster(name)
    device = replace(cluster.device, memory=int(memory_gb * GIB))
    return replace(cluster, device=device, ranks_per_node=ranks_per_node)


def test_formulas_know_whole_sequences():
    chain = FormulaChain(configuration(), CLUSTERS["cpu"])
    with pytest.raises(ConfigError, match="--context-parallel-size 2: .*Pin cp=2"):
        chain.units(Layer(tp=1, cp=2, ep=1), 1, sequence_parallel=False, selective=False)


def test_many_ranks_share_a_sequence_only_where_each_has_enough_of_it():
    def shared(ranks, length, **pins):
        space = Space(ranks, [ranks], CLUSTERS["dgx-h100"], pins, memory=True, length=length)
        return sorted({layer.cp for layer in space.layers() if layer.tp == 1})

    assert shared(1024, 8192) == [1, 2, 4, 8, 16]
    assert shared(1024, 1 << 20) == [1 << power for power in range(11)]
    assert shared(16, 24) == [1, 2, 4, 8]
    assert shared(1024, 8192, cp=64) == [64]


CASES = [
    later("deep", small("dgx-a100", 80), 8, {"mb": 1, "sp": False}),
    later("deep", small("dgx-a100", 6), 8, {"mb": 2, "tp": 2}),
    later("ten", small("dgx-a100", 80), 8, {"mb": 2, "tp": 2}),
    later("ten", small("dgx-h100", 3), 16, {"mb": 1, "tp": 4}),
    ("ten", small("dgx-h100", 80), 8, {"mb": 2, "tp": 8}),
    later("deep", small("rtx3090", 24, ranks_per_node=4), 8, {"mb": 2, "sp": True, "tp": 2}),
    ("wide", small("dgx-h100", 30), 4, {"mb": 2}),
    ("deep", CLUSTERS["cpu"], 4, {"mb": 4}),
]


@pytest.mark.parametrize("shape, cluster, ranks, pins", CASES)
def test_a_search_finds_what_trying_everything_finds(shape, cluster, ranks, pins):
    one = search(configuration(shape), cluster)
    fitting = list(everything(one, ranks, 32, pins))
    assert len(fitting) > 20
    least = min(made.predicted_time for _, made in fitting)
    found = one.run(ranks, [32], pins)
    assert found.fastest.seconds <= least
    assert found.made < len(fitting) / 2
    assert found.best.seconds <= least * 1.01
    assert found.rest is None and one.run(ranks, [32], pins) == found


def test_a_chain_that_keeps_nothing_less_where_it_is_recomputed_has_a_bound():
    fluid = Fluid(state=8.0, saved=1.0, inputs=1.0, seconds=4.0, recompute=0.0)
    third, rest = Room(memory=3.0, in_flight=1.0), Room(memory=9.0, in_flight=1.0)
    found = least_seconds(fluid, [third, rest], "capacity")
    assert found == least_seconds(fluid, [third, rest], "none")
    assert found == pytest.approx(4.0 * 2 / 3, rel=1e-3)
    assert math.isinf(least_seconds(fluid, [third, third], "capacity"))


def test_neighbours_on_one_node_and_on_two_have_links_of_their_own():
    """A pipeline of four pairs of ranks on two nodes, whose network is slow."""
    config = configuration("ten")
    model = replace(config.model, untie_embeddings_and_output_weights=True)
    one = search(replace(config, model=model), small("rtx3090", 80, ranks_per_node=4))
    pins = {"tp": 2, "pp": 4, "mb": 8, "sp": False, "schedule": "gpipe", "recompute": "none"}
    ((choice, made),) = everything(one, 8, 32, pins | {"overlap": "weight-gradient"})
    space = one.space(8, [32], pins)
    (degrees,) = space.degrees(choice.layer, 12)
    case = Case(one._of(degrees, False), choice, degrees, space.orders(degrees))
    bound, _ = Bounds(one.request, one.cluster, one.memory).closer(case, math.inf)
    assert 0.999 * made.predicted_time < bound <= made.predicted_time


def test_parts_of_a_chain_keep_and_store_no_more_than_their_plans():
    """By capacity any unit may be recomputed, the first and the last, too; a unit may say what state
    its weights have.
    """
    layer = Unit("layer", "layer", 10, 8, saved_bytes=64, output_bytes=16, state_bytes=2.0)
    units = (
        replace(layer, name="embedding", saved_bytes=40, passed_bytes=6, state_bytes=None),
        *(replace(layer, name=f"layer.{index}") for index in range(4)),
        replace(layer, name="head", saved_bytes=400, output_bytes=4),
    )
    chain, alike = ChainWork(units, CLUSTERS["cpu"], "float32", Layer(1)).parts
    assert (chain.saved, chain.least) == (696, 0 + 10 + 4 * 16)
    assert chain.inputs == 16 + 4 * 16 + 400
    assert (chain.stated, chain.unstated) == (5 * 10 * 2.0, 10)
    # weights, gradients and state
    assert chain.state(UNSHARDED, 8.0, 0.0) == 60 * 8 + 100 + 80
    assert (alike.count, alike.unstated, alike.stated) == (4, 0, 4 * 10 * 2.0)


def test_a_search_leaves_what_is_to_be_left_of_a_device():
    pins = {"mb": 2, "tp": 2, "pp": 2, "sp": True, "schedule": "1f1b", "overlap": "none"}
    least = search(configuration(), small("dgx-a100", 8))  # of which it uses three quarters
    asked = search(configuration(memory_reserve_gb=74), small("dgx-a100", 80))
    assert asked.memory == least.memory == 6 * GIB
    found, expected = (each.run(8, [32], pins).best for each in (asked, least))
    assert found.choice == expected.choice and found.seconds == expected.seconds
    assert max(found.plan.predicted_bytes) <= 6 * GIB
    with pytest.raises(ConfigError, match="--memory-reserve-gb 80.0: A100 has 80 GiB"):
        search(configuration(memory_reserve_gb=80.0), small("dgx-a100", 80))


@pytest.mark.parametrize("case", [4])
def test_a_search_finds_as_many_as_are_wanted(case):
    shape, cluster, ranks, pins = CASES[case]
    one = search(configuration(shape), cluster)
    made = sorted(made.predicted_time for _, made in everything(one, ranks, 32, pins))
    found = one.run(ranks, [32], pins, wanted=6)
    chosen = found.first(6)
    assert chosen[0] == found.best == one.run(ranks, [32], pins).best
    assert len(chosen) == 6 and len({str(each.choice) for each in chosen}) == 6
    pairs = [(one, other) for one in chosen for other in chosen if one is not other]
    assert not any(one.runs_as(other) for one, other in pairs)
    # those that run alike are among all that were tried, so that these are no slower
    slowest = max(each.seconds for each in chosen)
    assert sum(seconds < slowest for seconds in made) >= 5
    distinct = []
    for each in sorted(one.run(ranks, [32], pins, wanted=10**6).found, key=lambda f: f.seconds):
        if not any(each.runs_as(other) for other in distinct):
            distinct.append(each)
    assert slowest == distinct[5].seconds or slowest <= found.best.seconds * 1.01


def test_plans_that_run_alike_are_tried_once():
    one = search(configuration("ten"), small("dgx-a100", 80))
    pins = {"tp": 2, "mb": 2, "sp": False, "pp": 1, "sharding": "no_shard"}
    every = one.run(8, [32], pins, wanted=10**6)
    by_choice = {each.choice.recompute: each for each in every.found}
    assert by_choice["none"].runs_as(by_choice["capacity"])
    assert not by_choice["none"].runs_as(by_choice["full"])
    recomputed = [each.choice.recompute for each in every.first(100)]
    assert "capacity" not in recomputed and "full" in recomputed


def test_a_search_that_stops_early_says_what_is_left(monkeypatch):
    one = search(configuration(), small("dgx-a100", 14))
    whole = one.run(8, [32], {})
    assert left_out(whole) == ""
    monkeypatch.setattr("megatron_merak.planner.search.search._MOST", 2)
    found = one.run(8, [32], {})
    assert found.made == 2 < whole.made
    assert found.rest.count > 0 and found.rest.bound <= whole.fastest.seconds
    told = left_out(found)
    assert told.startswith(
        f"Stopped after 2 plans: of {found.rest.count:,} layouts left none takes"
    )
    assert time_text(found.rest.bound) in told


def test_the_flags_of_a_choice_make_its_plan():
    config = configuration()
    cluster = small("dgx-a100", 12)
    one = search(config, cluster)
    for each in one.run(8, [32], {}).found:
        settings = each.choice.settings()
        train = replace(config.train, micro_batch_size=settings["micro_batch_size"])
        parallel = each.choice.applied(config.parallel)
        made = plan(replace(config, parallel=parallel, train=train), 8, cluster)
        assert made == each.plan


def test_what_is_pinned_stays():
    one = search(configuration(), small("dgx-h100", 30))
    pins = {"tp": 2, "pp": 2, "schedule": "gpipe", "recompute": "full", "sharding": "optim"}
    found = one.run(8, [32], pins)
    assert found.found
    for each in found.found:
        assert pins.items() <= vars(each.choice).items()
        assert each.plan.schedule.name == "gpipe" and each.plan.grid.dp == 2


def test_the_parts_of_a_step_add_up():
    one = search(configuration("wide"), small("rtx3090", 40, ranks_per_node=4))
    found = one.run(8, [32], {}).found
    for pins in ({"tp": 2, "pp": 2}, {"sharding": "optim_grads_params", "recompute": "full"}):
        found += one.run(8, [32], pins).found
    for each in found:
        add_up(each.plan)


def add_up(made: Plan) -> Breakdown:
    """Check that the parts of a plan's step add up to it; return them."""
    found = Breakdown.of(made)
    parts = vars(found)
    assert sum(parts.values()) == pytest.approx(made.predicted_time, rel=1e-9)
    assert min(parts.values()) >= -1e-9 * made.predicted_time
    return found


def test_what_training_loses_is_a_part_of_its_own():
    practice = find_cluster("dgx-h100").device.practice
    pins = {"tp": 1, "pp": 2, "mb": 1, "schedule": "1f1b", "sharding": "optim"}
    one = search(configuration("wide"), small("dgx-h100", 40, ranks_per_node=4))
    best = one.run(8, [32], pins).best
    parts = add_up(best.plan)
    assert parts.handover == pytest.approx(8 * 2 * practice.handover)
    assert parts.scale == pytest.approx(2 * practice.step)
    assert parts.skew == pytest.approx((best.seconds - parts.scale) / (1 / practice.skew + 1))
    assert parts.tensor == pytest.approx(0, abs=1e-9)
    names = [name for name, _ in parts.rows()]
    assert {"hand-over to neighbours", "growth with replicas", "waits for the slowest"} < {*names}
    assert "Pipeline bubble takes the most" in binding(best, one.memory)


def test_what_the_host_delays_is_no_collective():
    parallel = {"pipeline_model_parallel_size": 2, "cpu_offloading_num_layers": 3}
    slow = replace(small("rtx3090", 40).device, host_bandwidth=1e8)
    cluster = replace(small("rtx3090", 40), device=slow)
    made = plan(configuration("wide", **parallel), 2, cluster)
    parts = add_up(made)
    assert parts.offload > 0.1 * made.predicted_time
    assert parts.tensor == pytest.approx(0, abs=1e-9)


def test_nothing_is_found_where_nothing_fits_or_divides():
    one = search(configuration(), small("dgx-a100", 2))
    found = one.run(2, [32], {})
    assert found.best is None and found.refusal is None
    refused = one.run(6, [32], {"pp": 1, "tp": 1}).refusal
    assert isinstance(refused, ConfigError) and refused.what == "--global-batch-size"
    refused = one.run(8, [32], {"tp": 5}).refusal
    assert refused is not None


def test_of_equally_fast_plans_the_simplest_is_best():
    one = search(configuration(), small("dgx-h100", 80))
    found = one.run(8, [32], {})
    near = [each for each in found.found if each.seconds <= found.fastest.seconds * 1.01]
    assert found.best.choice.parts == min(each.choice.parts for each in near)


@pytest.mark.parametrize(
    "text, pins",
    [
        ("tp=8,pp=4", {"tp": 8, "pp": 4}),
        ("sp=on, recompute=full", {"sp": True, "recompute": "full"}),
        ("order=tp-pp-dp", {"order": "tp-cp-pp-dp"}),
    ],
)
def test_pins_are_read(text, pins):
    assert pins_of(text, "--fix") == pins


@pytest.mark.parametrize(
    "text, words",
    [
        ("tp", "it is not NAME=VALUE"),
        ("tp=0", "it is not a number"),
        ("shard=optim", "it is not a setting that is searched. The nearest is sharding"),
        ("tp=2,tp=4", "it says tp twice"),
        ("sp=yes", "it is neither on nor off"),
        ("schedule=fast", "it is not one of the choices"),
        ("order=dp-tp", "pp is missing"),
    ],
)
def test_wrong_pins_are_refused(text, words):
    with pytest.raises(ConfigError) as refused:
        pins_of(text, "--fix")
    assert words in str(refused.value)


def test_a_choice_in_words_is_read_again():
    choice = Choice(tp=2, pp=4, mb=2, sp=True, schedule="interleaved", chunks=2, recompute="full")
    assert Choice(**pins_of(str(choice), "--fix")) == choice
