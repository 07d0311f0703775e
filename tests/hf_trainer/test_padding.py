"""Padding to few lengths: which length, what with, and that no loss sees it."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches.model_facts import ModelFacts, padding_of
from megatron_merak.hf_trainer.batches.padding import Padding

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_automatic_lengths():
    padding = Padding()
    assert [padding.length(n) for n in (1, 8, 9, 12, 13, 17, 25, 33, 49, 96, 97, 1000)] == [
        8,
        8,
        16,
        16,
        16,
        24,
        32,
        40,
        56,
        96,
        104,
        1024,
    ]
    assert [
        Padding(decoder=True).length(n) for n in (1, 8, 9, 12, 13, 17, 25, 33, 49, 96, 97, 1000)
    ] == [8, 8, 12, 12, 16, 24, 32, 48, 64, 96, 128, 1024]
    assert all(
        padding.length(n) >= n and padding.length(padding.length(n)) == padding.length(n)
        for n in range(1, 999)
    )
    assert Padding(limit=20).length(17) == 20
    # the model decides what it does with more than its limit
    assert Padding(limit=20).length(30) == 30
    assert [Padding(limit=20).length(n, packed=True) for n in (5, 30, 65, 130, 1025)] == [
        8,
        32,
        72,
        144,
        1152,
    ]


def test_asked_lengths():
    assert [Padding((4, 16)).length(n) for n in (1, 4, 5, 16)] == [4, 4, 16, 16]
    with pytest.raises(DataError, match="largest bucket is 16"):
        Padding((4, 16)).length(17)
    assert [Padding("auto", 5).length(n) for n in (1, 5, 6)] == [5, 5, 10]
    assert Padding(None).length(13) == 13


def test_what_it_pads_with():
    ids = torch.tensor([[5, 6, 7]])
    batch = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.tensor([[0, 1, 0]]),
        "scores": torch.rand(1, 3),
    }
    padded = Padding((5,), pad_id=9)(batch)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 9, 9]]
    assert padded["labels"].tolist() == [[5, 6, 7, -100, -100]]
    # another document, no longer than the longest
    assert padded["position_ids"].tolist() == [[0, 1, 0, 0, 1]]
    assert "attention_mask" not in padded  # it would hide where the packed sequences begin
    assert padded["scores"] is batch["scores"] and batch["input_ids"] is ids
    assert Padding((5,))({"input_ids": ids})["attention_mask"].tolist() == [[1, 1, 1, 0, 0]]
    assert "attention_mask" not in Padding((3,))({"input_ids": ids})


def test_labels_that_are_no_tokens_stay():
    ids = torch.ones(2, 3, dtype=torch.int64)
    several = {"input_ids": ids, "labels": torch.rand(2, 3)}
    assert Padding((4,))(several)["labels"].shape == (2, 3)
    assert Padding((4,))({"input_ids": ids, "labels": torch.tensor([1, 2])})["labels"].shape == (2,)
    classes = {"input_ids": ids, "labels": torch.ones(2, 5, dtype=torch.int64)}
    assert Padding()(classes)["labels"].shape == (2, 5) and Padding()(classes)[
        "input_ids"
    ].shape == (2, 8)
    assert Padding(decoder=True)(classes)["labels"].tolist() == [[1] * 5 + [-100] * 3] * 2


def test_what_cannot_be_padded_is_told():
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert "cu_seq_lens_q" in Padding((4,)).unfit(
        {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 3])}
    )
    assert "attention_mask" in Padding((4,)).unfit(
        {"input_ids": ids, "attention_mask": torch.ones(2, 1, 3, 3)}
    )
    assert Padding((4,)).unfit({"input_ids": ids, "attention_mask": ids}) == ""


def models():
    llama = LlamaConfig(**SMALL, intermediate_size=24, num_key_value_heads=1)
    yield LlamaForCausalLM(llama), ("input_ids", "labels")
    yield LlamaForCausalLM(llama), ("input_ids", "labels", "attention_mask")
    yield LlamaForCausalLM(llama), ("input_ids", "labels", "position_ids")
    yield (
        BertForMaskedLM(BertConfig(**SMALL, intermediate_size=24)),
        ("input_ids", "labels", "token_type_ids"),
    )
    yield (
        MambaForCausalLM(
            MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
        (
            "input_ids",
            "labels",
        ),
    )
    t5 = T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    yield T5ForConditionalGeneration(t5), ("input_ids", "decoder_labels", "attention_mask")


@pytest.mark.parametrize("number", range(6))
def test_no_loss_sees_the_padding(number):
    torch.manual_seed(number)
    model, entries = list(models())[number]
    model = model.double().eval()
    ids = torch.randint(1, 64, (3, 11))
    every = {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.tensor([[1] * 11, [1] * 7 + [0] * 4, [0] * 2 + [1] * 9]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]] * 3),
        "token_type_ids": torch.randint(0, 2, (3, 11)),
        "decoder_labels": torch.randint(1, 64, (3, 6)),
    }
    batch = {name.removeprefix("decoder_"): every[name] for name in entries}
    args = MerakArguments("unused", use_cpu=True, length_buckets="16,32")
    padded = padding_of(model, ModelFacts.of(model, args), args, None)(batch)
    assert padded["input_ids"].shape == (3, 16)
    assert padded["labels"].shape == (3, 16)
    with torch.no_grad():
        plain, full = model(**batch), model(**padded)
    # transformers takes it in fp32
    torch.testing.assert_close(full.loss, plain.loss, rtol=1e-6, atol=0)
    shown = batch.get("attention_mask", torch.ones_like(ids)).bool()
    if "decoder_labels" not in entries:
        logits = full.logits[:, :11]
        torch.testing.assert_close(logits[shown], plain.logits[shown], rtol=1e-9, atol=1e-12)


def test_a_model_that_looks_both_ways_and_takes_no_mask_is_not_padded():
    class Bag(torch.nn.Module):
        def forward(self, input_ids, labels=None):
            return {"loss": input_ids.float().mean()}

    args = MerakArguments("unused", use_cpu=True)
    ids = torch.ones(1, 5, dtype=torch.int64)
    assert (
        padding_of(Bag(), ModelFacts.of(Bag(), args), args, None)({"input_ids": ids})["input_ids"]
        is ids
    )
