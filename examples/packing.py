"""Fine-tune on answers of unequal lengths without padding: every document of a packed row sees
itself only.

    python examples/packing.py [--steps 20] [--directory runs/packing]

The samples are functions of Python's standard library: a signature as the prompt, which is no
target, and the first paragraph of its docstring as the answer. A small Llama over bytes is trained
twice by ``MerakTrainer``, on the same samples in each step: once in padded rows, once flattened to
one row by ``DataCollatorWithFlattening`` of transformers. The losses agree, and the packed run
computes no padding but what rounds a row up.
"""

import argparse
import ast
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, TrainerCallback

import megatron_merak as mm

MODULES = 120
LONGEST = 512
BATCH = 12
Sample = dict[str, list[int]]


def samples() -> list[Sample]:
    """Documents of at most LONGEST bytes, in an order that depends on nothing but the Python in
    use.
    """
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MODULES]:
        for prompt, answer in functions(ast.parse(path.read_bytes())):
            tokens = [*prompt.encode(), *answer.encode()][:LONGEST]
            labels = [-100] * len(prompt.encode()) + tokens[len(prompt.encode()) :]
            found.append({"input_ids": tokens, "labels": labels[:LONGEST]})
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(1)).tolist()
    return [found[place] for place in order]


def functions(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield f"def {node.name}({ast.unparse(node.args)}):\n", text.split("\n\n")[0] + "\n"


def padded(rows: list[Sample]) -> dict[str, Tensor]:
    """Rows as long as the longest, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])
        for name, filler in (("input_ids", 0), ("labels", -100))
    }
    return batch | {"attention_mask": (batch["input_ids"] != 0).long()}


class Clock(TrainerCallback):
    """The seconds of every step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs) -> None:
        self.steps.append(time.perf_counter() - self.began)


def train(
    name: str, collate, data: list[Sample], steps: int, directory: Path
) -> tuple[list[float], list[float]]:
    """The loss and the seconds of every step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    args = mm.MerakArguments(
        str(directory / name),
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    clock = Clock()
    trainer = mm.MerakTrainer(LlamaForCausalLM(config), args, collate, data, callbacks=[clock])
    trainer.train()
    captured, made = trainer.engine.captures
    print(f"{name}: {captured} programs captured, {made} made from them")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], clock.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=Path("runs/packing"))
    asked = parser.parse_args()
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps}: it is below 1. Give at least 1.")
    data = samples()[: asked.steps * BATCH]
    lengths = [len(row["input_ids"]) for row in data]
    batches = [lengths[n : n + BATCH] for n in range(0, len(lengths), BATCH)]
    share = 1 - sum(lengths) / sum(len(each) * max(each) for each in batches)
    print(
        f"{len(data)} documents of {min(lengths)} to {max(lengths)} tokens; rows of a batch are {share:.0%} padding"
    )
    losses, seconds = {}, {}
    for name, collate in (("padded", padded), ("packed", DataCollatorWithFlattening())):
        losses[name], seconds[name] = train(name, collate, data, asked.steps, asked.directory)
    half = len(batches) // 2
    for name, times in seconds.items():
        rate = sum(map(sum, batches[half:])) / sum(times[half:])
        print(
            f"{name}: loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f}, {rate:,.0f} tokens/s in the second half"
        )
    apart = max(
        abs(one - other) for one, other in zip(losses["padded"], losses["packed"], strict=True)
    )
    print(f"the losses of a step differ by {apart:.1e} at most")


if __name__ == "__main__":
    main()
