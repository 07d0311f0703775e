"""Plans whose weights, gradients and optimizer state are in host memory."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS, GIB
from megatron_merak.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import MerakError, PlanError
from megatron_merak.plan import Plan, host_text, sharding_text
from megatron_merak.planner import plan
from megatron_merak.planner.memory import rank_memory
from megatron_merak.planner.predict import ending, priced
from megatron_merak.planner.remedies import misfits

SHAPE = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
SEVEN = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "vocab_size": 32000,
}
SEVENTY = {
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_attention_heads": 64,
    "group_query_attention": True,
    "num_query_groups": 8,
    "seq_length": 4096,
    "vocab_size": 128256,
}
ON_HOST = {"offload_model_states": True}
FULL = {"recompute_granularity": "full"}


def config_of(shape: dict, parallel: dict) -> Config:
    train = TrainConfig(micro_batch_size=2, global_batch_size=8, bf16=True, train_iters=1)
    return Config(
        model=ModelConfig(**SHAPE, **shape),
        parallel=ParallelConfig(**parallel),
        train=train,
        optimizer=OptimizerConfig(lr=1e-4),
    )


@pytest.mark.parametrize(
    ("shape", "cluster", "host"), [(SEVEN, "rtx3090", 128e9), (SEVENTY, "dgx-h100", 1.5e12)]
)
def test_models_larger_than_a_device_fit(shape, cluster, host):
    device = CLUSTERS[cluster].device
    made = plan(config_of(shape, ON_HOST | FULL), 1, CLUSTERS[cluster])
    assert made.offload_model_states and made.sharding == "optim_grads_params"
    assert made.predicted_bytes[0] <= device.usable < device.memory
    parameters = made.stage_parameters(0)
    assert made.predicted_host_bytes == (18 * parameters,) and 18 * parameters <= host
    (memory,) = rank_memory(made)
    assert memory.weights == memory.gradients == memory.optimizer == 0
    size = f"{18 * parameters / GIB:.1f} GiB"
    told = f"host memory of weights, gradients and optimizer state: {size} of the largest rank, "
    assert host_text(made) == f"{told}{size} of a node"
    assert sharding_text(made).endswith("gradients and weights: in host memory")
    assert Plan.from_json(made.to_json()) == made == priced(made)


def test_a_plan_that_does_not_fit_names_the_flag():
    cluster = CLUSTERS["rtx3090"]
    config = config_of(SEVEN, FULL)

    def remake(changes):
        parallel = {key: value for key, value in changes.items() if key != "world_size"}
        try:
            changed = replace(config, parallel=replace(config.parallel, **parallel))
            return plan(changed, int(changes.get("world_size", 1)), cluster)
        except MerakError:
            return None

    lines = misfits(plan(config, 1, cluster), cluster.device.usable, remake)
    assert "does not fit" in lines[0]
    named = [line for line in lines if "--offload-model-states" in line]
    assert len(named) == 1 and named[0].endswith(": it fits")


def test_two_replicas_have_half_of_the_host_memory_each():
    one, two = (
        plan(config_of(SEVEN, ON_HOST | FULL), ranks, CLUSTERS["rtx3090"]) for ranks in (1, 2)
    )
    assert two.predicted_host_bytes[0] == one.predicted_host_bytes[0] // 2


def test_a_step_waits_for_a_slow_link_and_not_for_a_fast_one():
    def at(bandwidth: float, **parallel) -> Plan:
        cluster = CLUSTERS["rtx3090"]
        device = replace(cluster.device, host_bandwidth=bandwidth)
        return plan(config_of(SEVEN, FULL | parallel), 1, replace(cluster, device=device))

    plain, fast, slow = at(1e15), at(1e15, **ON_HOST), at(1e9, **ON_HOST)
    computing = plain.predicted_time - ending(plain).total
    assert fast.predicted_time == pytest.approx(computing, rel=1e-3)
    # weights come twice in each of four micro-batches, sums of gradients in three of them
    copied = (2 * 2 * 4 + 4 * 3) * slow.stage_parameters(0) / 1e9
    inside = slow.predicted_time - ending(slow).total
    assert copied < inside < 1.1 * copied
    with pytest.raises(PlanError, match="bandwidth between it and its host's memory is unknown"):
        at(0.0, **ON_HOST)
