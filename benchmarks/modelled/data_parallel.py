"""Memory, traffic and time of Llamas under each strategy of what replicas share: modelled.

python -m benchmarks data_parallel_modelled    # prints the table; --into docs/evidence/data_parallel.md
"""

import argparse

from benchmarks.runs import add_into, show
from megatron_merak.cluster import GIB, find_cluster
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.plan import Plan, held_parameters
from megatron_merak.planner import plan
from megatron_merak.planner.memory import rank_memory

LLAMA = {"vocab_size": 32000, "seq_length": 4096, "swiglu": True, "normalization": "RMSNorm"}
LLAMA |= {
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "hidden_dropout": 0,
    "attention_dropout": 0,
}
LLAMA |= {"untie_embeddings_and_output_weights": True}
GROUPED = {"group_query_attention": True, "num_query_groups": 8}
MODELS = {
    "7B": ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, **LLAMA
    ),
    "13B": ModelConfig(
        num_layers=40, hidden_size=5120, ffn_hidden_size=13824, num_attention_heads=40, **LLAMA
    ),
    "70B": ModelConfig(
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        **GROUPED,
        **LLAMA,
    ),
}
LAYOUTS = [
    ("7B", 8, 1, 64, (1,)),
    ("13B", 8, 1, 64, (1,)),
    ("13B", 64, 1, 512, (1, 8)),
    ("70B", 512, 8, 1024, (1, 8)),
]  # GPUs, tensor-parallel degree, samples of a step, instances
BEGIN = "<!-- written by: python -m benchmarks data_parallel_modelled -->"
END = "<!-- end of data_parallel_modelled -->"


def made(model: str, gpus: int, tp: int, samples: int, sharding: str, instances: int) -> Plan:
    """A plan for nodes of eight H100s, which recomputes feed-forward activations."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        data_parallel_sharding_strategy=sharding,
        num_distributed_optimizer_instances=instances,
        recompute_granularity="selective",
    )
    train = TrainConfig(micro_batch_size=1, global_batch_size=samples, bf16=True)
    return plan(
        Config(model=MODELS[model], parallel=parallel, train=train), gpus, find_cluster("dgx-h100")
    )


def traffic(of: Plan) -> float:
    """Bytes that a rank without pipeline parallelism sends to other replicas in a step, by
    rings.
    """
    replicas = of.shard_ranks
    parameters = held_parameters(of.units)
    count = of.num_microbatches
    reduced = 4 * parameters * (count if of.shards_gradients else 1)
    gathered = 2 * parameters
    if of.sharding == "no_shard":
        gathered = 4 * parameters  # the second half of an all-reduce
    elif of.shards_parameters:
        # Twice per micro-batch, but for the unit that the pass before ended with.
        first, last = (held_parameters([unit]) for unit in (of.units[0], of.units[-1]))
        gathered = 2 * (2 * count * parameters - count * last - (count - 1) * first)
    instances = of.sharding_instances
    # an all-reduce of what a rank owns
    across = 8 * (instances - 1) / instances * parameters / replicas
    return (replicas - 1) / replicas * (reduced + gathered) + across


def table() -> str:
    lines = [
        "| model | GPUs | TP x DP | strategy | instances | of a rank: weights | gradients | optimizer | peak "
        "| sent per step | step | tokens/s |",
        "|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for model, gpus, tp, samples, counts in LAYOUTS:
        ways = [
            (sharding, count)
            for sharding in SHARDINGS
            for count in counts
            if count == 1 or sharding != "no_shard"
        ]
        for sharding, instances in ways:
            found = made(model, gpus, tp, samples, sharding=sharding, instances=instances)
            memory = rank_memory(found)[0]
            held = " | ".join(
                f"{part / GIB:.1f} GiB"
                for part in (memory.weights, memory.gradients, memory.optimizer)
            )
            peak = f"{memory.total / GIB:.1f} GiB"
            peak += " (does not fit)" if memory.total > found.cluster.device.usable else ""
            rate = samples * MODELS[model].seq_length / found.predicted_time
            lines.append(
                f"| {model} | {gpus} | {tp} x {found.grid.dp} | `{sharding}` | {instances} | {held} | {peak} "
                f"| {traffic(found) / GIB:.1f} GiB | {found.predicted_time:.2f} s | {rate:,.0f} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_into(parser)
    given = parser.parse_args(argv)
    return show(table(), given.into, BEGIN, END)
