"""Every way to make batches trains HuggingFace models on the targets of the data set, s of them per
sample.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BartConfig,
    BartForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatron_merak.config import HFConfig, HFModelConfig, TrainConfig
from megatron_merak.errors import ConfigError, TraceError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.training.hf_batches import IGNORED, TokenBatches, targets, token_count
from megatron_merak.training.hf_model import beyond_positions, shifts_labels, with_example

SAMPLES, LENGTH, VOCABULARY = 2, 8, 61


def gpt_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    text = torch.randint(
        0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    mask = torch.ones(SAMPLES, LENGTH)
    mask[0, 3] = mask[1, -1] = 0
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask}


def llama(positions: int = LENGTH + 1) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=positions)
    )


class Shifting(LlamaForCausalLM):
    """A model that takes labels only, and shifts them."""

    def forward(self, input_ids, labels):
        return super().forward(input_ids=input_ids, labels=labels)


class ShiftingLearned(GPT2LMHeadModel):
    """The same, with a row of a table for each position."""

    def forward(self, input_ids, labels):
        return super().forward(input_ids=input_ids, labels=labels)


def gpt2(kind: type[GPT2LMHeadModel] = GPT2LMHeadModel) -> GPT2LMHeadModel:
    return kind(
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH)
    )


def bart() -> BartForCausalLM:
    torch.manual_seed(1)
    sizes = {
        "d_model": 16,
        "decoder_layers": 1,
        "decoder_ffn_dim": 32,
        "decoder_attention_heads": 2,
        "dropout": 0.0,
    }
    return BartForCausalLM(
        BartConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH + 1)
    )


def expected(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Megatron's: the mean over unmasked positions of the cross entropy with the label there."""
    logits = model(input_ids=batch["tokens"]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()


def test_targets_are_the_labels_that_count():
    batch = gpt_batch()
    assert token_count(batch) == SAMPLES * LENGTH - 2 == (targets(batch) != IGNORED).sum()
    assert targets(batch)[0, 3] == IGNORED and targets(batch)[0, 2] == batch["labels"][0, 2]


@pytest.mark.parametrize(("make", "way"), [(llama, "shifted"), (llama, "longer"), (bart, "plain")])
def test_the_loss_is_that_of_the_data_set(make, way):
    model, batch = make(), gpt_batch()
    made = TokenBatches(way)(batch)
    torch.testing.assert_close(model(**made).loss, expected(model, batch), rtol=1e-5, atol=1e-6)
    assert made["input_ids"].shape[1] == LENGTH + TokenBatches(way).more
    wrong = TokenBatches("plain" if way != "plain" else "longer")(batch)
    assert abs(model(**wrong).loss - expected(model, batch)) > 1e-3


def test_the_sum_is_divided_by_the_items_that_are_given():
    model, batch = llama(), gpt_batch()
    loss = model(**TokenBatches("shifted")(batch, torch.tensor(100.0))).loss
    torch.testing.assert_close(
        loss, expected(model, batch) * token_count(batch) / 100, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("model", "shifts"), [(llama, True), (bart, False)])
def test_whether_a_loss_shifts_shows_in_the_graph(model, shifts):
    assert shifts_labels(capture(model(), TokenBatches("plain").example(SAMPLES, LENGTH))) is shifts


CONFIG = HFConfig(
    model=HFModelConfig(model="m", seq_length=LENGTH), train=TrainConfig(micro_batch_size=SAMPLES)
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "way"),
    [(llama, "shifted"), (lambda: Shifting(llama().config), "longer"), (bart, "plain")],
)
def test_the_way_of_a_model_is_found(make, way):
    model = make()
    captured, batches = with_example(model, CONFIG, lambda example: capture(model, example))
    assert batches == TokenBatches(way)
    read = {
        node.target for node in captured.module.graph.find_nodes(op="placeholder") if node.users
    }
    assert read == {"input_ids", "shift_labels" if way == "shifted" else "labels"}


def test_a_model_without_a_position_for_one_token_more_is_refused():
    model = gpt2(ShiftingLearned)
    with pytest.raises(ConfigError, match="needs 1 more") as caught:
        with_example(model, CONFIG, lambda example: capture(model, example))
    assert caught.value.remedy == f"Use at most {LENGTH - 1}"


def test_a_model_that_computes_its_positions_takes_more_and_it_is_said():
    model = Shifting(llama(positions=LENGTH).config)
    _, batches = with_example(model, CONFIG, lambda example: capture(model, example))
    assert batches == TokenBatches("longer")
    assert beyond_positions(model, LENGTH) == ()
    assert "max_position_embeddings 8" in beyond_positions(model, LENGTH + 1)[0]


def test_other_failures_of_a_capture_are_told():
    def fail(example):
        raise TraceError("model", "X", "it has branches", "Remove them")

    with pytest.raises(TraceError, match="branches"):
        with_example(llama(), CONFIG, fail)


def test_a_loss_that_takes_no_count_cannot_weigh_tokens_alike():
    config = replace(CONFIG, train=replace(CONFIG.train, calculate_per_token_loss=True))
    with pytest.raises(ConfigError, match="num_items_in_batch"):
        with_example(Shifting(llama().config), config, lambda example: None)
    model = gpt2()
    captured, _ = with_example(model, config, lambda example: capture(model, example))
    assert "num_items_in_batch" in [
        node.target for node in captured.module.graph.find_nodes(op="placeholder")
    ]
