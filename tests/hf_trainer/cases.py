"""Short training scripts, each a model, samples, a collator and arguments; dropout is off, since it
draws by layout.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch.utils.data import IterableDataset

from tests.hf_trainer import losses

WORDS, LENGTH = 64, 32
SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
}
TEXT = SMALL | {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0}
BERT = TEXT | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = TEXT | {"num_key_value_heads": 2}
Rows = list[dict[str, Any]]


def ragged(count: int, seed: int) -> Rows:
    """Tokens of unequal lengths, which are their own labels."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 13, (count,), generator=draw).tolist()
    rows = [torch.randint(1, WORDS, (n,), generator=draw).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def even(count: int, seed: int) -> Rows:
    return [{k: (v * 3)[:8] for k, v in row.items()} for row in ragged(count, seed)]


def classified(count: int, seed: int) -> Rows:
    return [row | {"labels": row["input_ids"][0] % 3} for row in ragged(count, seed)]


def weighted(count: int, seed: int) -> Rows:
    return [row | {"weight": 0.5 + n % 3} for n, row in enumerate(ragged(count, seed))]


def spans(count: int, seed: int) -> Rows:
    rows = ragged(count, seed)
    return [
        {
            "input_ids": r["input_ids"],
            "start_positions": 1,
            "end_positions": len(r["input_ids"]) - 1,
        }
        for r in rows
    ]


def masked(count: int, seed: int) -> Rows:
    """Every third token is asked for, the others are no targets."""
    rows = ragged(count, seed)
    return [
        row | {"labels": [t if n % 3 == 0 else -100 for n, t in enumerate(row["labels"])]}
        for row in rows
    ]


def images(count: int, seed: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return [
        {"pixel_values": torch.randn(3, 8, 8, generator=draw), "labels": n % 3}
        for n in range(count)
    ]


def pad(rows: Rows) -> dict[str, torch.Tensor]:
    """Stack numbers; pad lists at the end, with a mask."""
    lengths = [len(row["input_ids"]) for row in rows]
    longest = max(lengths)
    batch = {"attention_mask": torch.tensor([[1] * n + [0] * (longest - n) for n in lengths])}
    for name, first in rows[0].items():
        filler = 0 if name == "input_ids" else -100
        values = [row[name] for row in rows]
        if isinstance(first, list):
            values = [value + [filler] * (longest - len(value)) for value in values]
        batch[name] = torch.tensor(values)
    return batch


def pack(rows: Rows) -> dict[str, torch.Tensor]:
    """One row of all samples; positions begin anew with each, and its first token is no target."""
    places = [n for row in rows for n in range(len(row["input_ids"]))]
    tokens = [t for row in rows for t in row["input_ids"]]
    labels = [-100 if n == 0 else t for t, n in zip(tokens, places, strict=True)]
    return {
        k: torch.tensor([v])
        for k, v in (("input_ids", tokens), ("position_ids", places), ("labels", labels))
    }


class Stream(IterableDataset):
    """Samples that come one after the other, without a length."""

    def __init__(self, count: int, seed: int):
        self.rows = ragged(count, seed)

    def __iter__(self):
        return iter(self.rows)


def model(
    config: hf.PreTrainedConfig, kind: type[torch.nn.Module], frozen: str = ""
) -> Callable[[], torch.nn.Module]:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        built = kind(copy.deepcopy(config))
        for name, parameter in built.named_parameters():
            parameter.requires_grad &= not (frozen and frozen in name)
        return built

    return build


def share_of_largest(prediction: hf.EvalPrediction) -> dict[str, float]:
    """A metric that every kind of prediction has."""
    found = prediction.predictions
    first = found[0] if isinstance(found, tuple) else found
    return {"largest": float(first[first > -50].mean()), "rows": len(first)}


@dataclass(frozen=True)
class Case:
    build: Callable[[], torch.nn.Module]
    data: Callable[[int, int], Any] = ragged
    collate: Callable = pad
    changes: dict[str, Any] = field(default_factory=dict)
    metrics: Callable | None = share_of_largest
    resumes: bool = False
    loss: Callable | None = None  # compute_loss_func
    derive: Callable[[type], type] = lambda kind: kind  # the script's own class of trainer


# as few layers as the stages of every schedule leave: with the embedding and the head, one each
LLAMA_MODEL = model(hf.LlamaConfig(**LLAMA | {"num_hidden_layers": 2}), hf.LlamaForCausalLM)
MIXTRAL = LLAMA | {
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
}
GPT2 = {
    **{"n_embd": 16, "n_head": 2, "n_layer": 4, "n_positions": LENGTH, "vocab_size": WORDS},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0},
}
T5 = {
    **{
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
    },
    **{"vocab_size": WORDS, "dropout_rate": 0.0, "decoder_start_token_id": 0},
}
VIT = SMALL | {"image_size": 8, "patch_size": 4, "num_labels": 3}
CASES: dict[str, Case] = {
    "causal": Case(LLAMA_MODEL),
    "tied": Case(model(hf.GPT2Config(**GPT2), hf.GPT2LMHeadModel), even),
    "classes": Case(
        model(hf.BertConfig(**BERT, num_labels=3), hf.BertForSequenceClassification), classified
    ),
    "questions": Case(model(hf.BertConfig(**BERT), hf.BertForQuestionAnswering), spans),
    "masked": Case(model(hf.BertConfig(**BERT), hf.BertForMaskedLM), masked),
    "t5": Case(model(hf.T5Config(**T5), hf.T5ForConditionalGeneration), metrics=None),
    "mixtral": Case(model(hf.MixtralConfig(**MIXTRAL), hf.MixtralForCausalLM), even, metrics=None),
    "vit": Case(
        model(hf.ViTConfig(**VIT), hf.ViTForImageClassification), images, hf.default_data_collator
    ),
    "stream": Case(LLAMA_MODEL, Stream),
    "packed": Case(LLAMA_MODEL, collate=pack, metrics=None),
    "frozen": Case(model(hf.LlamaConfig(**LLAMA), hf.LlamaForCausalLM, "layers.1.")),
    "resumed": Case(LLAMA_MODEL, resumes=True),
    "loss function": Case(LLAMA_MODEL, loss=losses.focal),
    "label smoothing": Case(LLAMA_MODEL, changes={"label_smoothing_factor": 0.2}),
    "class weights": Case(
        model(hf.BertConfig(**BERT, num_labels=3), hf.BertForSequenceClassification),
        classified,
        derive=losses.derived(losses.by_class),
    ),
    "hidden states": Case(
        LLAMA_MODEL,
        weighted,
        changes={"remove_unused_columns": False},
        derive=losses.derived(losses.smooth_states),
    ),
    "two forwards": Case(LLAMA_MODEL, even, derive=losses.derived(losses.twice)),
    "distilled": Case(
        model(hf.LlamaConfig(**LLAMA), losses.Pupil), even, derive=losses.derived(losses.distilled)
    ),
    "logged": Case(
        LLAMA_MODEL,
        changes={
            **{
                "logging_steps": 2,
                "logging_first_step": True,
                "eval_on_start": True,
                "lr_scheduler_type": "cosine",
            },
            **{
                "warmup_steps": 2,
                "max_grad_norm": 0.1,
                "include_num_input_tokens_seen": "non_padding",
            },
            **{
                "load_best_model_at_end": True,
                "metric_for_best_model": "largest",
                "save_total_limit": 1,
            },
        },
    ),
}
