"""Both ways to cut a captured model into units, side by side, as the table of docs/graph_sharding.md.

python tools/graph_sharding.py                   every shape below (a few minutes, no weights in memory)
python tools/graph_sharding.py llama t5          some of them
"""

import argparse
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_merak.graph.capture.captured import Captured

LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}
CAUSAL = "AutoModelForCausalLM"
MASKED = "AutoModelForMaskedLM"
SEQUENCES = "AutoModelForSeq2SeqLM"
# row: configuration (its default sizes but for what follows), auto class, sequence length
SHAPES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama 7B": ("llama", CAUSAL, 2048, {}),
    "gpt2": ("gpt2", CAUSAL, 1024, {}),
    "bloom, 24 layers": ("bloom", CAUSAL, 2048, {"n_layer": 24, "hidden_size": 1024, "n_head": 16}),
    "gemma2 9B": ("gemma2", CAUSAL, 2048, {}),
    "mixtral 8x7B": ("mixtral", CAUSAL, 2048, {}),
    "falcon 7B": ("falcon", CAUSAL, 2048, {}),
    "bert": ("bert", MASKED, 512, {}),
    "t5 small": ("t5", SEQUENCES, 512, {"decoder_start_token_id": 0}),
    "bart large": ("bart", SEQUENCES, 512, {}),
    "whisper tiny": ("whisper", "AutoModelForSpeechSeq2Seq", 128, {}),
    "vit": ("vit", "AutoModelForImageClassification", 0, {}),
    "clip": ("clip", "CLIPModel", 77, {}),
    "llama 405B": ("llama", CAUSAL, 4096, LLAMA_405B),
}
STAGES = (2, 4, 16)


def captured_shape(kind: str, auto: str, length: int, sizes: Mapping[str, Any]) -> "Captured":
    import torch
    import transformers
    from transformers import CONFIG_MAPPING

    from megatron_merak.graph.capture.capture import capture
    from megatron_merak.graph.capture.empty import init_empty_weights

    config = CONFIG_MAPPING[kind](**sizes)
    make = getattr(transformers, auto)
    make = make.from_config if auto.startswith("Auto") else make._from_config
    with init_empty_weights():
        model = make(config, dtype=torch.bfloat16)
    ids = torch.zeros(1, max(length, 1), dtype=torch.long)
    if kind == "vit":
        batch = {
            "pixel_values": torch.zeros(1, 3, 224, 224, dtype=torch.bfloat16),
            "labels": ids[:, 0],
        }
    elif kind == "clip":
        pixels = torch.zeros(2, 3, 224, 224, dtype=torch.bfloat16)
        batch = {"input_ids": ids.repeat(2, 1), "pixel_values": pixels, "return_loss": True}
    elif kind == "whisper":
        features = torch.zeros(1, config.num_mel_bins, 3000, dtype=torch.bfloat16)
        batch = {"input_features": features, "labels": ids}
    else:
        batch = {"input_ids": ids, "labels": ids}
    return capture(model.train(), batch)


def row(name: str, algorithm: str, captured: "Captured") -> str:
    from megatron_merak.graph.partition.cut import cut
    from megatron_merak.graph.partition.loads import unit_loads
    from megatron_merak.planner.partition import partition

    chain = cut(captured, algorithm)
    loads = unit_loads(chain)
    counts = [
        sum(chain.kinds[value] == "main" for value in crossing) for crossing in chain.crossing
    ]
    costs = [3 * load.flops + 1 for load in loads]
    cells = [name, algorithm, str(len(counts)), f"{max(counts, default=0)}"]
    cells.append(f"{max((load.output_bytes for load in loads[:-1]), default=0) / 1e6:.3g}")
    cells.append(f"{max(costs) / sum(costs):.1%}")
    for stages in STAGES:
        if stages > len(costs):
            cells.append("-")
            continue
        bounds = partition(costs, stages)
        cells.append(
            f"{max(sum(costs[a:b]) for a, b in pairwise(bounds)) * stages / sum(costs):.2f}"
        )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"rows that start with it; of {', '.join(SHAPES)}"
    )
    wanted = parser.parse_args().names
    import transformers

    from megatron_merak.graph.partition.cut import ALGORITHMS

    transformers.logging.set_verbosity_error()
    columns = [
        "model",
        "algorithm",
        "cuts",
        "values",
        "MB",
        "largest unit",
        *(f"K={stages}" for stages in STAGES),
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, shape in SHAPES.items():
        if not wanted or any(name.startswith(prefix) for prefix in wanted):
            captured = captured_shape(*shape)
            for algorithm in ALGORITHMS:
                print(row(name, algorithm, captured), flush=True)


if __name__ == "__main__":
    main()
