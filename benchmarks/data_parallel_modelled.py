"""Memory, traffic and time of a 7B Llama on replicas that all have the optimizer's state, or share it: modelled.

python benchmarks/data_parallel_modelled.py                              # print the table
python benchmarks/data_parallel_modelled.py --into docs/data_parallel.md # write it there
"""

import argparse
import sys
from pathlib import Path

from two_lines_page import PageError, write

from megatron_merak.cluster import GIB, find_cluster
from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.plan import Plan, held_parameters
from megatron_merak.planner import plan
from megatron_merak.planner.memory import rank_memory

LLAMA_7B = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, seq_length=4096, vocab_size=32000,
    swiglu=True, normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True,
    untie_embeddings_and_output_weights=True, hidden_dropout=0, attention_dropout=0,
)  # fmt: skip
LAYOUTS = {  # GPUs -> tensor-parallel degree, samples of a step
    8: [(1, 64), (2, 64)],
    512: [(1, 1024), (8, 1024)],
}
BEGIN, END = "<!-- written by benchmarks/data_parallel_modelled.py -->", "<!-- end of data_parallel_modelled -->"


def made(gpus: int, tp: int, samples: int, sharded: bool) -> Plan:
    """A plan for nodes of eight H100s, which recomputes feed-forward activations."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp, use_distributed_optimizer=sharded, recompute_granularity="selective"
    )
    train = TrainConfig(micro_batch_size=1, global_batch_size=samples, bf16=True)
    return plan(Config(model=LLAMA_7B, parallel=parallel, train=train), gpus, find_cluster("dgx-h100"))


def traffic(of: Plan) -> float:
    """Bytes that a rank sends to other replicas in a step, by rings."""
    replicas, parameters = of.grid.dp, held_parameters(of.units)
    share = (replicas - 1) / replicas
    return share * parameters * (4 + 2 if of.distributed_optimizer else 2 * 4)


def table() -> str:
    lines = [
        "| GPUs | TP x DP | optimizer state | of a rank: weights, gradients | optimizer | peak "
        "| sent per step | step | tokens/s |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for gpus, layouts in LAYOUTS.items():
        for (tp, samples), sharded in ((layout, sharded) for layout in layouts for sharded in (False, True)):
            found = made(gpus, tp, samples, sharded)
            memory = rank_memory(found)[0]
            peak = f"{memory.total / GIB:.1f} GiB"
            peak += " (does not fit)" if memory.total > found.cluster.device.memory else ""
            rate = samples * LLAMA_7B.seq_length / found.predicted_time
            lines.append(
                f"| {gpus} | {tp} x {found.grid.dp} | {'shared' if sharded else 'on every replica'} "
                f"| {(memory.weights + memory.gradients) / GIB:.1f} GiB | {memory.optimizer / GIB:.1f} GiB | {peak} "
                f"| {traffic(found) / GIB:.1f} GiB | {found.predicted_time:.2f} s | {rate:,.0f} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the table into this page")
    given = parser.parse_args(argv)
    try:
        write(given.into, table(), BEGIN, END) if given.into else print(table())
    except PageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
