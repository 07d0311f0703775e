"""What evaluation and prediction hand out, beside ``transformers.Trainer`` in one process."""

import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from megatron_merak.errors import ConfigError, TraceError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches.predictions import plain_metrics
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.reference import untimed
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {"use_cpu": True, "per_device_eval_batch_size": 2, "disable_tqdm": True, "report_to": "none"}


def predicted(kind, arguments, model, collator, rows):
    """Evaluation's metrics, and predictions, labels and metrics of the same rows."""
    trainer = kind(model, arguments, collator, None, rows)
    found = trainer.predict(rows)
    return untimed(trainer.evaluate()), found.predictions, found.label_ids, untimed(found.metrics)


def classified(rows):
    batch = collate([{"input_ids": row["input_ids"], "labels": []} for row in rows])
    return batch | {"labels": torch.tensor([len(row["input_ids"]) % 3 for row in rows])}


def pairs(rows):
    batch = collate(rows)
    return batch | {
        "labels": batch["labels"].masked_fill(batch["labels"] == 0, -100)[:, :4].contiguous()
    }


def spans(rows):
    batch = collate([row | {"labels": []} for row in rows])
    del batch["labels"]
    return batch | {
        name: torch.tensor([1] * len(rows)) for name in ("start_positions", "end_positions")
    }


def pictures(rows):
    batch = collate([row | {"labels": []} for row in rows])
    seeds = torch.tensor([row["input_ids"][0] for row in rows])[:, None, None, None]
    pixels = torch.linspace(0, 1, 3 * 64).view(3, 8, 8) * seeds
    return {name: batch[name] for name in ("input_ids", "attention_mask")} | {
        "pixel_values": pixels
    }


def contrasted(rows):
    return pictures(rows) | {"return_loss": True}


SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = SIZES | {"vocab_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Wide(nn.Module):
    """24 classes of 20 tokens, one of the inputs handed out, and the same value twice."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(64, 16), nn.Linear(16, 24)

    def forward(self, input_ids, attention_mask=None, labels=None):
        scores = self.head((self.words(input_ids) * attention_mask[..., None]).sum(1))
        loss = nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "scores": scores, "again": scores, "shown": attention_mask}


def t5():
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def clip():
    vision = SIZES | {"image_size": 8, "patch_size": 4}
    text = SIZES | {"vocab_size": 64, "max_position_embeddings": 32, "eos_token_id": 63}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def every_layer():
    return BertForSequenceClassification(
        BertConfig(**TEXT, num_labels=3, output_hidden_states=True)
    )


CASES = {
    "wide": (Wide, classified),
    "all layers": (every_layer, classified),
    "spans": (lambda: BertForQuestionAnswering(BertConfig(**TEXT)), spans),
    "encoder and decoder": (t5, pairs),
    "text and pictures": (clip, contrasted),
}


def flat(value):
    if isinstance(value, Mapping):
        value = value.values()
    return (
        [value]
        if isinstance(value, np.ndarray)
        else [leaf for each in value for leaf in flat(each)]
    )


@pytest.mark.parametrize("name", CASES)
def test_predictions_are_all_outputs(tmp_path, name):
    make, collator = CASES[name]
    found = []
    for kind, arguments in ((MerakTrainer, MerakArguments), (Trainer, TrainingArguments)):
        torch.manual_seed(0)
        trainer = kind(make(), arguments(str(tmp_path), **RUN), collator)
        rows = [{"input_ids": [*range(1, 21)]}] * 2 if name == "wide" else samples(4, seed=3)
        found.append(trainer.predict(rows))
    ours, theirs = (each.predictions for each in found)
    assert type(ours) is type(theirs) and len(ours) == len(theirs)
    assert [x.shape for x in flat(ours)] == [x.shape for x in flat(theirs)]
    for mine, other in zip(flat(ours), flat(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    for mine, other in zip(*(flat(each.label_ids) for each in found), strict=True):
        assert np.array_equal(mine, other)


def test_a_loss_that_is_asked_for_otherwise_is_named(tmp_path):
    args = MerakArguments(str(tmp_path), **RUN, max_steps=1)
    with pytest.raises(TraceError, match="return_loss=True"):
        MerakTrainer(clip(), args, pictures, samples(2)).train()


def on_two_ranks(rank, world_size, directory):
    """A pipeline whose last stage is on the first rank; two replicas, of which one has a batch
    less.
    """
    found = []
    for degrees in ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}, {}):
        args = MerakArguments(directory, **RUN, **degrees)
        found.append(predicted(MerakTrainer, args, tiny_llama(), collate, samples(5)))
    return found


@pytest.mark.timeout(200)
@pytest.mark.long
def test_outputs_are_those_of_one_process(tmp_path):
    ranks = run_ranks(on_two_ranks, 2, str(tmp_path), timeout=150)
    args = TrainingArguments(str(tmp_path), **RUN)
    metrics, predictions, labels, told = predicted(Trainer, args, tiny_llama(), collate, samples(5))
    for ours in (each for found in ranks for each in found):
        assert ours[0].keys() == metrics.keys() and ours[0]["eval_loss"] == pytest.approx(
            metrics["eval_loss"], 1e-6
        )
        assert ours[3]["test_loss"] == pytest.approx(told["test_loss"], 1e-6)
        np.testing.assert_allclose(ours[1], predictions, rtol=1e-4, atol=1e-5)
        assert np.array_equal(ours[2], labels)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {"per_class": np.ones(2)},
            "its 'per_class' is a ndarray, which cannot be logged or saved",
        ),
        ({1: 0.5}, "its 1 is a float"),
        ([0.5], "compute_metrics list: it returned no dictionary"),
    ],
)
def test_metrics_that_no_log_can_hold_are_refused(metrics, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        plain_metrics(metrics)


def test_metrics_of_plain_numbers_are_kept():
    metrics = {
        "f1": 0.5,
        "count": 3,
        "note": "x",
        "by_class": [0.1, 0.2],
        "undefined": float("nan"),
    }
    assert plain_metrics(metrics) == metrics
