"""Documents of very unequal lengths, padded to rows and packed in one row: tokens that count per
second of CPU.

    python -m benchmarks packing [--quick] [--write]

The same documents in each step, lengths drawn from a lognormal distribution, a small Llama, one
rank, one thread: padded rows and packed rows through ``MerakTrainer`` and through
``transformers.Trainer``. All begin with the same weights, and their losses must agree. A step's
rate is the tokens of its documents, without padding, over its CPU time; the first steps, in which
lengths are captured, are told apart from the rest. ``--quick`` is a smoke test, ``--write`` puts
the table into docs/packing.md.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import megatron_merak as mm
from benchmarks import DOCS
from benchmarks.runs import show

PAGE = DOCS / "packing.md"
BEGIN, END = "<!-- written by: python -m benchmarks packing --write -->", "<!-- end -->"
VOCABULARY = 512
SHORTEST = 16
LONGEST = 512
MEAN, SPREAD = 4.4, 0.8  # of the logarithm of a length
Rows = Sequence[dict[str, list[int]]]


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    documents: int  # of a step
    steps: int
    first: int  # of the steps, told apart
    repeats: int


FULL = Size(layers=4, hidden=128, documents=16, steps=24, first=8, repeats=3)
QUICK = Size(layers=1, hidden=32, documents=4, steps=4, first=2, repeats=1)


def documents(count: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    lengths = (
        (torch.randn(count, generator=draw) * SPREAD + MEAN)
        .exp()
        .long()
        .clamp(SHORTEST, LONGEST)
        .tolist()
    )
    tokens = [torch.randint(1, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in tokens]


def padded(rows: Rows) -> dict[str, Tensor]:
    """Rows as long as the longest, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows)
    made = {"input_ids": 0, "labels": -100}
    batch = {
        k: torch.tensor([row[k] + [v] * (longest - len(row[k])) for row in rows])
        for k, v in made.items()
    }
    return batch | {"attention_mask": (batch["labels"] != -100).long()}


class Clock(TrainerCallback):
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *args, **kwargs) -> None:
        self.began = time.process_time()

    def on_step_end(self, *args, **kwargs) -> None:
        self.steps.append(time.process_time() - self.began)


WAYS: dict[str, tuple[type, type, Callable]] = {
    "padded, transformers": (Trainer, TrainingArguments, padded),
    "packed, transformers": (Trainer, TrainingArguments, DataCollatorWithFlattening()),
    "padded, megatron_merak": (mm.MerakTrainer, mm.MerakArguments, padded),
    "packed, megatron_merak": (mm.MerakTrainer, mm.MerakArguments, DataCollatorWithFlattening()),
}


def run(way: str, size: Size, rows: Rows) -> tuple[list[float], list[float], str]:
    """CPU seconds and loss of every step, and how many programs were captured and made."""
    kind, arguments, collate = WAYS[way]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=size.hidden, intermediate_size=size.hidden * 8 // 3, num_attention_heads=4,
        num_hidden_layers=size.layers, num_key_value_heads=2, max_position_embeddings=LONGEST, pad_token_id=0,
    )  # fmt: skip
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        args = arguments(
            directory, use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=size.documents,
            max_steps=size.steps, logging_steps=1, save_strategy="no", learning_rate=1e-3, seed=1,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = kind(LlamaForCausalLM(config), args, collate, rows, callbacks=[clock])
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    captures = "{} + {}".format(*trainer.engine.captures) if kind is mm.MerakTrainer else ""
    return clock.steps, losses, captures


def measure(size: Size) -> list[tuple[str, float, float, str]]:
    """Of each way the rates of the first steps and of the rest, medians over repeats, and its
    captures.
    """
    rows = documents(size.documents * size.steps)
    tokens = [
        sum(len(row["input_ids"]) for row in rows[n : n + size.documents])
        for n in range(0, len(rows), size.documents)
    ]
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    told: dict[str, str] = {}
    for _ in range(size.repeats):
        expected: list[float] = []
        for way in WAYS:
            steps, losses, told[way] = run(way, size, rows)
            expected = expected or losses
            torch.testing.assert_close(
                torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4, msg=way
            )
            parts = slice(None, size.first), slice(size.first, None)
            rates[way].append(tuple(sum(tokens[part]) / sum(steps[part]) for part in parts))
    return [
        (way, *map(statistics.median, zip(*found, strict=True)), told[way])
        for way, found in rates.items()
    ]


def table(size: Size, found: list[tuple[str, float, float, str]]) -> str:
    lines = [
        f"| {size.documents} documents a step | tokens/s, steps 1 to {size.first} | tokens/s, later | captured + made |"
    ]
    lines += ["|---|---|---|---|"]
    return "\n".join(
        lines
        + [f"| {way} | {first:,.0f} | {rest:,.0f} | {told} |" for way, first, rest, told in found]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """2 for a page without marks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: seconds, and numbers that mean nothing"
    )
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = QUICK if asked.quick else FULL
    text = table(size, measure(size))
    print(text)
    if asked.write:
        return show(f"\n{text}\n", [PAGE], BEGIN, END)
    return 0
