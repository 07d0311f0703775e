"""Mixtures of experts on two ranks, through the trainers as shipped: HuggingFace's own expert
parallelism and FSDP2, and ours.

    python -m benchmarks experts --json result.json   # 5 repeats in turns; 40 minutes on two idle cores
    python -m benchmarks experts --quick              # tiny models, once: does it all still run?
    python -m benchmarks experts --from result.json --into docs/evidence/experts.md   # no run
    python -m benchmarks experts --only 'EP over' ...   # only experts over replicas, beside the same of HuggingFace

The script is experts_script.py, with models of the shapes of Qwen3-MoE and Mixtral whose weights are
drawn once. HuggingFace's Trainer runs it with `DistributedConfig`: all of a model's weights sharded
(fsdp_size 2), and experts on the ranks that have them (ep_size 2, all_to_all). MerakTrainer runs it,
two lines changed, with experts divided over replicas or over the ranks of a layer, and with the other
ways in which two ranks share a mixture. It is an error if losses disagree.
"""

import argparse
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.runs import add_options, parsed, show, spread
from benchmarks.trainers.rows import OURS, Row, check_chosen, disagreement, page, save
from benchmarks.trainers.two_lines import measure

SCRIPT = Path(__file__).resolve().with_name("experts_script.py")
BEGIN = "<!-- written by: python -m benchmarks experts -->"
END = "<!-- end of experts -->"
REPLICAS_BEGIN = "<!-- written by: python -m benchmarks experts --only 'EP over' -->"
REPLICAS_END = "<!-- end of EP over replicas -->"
COMMON = {"vocab_size": 8192, "num_hidden_layers": 4, "max_position_embeddings": 2048}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": (
        "qwen3_moe",
        {
            "hidden_size": 512,
            "moe_intermediate_size": 192,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
    ),
    "Mixtral": (
        "mixtral",
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
    ),
}
TINY = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 48,
    "intermediate_size": 96,
    "head_dim": 16,
}
OVER_REPLICAS = "EP over replicas"
DEFAULTS: dict[str, Any] = {"replicas": 1, "distributed": {}, "degrees": {}, "more": {}}
# contestant -> options of the script
WAYS: dict[str, dict[str, Any]] = {
    "HF Trainer, FSDP2": {"replicas": 2, "distributed": {"fsdp_size": 2}},
    "HF Trainer, EP over FSDP2": {
        "replicas": 2,
        "distributed": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    },
    f"{OURS}, experts": {
        "degrees": {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
        }
    },
    f"{OURS}, {OVER_REPLICAS}": {"replicas": 2, "degrees": {"expert_model_parallel_size": 2}},
    f"{OURS}, {OVER_REPLICAS}, optim": {
        "replicas": 2,
        "degrees": {
            "expert_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim",
        },
    },
    f"{OURS}, tensor": {"degrees": {"tensor_model_parallel_size": 2}},
    f"{OURS}, context": {"degrees": {"context_parallel_size": 2}},
    f"{OURS}, pipeline": {"degrees": {"pipeline_model_parallel_size": 2}},
    f"{OURS}, fsdp full_shard": {"replicas": 2, "degrees": {"fsdp": "full_shard"}},
}
FULL = {"steps": 5, "sequence": 512, "micro_batches": 8}
QUICK = {"steps": 3, "sequence": 32, "micro_batches": 4}


def save_models(directory: Path, quick: bool) -> None:
    """Draw the weights of both models and save them."""
    for name, (kind, settings) in SHAPES.items():
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **{**COMMON, **settings, **(TINY if quick else {})})
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)


def table(rows: list[Row]) -> str:
    """A row per model and way: tokens per second, its ratio to the fastest of HuggingFace's, and
    the peak of a rank.
    """
    lines = ["| two ranks | | tokens/s | | peak of a rank, MiB |", "|---|---|--:|--:|--:|"]
    for row in rows:
        theirs = [
            median(each.rates)
            for each in rows
            if each.layout == row.layout and not each.contestant.startswith(OURS)
        ]
        ratio = f"{median(row.rates) / max(theirs):.2f}x" if theirs else ""
        cells = (row.layout, row.contestant, spread(row.rates), ratio, f"{median(row.peaks):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows with TEXT in 'Mixtral, ...'-like names"
    )
    add_options(parser, repeats=5, timeout=900)
    return parsed(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, or show what was measured; 1 where losses disagree, 2 for a page without marks."""
    given = parse(argv)
    if given.saved:
        marks = (REPLICAS_BEGIN, REPLICAS_END) if given.only else (BEGIN, END)
        return show(page(given.saved, table), given.into, *marks)
    options = QUICK if given.quick else FULL
    rows = [Row("fp32", shape, way) for shape, way in product(SHAPES, WAYS)]
    rows = [row for row in rows if given.only in f"{row.layout}, {row.contestant}"]
    check_chosen(rows, given.only)
    with tempfile.TemporaryDirectory(prefix="experts_") as place:
        save_models(Path(place), given.quick)
        for repeat in range(1 if given.quick else given.repeats):
            for row in rows:
                asked = DEFAULTS | options | WAYS[row.contestant]
                asked["model"] = f"{place}/{row.layout}"
                measure(row, SCRIPT, asked, ranks=2, warmup=0, timeout=given.timeout)
                text = f"[{repeat + 1}] {row.name}: {row.rates[-1]:.0f} tokens/s"
                print(text, file=sys.stderr, flush=True)
                if given.json:
                    save(given.json, rows, options)
    print(table(rows))
    for shape in SHAPES:
        if wrong := disagreement([row for row in rows if row.layout == shape]):
            print(f"Losses differ. {wrong}")
            return 1
    return 0
