"""How long stages take under each overlap: by hand, and which one auto takes."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS, Cluster, Device, Link, find_cluster
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.ops import ops_of
from megatron_merak.plan import Grid, Unit
from megatron_merak.planner import plan, plan_chain
from megatron_merak.planner.cost import UnitCost, unit_costs
from megatron_merak.planner.make import gpt_chain
from megatron_merak.planner.overlap import Times, times
from megatron_merak.planner.request import request_of
from megatron_merak.planner.search.space import Space
from tests.requests import request

COST = UnitCost(
    forward=10.0,
    backward=20.0,
    weight=8.0,
    reduces=(6.0, 12.0),
    half_reduces=(7.0, 13.0),
    last_reduces=(2.0, 3.0),
    halving=(1.0, 2.0),
    hiding=8.0,
)


def test_each_mode_by_hand():
    assert times([COST], "none") == Times(16.0, 32.0, 8.0)
    assert times([COST], "weight-gradient") == Times(16.0, 24.0, 8.0)
    # a W hides nothing
    assert times([COST], "weight-gradient", splits=True) == Times(16.0, 32.0, 8.0)
    assert times([COST], "pair") == Times(16.0, 24.0, 8.0, hidden=6.0 + 4.0)
    assert times([COST], "sub-pipeline") == Times(11.0 + 2.0, 22.0, 8.0)
    assert times([COST], "sub-pipeline", splits=True) == Times(13.0, 22.0 + 3.0, 8.0)
    slow = replace(COST, half_reduces=(30.0, 60.0))
    assert times([slow], "sub-pipeline", splits=True) == Times(30.0 + 2.0, 60.0 + 3.0, 8.0)


def test_what_no_weight_gradient_hides():
    """Ranks of a sequence exchange gradients of queries and keys, which takes 5 of 12 seconds: no
    weight gradient is behind them, and 6 of 8 seconds of these are behind the rest.
    """
    bare = replace(COST, bare=5.0, hiding=6.0)
    assert times([bare], "weight-gradient") == Times(16.0, 20.0 + 5.0 + 1.0, 8.0)
    assert times([bare], "none") == times([COST], "none")
    assert times([bare], "weight-gradient", splits=True) == Times(16.0, 32.0, 8.0)


def test_what_a_shared_expert_hides():
    """4 of 6 seconds of the forward's exchanges, and of the backward's, that no weight gradient hides, 7
    of 9: of these 2 by its own weight gradients, which a W computes later.
    """
    shared = replace(COST, behind=(4.0, 7.0), behind_weights=2.0, bare=9.0, hiding=1.0)
    assert times([shared], "none") == times([COST], "none")
    assert times([shared], "weight-gradient") == Times(12.0, 20.0 + 2.0 + 2.0, 8.0)
    assert times([shared], "weight-gradient", splits=True) == Times(12.0, 20.0 + 5.0 + 2.0, 8.0)


def test_what_is_gathered_again_travels_beside_gradients_of_inputs():
    """Unless it is recomputed, which gathers anyway."""
    again = replace(COST, bare=5.0, regathers=7.0, hiding=6.0)
    assert times([again], "weight-gradient") == Times(16.0, 20.0 + 5.0 + 1.0, 8.0, regathers=1.0)
    assert times([again], "weight-gradient").again == 15.0
    assert times([again], "none") == Times(16.0, 32.0, 8.0, regathers=7.0)


def test_what_one_unit_cannot_hide_another_can():
    idle = replace(
        COST,
        reduces=(0.0, 0.0),
        half_reduces=(0.0, 0.0),
        last_reduces=(0.0, 0.0),
        halving=(0.0, 0.0),
    )
    slow = replace(COST, half_reduces=(15.0, 13.0))
    assert times([slow, idle], "sub-pipeline").forward == 21.0 + 2.0


def test_without_collectives_all_modes_take_the_same_time():
    alone = replace(COST, reduces=(0.0, 0.0), half_reduces=(0.0, 0.0), last_reduces=(0.0, 0.0))
    modes = [times([alone], mode) for mode in ("none", "weight-gradient", "sub-pipeline", "pair")]
    assert modes == [Times(10.0, 20.0, 8.0)] * 4


def test_halves_read_weights_and_add_to_gradients_twice():
    device, link = Device("toy", 1e3, 1e3, 1e3, 0, 1.0, 0.5), Link("toy", 1.0, 100.0)
    unit = Unit(
        "a", "layer", 1000, 10**4, 0, 0, reduces=(2, 2), reduced_bytes=(400, 400), operations=(3, 6)
    )
    (cost,) = unit_costs([unit], Cluster(device, 8, link, link), "float32", Grid(tp=2))
    assert cost.halving == pytest.approx((4.0 + 1.5, 4.0 + 8.0 + 3.0))
    # two messages there and back, 400 bytes
    assert cost.reduces == pytest.approx((2 * 2.0 + 4.0, 2 * 2.0 + 4.0))
    assert cost.half_reduces == pytest.approx((4 * 2.0 + 4.0,) * 2) and cost.last_reduces[
        0
    ] == pytest.approx(3.0)
    assert cost.weight == pytest.approx(10.0 + 8.0)


def config(overlap, hidden=4096, samples=4, batch=64):
    return Config(
        model=ModelConfig(
            num_layers=6,
            hidden_size=hidden,
            num_attention_heads=16,
            seq_length=1024,
            vocab_size=8192,
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            tp_comm_overlap=overlap,
            device_memory_gb=80,
        ),
        train=TrainConfig(micro_batch_size=samples, global_batch_size=batch, bf16=True),
    )


@pytest.mark.parametrize("device", ["RTX 3090", "H100", "cpu"])
@pytest.mark.parametrize("hidden", [256, 4096])
def test_auto_takes_the_fastest(device, hidden):
    modes = ("weight-gradient", "none", "sub-pipeline", "pair")
    every = {mode: plan(config(mode, hidden), 4, find_cluster(device)) for mode in modes}
    found = plan(config("auto", hidden), 4, find_cluster(device))
    assert found.overlap in modes
    assert found.predicted_time == min(made.predicted_time for made in every.values())


def test_slow_links_and_large_work_favour_halves_and_small_work_none():
    assert plan(config("auto"), 4, CLUSTERS["rtx3090"]).overlap in ("sub-pipeline", "pair")
    halves, plain = (
        plan(config(mode, 64, 2, 16), 4).predicted_time
        for mode in ("sub-pipeline", "weight-gradient")
    )
    assert halves > plain


def test_auto_keeps_to_what_is_defined():
    """A micro-batch of one sample has no halves, a step of one micro-batch no pairs, one rank no
    collectives.
    """
    assert (
        plan(config("auto", samples=1, batch=64), 4, CLUSTERS["rtx3090"]).overlap != "sub-pipeline"
    )
    assert plan(config("auto", samples=4, batch=4), 4, CLUSTERS["rtx3090"]).overlap != "pair"
    units = [Unit(f"u{i}", "u", 0, 10**9, 10, 10) for i in range(4)]
    made = plan_chain(
        units, request(Grid(pp=2), microbatches=8, micro_batch_size=4, tp_comm_overlap="auto")
    )
    assert made.overlap == "weight-gradient"


def test_pairs_are_in_the_schedule():
    made = plan(config("pair"), 4, CLUSTERS["rtx3090"])
    assert any(len(ops_of(entry)) == 2 for entry in made.schedule.entries())
    assert (
        made.predicted_time < plan(config("weight-gradient"), 4, CLUSTERS["rtx3090"]).predicted_time
    )
    assert made.cluster is CLUSTERS["rtx3090"]


MIXTURE = {
    "num_experts": 4,
    "swiglu": True,
    "disable_bias_linear": True,
    "moe_z_loss_coeff": 0.1,
}


def test_a_micro_batch_whose_router_has_losses_is_not_halved():
    own = config("auto", batch=4)  # one micro-batch has no pairs
    mixture = replace(own, model=replace(own.model, **MIXTURE))
    asked = request_of(mixture, 4)
    assert asked.whole == "losses of routers" and not request_of(own, 4).whole
    units = gpt_chain(own, 2, CLUSTERS["rtx3090"])
    alike = replace(asked, couples_samples="")
    found = [plan_chain(units, each, CLUSTERS["rtx3090"]).overlap for each in (alike, asked)]
    assert found[0] == "sub-pipeline" and found[1] == "weight-gradient"
    named = replace(asked, parallel=config("sub-pipeline").parallel)
    with pytest.raises(ConfigError, match="sub-pipeline: losses of routers are of whole"):
        plan_chain(units, named, CLUSTERS["rtx3090"])
    spaces = [
        Space(4, [64], CLUSTERS["cpu"], {}, memory=False, halves=way) for way in (True, False)
    ]
    (layer,) = (layer for layer in spaces[0].layers() if layer.tp == 2)
    (degrees, *_) = (each for each in spaces[0].degrees(layer, 4) if each.mb == 4)
    tried = [{each.overlap for each in space.choices(degrees, 4)} for space in spaces]
    assert tried[0] - tried[1] == {"sub-pipeline"}
