"""Packed rows beside transformers.Trainer: every document by itself, in every layout, whatever was
captured first.
"""

import copy
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches.packed import check_documents, starts
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    **{
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}
# The lengths of the documents of each micro-batch: one document, as many tokens in two, two and
# four, longer than what the model takes of one, and documents of one token.
ROWS = ((24,), (10, 14), (14, 10), (6, 5, 4, 9), (20, 17), (7, 1, 1, 9, 3), (30, 9, 12), (24,))
RUN = {
    **{
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 3,
        "per_device_train_batch_size": 1,
    },
    **{
        "max_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
    },
    **{
        "gradient_accumulation_steps": 2,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
    },
    **{"adam_epsilon": 1e-4, "max_grad_norm": 0.5, "per_device_eval_batch_size": 1},
}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=4)),
    "some windows": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SMALL, sliding_window=4, head_dim=4)
    ),
    "eager": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL, attn_implementation="eager")),
}


def documents():
    draw = random.Random(5)
    return [{"documents": [[draw.randrange(1, 64) for _ in range(n)] for n in row]} for row in ROWS]


class Flattened:
    """DataCollatorWithFlattening, for samples that are the documents of a row."""

    def __init__(self, **options):
        self.collate = DataCollatorWithFlattening(**options)

    def __call__(self, rows):
        return self.collate([{"input_ids": tokens} for row in rows for tokens in row["documents"]])


class PaddingFree:
    """What TRL's collators make of samples without padding: no mask, no lengths."""

    def __call__(self, rows):
        parts = [torch.tensor(tokens) for row in rows for tokens in row["documents"]]
        positions = torch.cat([torch.arange(len(part)) for part in parts])
        tokens = torch.cat(parts)
        labels = torch.where(positions == 0, -100, tokens)
        batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: value.unsqueeze(0) for name, value in batch.items()}


class Running:
    """A row as one document: what attention gives where nobody looks at the positions."""

    def __call__(self, rows):
        batch = PaddingFree()(rows)
        return batch | {"position_ids": torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)}


class Padded:
    """The same documents as rows of one batch."""

    def __call__(self, rows):
        parts = [torch.tensor(tokens) for row in rows for tokens in row["documents"]]

        def stack(values, filler):
            return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)

        return {
            "input_ids": stack(parts, 0),
            "labels": stack(parts, -100),
            "attention_mask": stack([torch.ones_like(part) for part in parts], 0),
        }


EVERY = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
COLLATORS = {
    "flattened": lambda: Flattened(),
    "with lengths": lambda: Flattened(**EVERY),
    "padding free": PaddingFree,
    "padded": Padded,
    "running": Running,
}


def see(kind, arguments, directory, model, collator, **changes):
    """Train; the losses and gradient norms of each step, the loss of an evaluation, and the
    weights.
    """
    torch.manual_seed(0)
    rows = documents()
    trainer = kind(
        MODELS[model](),
        arguments(directory, **RUN | changes),
        COLLATORS[collator](),
        rows,
        rows[2:5],
    )
    trainer.train()
    logs = [
        (entry["loss"], entry["grad_norm"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    found = {"logs": logs, "eval": trainer.evaluate()["eval_loss"]}
    if kind is Trainer:
        return found | {"weights": copy.deepcopy(trainer.model.state_dict())}
    trainer.gather_model()
    here = trainer.is_world_process_zero()
    captures = next(iter(trainer.engine.programs.values())).all()
    recordings = trainer.engine.executor(RUN["gradient_accumulation_steps"]).recordings
    return found | {
        "replayed": recordings and recordings.replayed,
        "weights": trainer.model.state_dict() if here else None,
        "captures": len(captures),
    }


def of_transformers(model, collator="flattened", replicas=1):
    with tempfile.TemporaryDirectory() as directory:
        changes = {"gradient_accumulation_steps": 2 * replicas, "max_steps": 4 // replicas}
        return see(Trainer, TrainingArguments, directory, model, collator, **changes)


def of_merak(rank, world, directory, cases, changes):
    return [see(MerakTrainer, MerakArguments, directory, *case, **changes) for case in cases]


def alike(ours, theirs, rtol=1e-5):
    torch.testing.assert_close(
        torch.tensor(ours["logs"]), torch.tensor(theirs["logs"]), rtol=rtol, atol=1e-6
    )
    assert ours["eval"] == pytest.approx(theirs["eval"], rel=rtol)
    if ours["weights"] is not None:
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], value, rtol=1e-4, atol=2e-6, msg=name)


LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {"max_steps": 2}),
}
CASES = {
    "one": [(model, "flattened") for model in MODELS]
    + [("llama", "with lengths"), ("llama", "padding free")],
    "tp2": [("llama", "with lengths"), ("window", "flattened")],
    "pp2": [("llama", "with lengths"), ("window", "padding free")],
    "dp2": [("llama", "with lengths")],
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.long if name == "one" else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_packed_rows_train_as_in_transformers(tmp_path, layout):
    world, changes = LAYOUTS[layout]
    replicas = 2 if layout == "dp2" else 1
    ranks = run_ranks(of_merak, world, str(tmp_path), CASES[layout], changes, timeout=280)
    for place, (model, collator) in enumerate(CASES[layout]):
        theirs = of_transformers(model, collator, replicas)
        for found in ranks:
            alike(found[place], theirs)


def test_documents_in_one_row_train_as_in_rows_of_their_own(tmp_path):
    """And not as one document does, so that these comparisons see a mask that is left out."""
    packed, running = of_merak(
        0, 1, str(tmp_path), [("llama", "padding free"), ("llama", "running")], {}
    )
    apart = of_transformers("llama", "padded")
    alike({**packed, "eval": apart["eval"]}, apart)
    assert all(
        abs(loss - other) > 1e-4
        for (loss, _), (other, _) in zip(packed["logs"], running["logs"], strict=True)
    )


@pytest.mark.long
def test_lengths_and_numbers_of_documents_cost_no_captures(tmp_path):
    """Eight rows of four lengths, in each of which the documents are others, pad to few lengths."""
    cases = [("llama", "flattened"), ("llama", "with lengths")]
    plain, told = of_merak(0, 1, str(tmp_path), cases, {"length_buckets": "48,64"})
    assert told["captures"] == plain["captures"]
    assert told["logs"] == plain["logs"] and told["eval"] == plain["eval"]
    assert all(
        torch.equal(told["weights"][name], value) for name, value in plain["weights"].items()
    )


@pytest.mark.long
def test_documents_that_end_elsewhere_than_recorded_ones_are_not_replayed(tmp_path):
    """The second of four steps is recorded, and the sixth, of the second epoch, has its documents."""
    changes = {"length_buckets": "48,64", "max_steps": 6}
    recorded = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
    case = [("llama", "flattened")]
    (plain,) = of_merak(0, 1, str(tmp_path), case, changes)
    (found,) = of_merak(0, 1, str(tmp_path), case, changes | recorded)
    assert plain["replayed"] is None and found["replayed"] == 4
    assert found["logs"] == plain["logs"] and found["eval"] == plain["eval"]
    assert all(
        torch.equal(found["weights"][name], value) for name, value in plain["weights"].items()
    )


def test_where_documents_begin():
    assert starts(torch.tensor([0, 1, 2, 0, 1, 0])) == [0, 3, 5]
    assert starts(torch.tensor([2, 3, 4])) == [0]
    assert starts(torch.tensor([0, 0, 0])) == [0, 1, 2]


def test_what_flash_attention_would_take_for_other_documents_is_refused():
    def check(**batch):
        check_documents([{name: torch.tensor(value) for name, value in batch.items()}], True)

    check(position_ids=[[0, 1, 2, 0, 1]], cu_seq_lens_q=[0, 3, 5], cu_seq_lens_k=[0, 3, 5])
    check(position_ids=[[0, 1, 2], [0, 1, 2]])
    check(position_ids=[[0, 1, 0], [0, 1, 2]], attention_mask=[[1, 1, 1], [1, 1, 0]])
    with pytest.raises(
        DataError, match="cu_seq_lens_q: its documents differ from those of position_ids"
    ):
        check(position_ids=[[0, 1, 2, 0, 1]], cu_seq_lens_q=[0, 2, 5])
    with pytest.raises(DataError, match="cu_seq_lens_q: flash attention separates documents by it"):
        check(cu_seq_lens_q=[0, 2, 5])
    with pytest.raises(
        DataError,
        match="position_ids: flash attention supports packed documents only in a batch of one row",
    ):
        check(position_ids=[[0, 1, 0], [0, 1, 2]])
    # other attention does not read it
    check_documents([{"cu_seq_lens_q": torch.tensor([0, 2, 5])}], False)


@pytest.mark.slow
def test_the_example_trains_alike_both_ways(tmp_path):
    command = [sys.executable, "examples/packing.py", "--steps", "4", "--directory", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    (apart,) = re.findall(r"the losses of a step differ by (\S+) at most", told)
    assert float(apart) < 1e-5
    losses = re.findall(r"(padded|packed): loss (\S+) -> (\S+), ", told)
    assert [name for name, *_ in losses] == ["padded", "packed"] and losses[0][1:] == losses[1][1:]
