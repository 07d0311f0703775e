"""A rank of a run that is saved or resumed, by the real commands; it writes down what it trains on.

What a step gets is read where the trainer gets it, so that what was loaded in advance does not
count. A sample says its number by its first token.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.checkpoints.elastic_cases import SAMPLES
from megatron_merak.cli import pretrain
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.training.trainer import Trainer

VOCABULARY = 64
LENGTH = 16


@dataclass(frozen=True)
class Request:
    """What a rank does.

    door:   "gpt", "hf" or "trainer".
    flags:  of the command; for a trainer, what it is made with.
    log:    where ranks write: ``<log>.<rank>``, and what they print, ``<log>.<rank>.out``.
    model:  a trainer's.
    resume: the checkpoint from which a trainer goes on.
    rows:   samples of an epoch of a trainer.
    kind:   of its data set, see ``Pair``.
    loaded: where the state is saved again before the first step; None: it is not.
    """

    door: str
    flags: Any
    log: str
    model: str = ""
    resume: str | None = None
    rows: int = SAMPLES
    kind: str = "rows"
    loaded: str | None = None


@contextmanager
def recorded(request: Request) -> Iterator[None]:
    """Let trainers write down the samples of their steps inside."""
    before = Trainer.step, MerakTrainer.prepare_step
    lines = Lines(request)

    def step(trainer: Trainer, batches: list) -> Any:
        lines.begin(lambda: trainer.save(str(request.loaded)))
        ids = [int(row[0]) for batch in batches for row in batch["tokens"]]
        report = before[0](trainer, batches)
        place = trainer.mesh.dp_rank
        lines.add(
            trainer.mesh.rank, step=trainer.iteration, replica=place, ids=ids, loss=report.loss
        )
        return report

    def prepare(trainer: MerakTrainer, batches: list) -> Any:
        engine = trainer.engine
        assert isinstance(engine, CapturedModel)
        lines.begin(lambda: engine.save(str(request.loaded), {}))
        ids = [int(row[0]) - 1 for batch in batches for row in batch["input_ids"]]
        mesh = trainer.mesh
        lines.add(mesh.rank, step=trainer.state.global_step + 1, replica=mesh.dp_rank, ids=ids)
        return before[1](trainer, batches)

    Trainer.step, MerakTrainer.prepare_step = step, prepare  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.step, MerakTrainer.prepare_step = before  # type: ignore[method-assign]


class Lines:
    """What a rank writes down."""

    def __init__(self, request: Request):
        self.request = request
        self.is_begun = False

    def begin(self, save: Callable[[], object]) -> None:
        """Save what was loaded, before the first step."""
        if not self.is_begun and self.request.loaded is not None:
            save()
        self.is_begun = True

    def add(self, rank: int, **values: Any) -> None:
        with open(f"{self.request.log}.{rank}", "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


class Numbered(Dataset):
    """Rows of tokens, the first of which says the row's number + 1."""

    def __init__(self, rows: int, ragged: bool):
        generator = torch.Generator().manual_seed(1)
        self.rows = []
        for number in range(rows):
            length = int(torch.randint(5, LENGTH, (), generator=generator)) if ragged else LENGTH
            tokens = torch.randint(1, VOCABULARY, (length - 1,), generator=generator)
            self.rows.append([number + 1, *tokens.tolist()])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


class Streamed(IterableDataset):
    """The rows of a data set, one after the other."""

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows[number] for number in range(SAMPLES))


def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded at the end, with a mask."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["labels"]) + [0] * (longest - len(row["labels"])) for row in rows]
    ids = padded("input_ids", 0)
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor(mask),
        "labels": padded("labels", -100),
    }


def run_trainer(request: Request) -> None:
    """Train by MerakTrainer, from a checkpoint if one is named."""
    args = MerakArguments(**request.flags)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(request.model)
    rows: Dataset = Numbered(request.rows, request.kind == "ragged")
    if request.kind == "stream":
        rows = Streamed(rows)
    trainer = MerakTrainer(model, args, collated, rows)
    trainer.train(resume_from_checkpoint=request.resume)
    if trainer.is_world_process_zero():
        losses = {
            entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
        }
        Path(f"{request.log}.losses").write_text(json.dumps(losses))


def start(request: Request, environment: Mapping[str, str]) -> None:
    """Run a rank in this process, which has imported everything and was forked.

    environment: the variables of a launcher.
    """
    os.environ.update(environment)
    told = os.open(f"{request.log}.{environment['RANK']}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(told, 1)
    os.dup2(told, 2)
    with recorded(request):
        if request.door == "trainer":
            run_trainer(request)
        else:
            (pretrain.gpt if request.door == "gpt" else pretrain.hf)(request.flags)
