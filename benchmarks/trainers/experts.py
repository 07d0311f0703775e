"""Mixtures of experts on two ranks, through the trainers as shipped: HuggingFace's own expert
parallelism and FSDP2, and ours.

    python -m benchmarks experts --json result.json   # 5 repeats in turns; 40 minutes on two idle cores
    python -m benchmarks experts --quick              # tiny models, once: does it all still run?
    python -m benchmarks experts --from result.json --into docs/evidence/experts.md   # no run

The script is experts_script.py, with models of the shapes of Qwen3-MoE and Mixtral whose weights are
drawn once. HuggingFace's Trainer runs it with `DistributedConfig`: all of a model's weights sharded
(fsdp_size 2), and experts on the ranks that have them (ep_size 2, all_to_all). MerakTrainer runs it,
two lines changed, with experts divided over the ranks of a layer, and with the other ways in which
two ranks share a mixture. It is an error if losses disagree.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import ROOT
from benchmarks.runs import add_options, circumstances, heading, show, spread
from benchmarks.step.launcher import free_port
from benchmarks.trainers.two_lines import CHANGES, MEASURED

SCRIPT = Path(__file__).resolve().with_name("experts_script.py")
BEGIN = "<!-- written by: python -m benchmarks experts -->"
END = "<!-- end of experts -->"
TOLERANCE = 1e-4
OURS = "MerakTrainer"
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
# contestant -> options of the script; the second half of names are settings
WAYS: dict[str, dict[str, Any]] = {
    "HF Trainer, FSDP2": {"replicas": 2, "distributed": {"fsdp_size": 2}},
    "HF Trainer, EP over FSDP2": {
        "replicas": 2,
        "distributed": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
    },
    f"{OURS}, experts": {
        "more": {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
        }
    },
    f"{OURS}, tensor": {"more": {"tensor_model_parallel_size": 2}},
    f"{OURS}, context": {"more": {"context_parallel_size": 2}},
    f"{OURS}, pipeline": {"more": {"pipeline_model_parallel_size": 2}},
    f"{OURS}, fsdp full_shard": {"replicas": 2, "more": {"fsdp": "full_shard"}},
}
FULL = {"steps": 5, "sequence": 512, "micro_batches": 8}
QUICK = {"steps": 3, "sequence": 32, "micro_batches": 4}


def save_models(directory: Path, quick: bool) -> None:
    """Draw the weights of both models and save them."""
    for name, (kind, settings) in SHAPES.items():
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **{**COMMON, **settings, **(TINY if quick else {})})
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)


def run(shape: str, way: str, directory: Path, options: Mapping[str, Any], timeout: float) -> dict:
    """Run the script as a user starts it; return what it measured. Raises RuntimeError if it
    fails.
    """
    text = SCRIPT.read_text(encoding="utf-8")
    if way.startswith(OURS):
        for before, after in CHANGES.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after.replace(', **options["degrees"]', ""))
    script = directory / "script.py"
    script.write_text(text, encoding="utf-8")
    given = {
        **options,
        **WAYS[way],
        "model": str(directory / shape),
        "directory": str(directory / "out"),
    }
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = ["--master-port", str(free_port())]
    command = [sys.executable, *launcher, *port, str(script), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    said = [line for line in done.stdout.splitlines() if line.startswith(MEASURED)]
    if done.returncode or len(said) != 1:
        end = f"{done.stdout[-1000:]}{done.stderr[-3000:]}"
        raise RuntimeError(f"{shape}, {way} ended with status {done.returncode}:\n{end}")
    return json.loads(said[0].removeprefix(MEASURED))


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per model and way: tokens per second, its ratio to the fastest of HuggingFace's, and
    the peak of a rank.
    """
    lines = ["| two ranks | | tokens/s | | peak of a rank, MiB |", "|---|---|--:|--:|--:|"]
    for shape in SHAPES:
        of_shape = {way: rows[f"{shape}, {way}"] for way in WAYS if f"{shape}, {way}" in rows}
        theirs = [median(row["rates"]) for way, row in of_shape.items() if not way.startswith(OURS)]
        for way, row in of_shape.items():
            ratio = f"{median(row['rates']) / max(theirs):.2f}x" if theirs else ""
            peak = f"{median(row['peaks']):.0f}"
            lines.append(f"| {shape} | {way} | {spread(row['rates'])} | {ratio} | {peak} |")
    return "\n".join(lines)


def disagreement(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the first row whose losses are not those of the first of its model; "" for none."""
    for shape in SHAPES:
        of_shape = {name: row for name, row in rows.items() if name.startswith(f"{shape}, ")}
        if not of_shape:
            continue
        first = next(iter(of_shape.values()))["losses"][0]
        for name, row in of_shape.items():
            for losses in row["losses"]:
                if not torch.allclose(
                    torch.tensor(losses), torch.tensor(first), rtol=TOLERANCE, atol=0.0
                ):
                    return f"{name}: {losses}, and not {first}"
    return ""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows with TEXT in 'Mixtral, ...'-like names"
    )
    add_options(parser, repeats=5, timeout=900)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, or show what was measured; 1 where losses disagree, 2 for a page without marks."""
    given = parse(argv)
    if given.saved:
        saved = json.loads(given.saved.read_text(encoding="utf-8"))
        runs = len(next(iter(saved["rows"].values()))["rates"])
        text = f"{heading(saved, runs, 'all')}\n\n{table(saved['rows'])}"
        return show(text, given.into, BEGIN, END)
    options = QUICK if given.quick else FULL
    names = [(shape, way) for shape in SHAPES for way in WAYS if given.only in f"{shape}, {way}"]
    rows: dict[str, dict[str, list]] = {
        f"{shape}, {way}": {"rates": [], "losses": [], "peaks": []} for shape, way in names
    }
    with tempfile.TemporaryDirectory(prefix="experts_") as place:
        save_models(Path(place), given.quick)
        for repeat in range(1 if given.quick else given.repeats):
            for shape, way in names:
                found = run(shape, way, Path(place), options, given.timeout)
                row = rows[f"{shape}, {way}"]
                tokens = options["sequence"] * options["micro_batches"]
                row["rates"].append(tokens / median(found["seconds"]))
                row["losses"].append(found["losses"])
                row["peaks"].append(found["peak_mib"])
                text = f"[{repeat + 1}] {shape}, {way}: {row['rates'][-1]:.0f} tokens/s"
                print(text, file=sys.stderr, flush=True)
            if given.json:
                saved = {**circumstances(), "options": options, "rows": rows}
                given.json.write_text(json.dumps(saved, indent=1), encoding="utf-8")
    print(table(rows))
    if wrong := disagreement(rows):
        print(f"Losses differ. {wrong}")
        return 1
    return 0
