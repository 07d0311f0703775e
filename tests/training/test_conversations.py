"""merak-pretrain-hf --sft beside transformers' model on one conversation at a time."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatron_merak.config import HFConfig
from megatron_merak.data.chat import ChatEncoder
from megatron_merak.data.indexed_dataset import IndexedDatasetWriter
from megatron_merak.errors import ConfigError
from megatron_merak.training.hf_batches import documents_alone, shared_samples
from tests.data.chats import conversation, tokenizer_directory
from tests.ranks import run_ranks
from tests.training.jobs import job

ROW = 160
STEPS = 2
BATCH = 4
FLAGS = f"""--sft --calculate-per-token-loss --seq-length {ROW} --micro-batch-size 2
--global-batch-size {BATCH} --train-iters {STEPS} --lr 0.01 --weight-decay 0 --lr-decay-style constant"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two models, a tokenizer and a dataset of conversations."""
    root = tmp_path_factory.mktemp("conversations")
    tokenizer_directory(root / "llama")
    tokenizer = AutoTokenizer.from_pretrained(root / "llama")
    torch.manual_seed(0)
    sizes = {"vocab_size": 290, "num_hidden_layers": 2, "hidden_size": 32}
    LlamaForCausalLM(
        LlamaConfig(**sizes, intermediate_size=48, num_attention_heads=4)
    ).save_pretrained(root / "llama")
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=290,
            n_layer=2,
            n_embd=32,
            n_head=4,
            n_positions=ROW,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
    ).save_pretrained(root / "gpt2")
    tokenizer.save_pretrained(root / "gpt2")
    encoder = ChatEncoder(tokenizer, None, root)
    with IndexedDatasetWriter(root / "chats", np.int32) as writer:
        for number in range(24):
            writer.add_document(encoder.encode(conversation(number)).stored())
    return root


def flags(place, model):
    return f"--model {place}/{model} --data-path {place}/chats --split 1,0,0 {FLAGS}"


def losses(rank, size, place, model, more):
    metrics = place / f"{model}{size}{len(more)}.jsonl"
    job(rank, size, f"{flags(place, model)} --metrics {metrics} {more}", HFConfig)
    lines = metrics.read_text().splitlines() if rank == size - 1 else ()
    return [json.loads(line)["loss"] for line in lines]


def alone(place, model):
    """The loss of the first step: the mean over the targets of its conversations, each by itself."""
    from megatron_merak.data.chat_dataset import ChatDataset
    from megatron_merak.data.indexed_dataset import IndexedDataset
    from megatron_merak.data.source_part import GPTDatasetConfig

    kind = LlamaForCausalLM if model == "llama" else GPT2LMHeadModel
    network = kind.from_pretrained(place / model).eval()
    source = IndexedDataset(place / "chats")
    config = GPTDatasetConfig(sequence_length=ROW, random_seed=1234, vocab_size=290)
    rows = ChatDataset(source, (0, len(source)), STEPS * BATCH, "train", config)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    shared = 0
    for sample in range(BATCH):
        row = int(rows.shuffle_index[sample])
        start, stop = rows.sample_index[row : row + 2]
        shared += stop - start > 1
        for number in rows.document_index[start:stop]:
            stored = torch.from_numpy(source.get(int(number)).astype(np.int64))[:ROW]
            ids = torch.where(stored < 0, ~stored, stored)
            labels = torch.where(stored < 0, -100, stored)
            targets = int((labels[1:] != -100).sum())
            if targets:
                loss = network(input_ids=ids[None], labels=labels[None]).loss
                total += loss.double() * targets
                count += targets
    assert shared == BATCH, "samples with one conversation show nothing"
    return (total / count).item()


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_each_conversation_is_read_by_itself(model, place):
    (found,) = run_ranks(losses, 1, place, model, "")
    assert found[0] == pytest.approx(alone(place, model), rel=2e-6)
    assert found[1] < found[0]


@pytest.mark.long
def test_layouts_agree(place):
    (one,) = run_ranks(losses, 1, place, "llama", " ")
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    *_, four = run_ranks(losses, 4, place, "llama", layout)
    assert four == pytest.approx(one, rel=2e-6)


MIXES = Lfm2Config(
    vocab_size=290,
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    layer_types=["conv", "full_attention"],
)
BLIND = BloomConfig(vocab_size=290, n_layer=1, hidden_size=32, n_head=4)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (MIXES, "Lfm2ForCausalLM does not read conversations of a sample by themselves: with two"),
        (BLIND, "BloomForCausalLM reads no positions, which tell conversations apart"),
    ],
    ids=["mixes", "blind"],
)
def test_models_that_read_conversations_together_are_refused(config, told, place, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that one token tells on another
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(place / "llama").save_pretrained(tmp_path)
    words = flags(place, "llama").replace(f"{place}/llama", str(tmp_path))
    with pytest.raises(ConfigError, match=f"--sft on: {told}"):
        job(0, 1, words, HFConfig)


def test_the_samples_of_the_trial():
    def sample(positions, targets):
        return {
            "tokens": torch.arange(1, 7),
            "position_ids": torch.tensor(positions),
            "loss_mask": torch.tensor(targets).float(),
        }

    alone = sample([0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 0, 0])
    without = sample([0, 1, 2, 0, 1, 2], [1, 1, 0, 0, 0, 0])
    both = sample([0, 1, 0, 1, 2, 0], [1, 0, 0, 1, 0, 0])
    assert shared_samples([alone, without], 2) is None
    found = shared_samples([alone, without, both], 2)
    assert found["tokens"].tolist() == [[1, 2, 3, 4, 5, 0]] * 2
    first, second = documents_alone(found)
    assert first["tokens"].tolist() == [[1, 2, 0, 0, 0, 0]] * 2
    assert second["tokens"].tolist() == [[3, 4, 5, 0, 0, 0]] * 2
    assert second["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert second["loss_mask"].tolist() == [[0, 1, 0, 0, 0, 0]] * 2


@pytest.mark.parametrize(
    ("taken", "given", "told"),
    [
        ("--calculate-per-token-loss", "", "--sft on: micro-batches of conversations have unequal"),
        ("", "--eod-mask-loss", "--eod-mask-loss on: the targets of conversations are the tokens"),
    ],
)
def test_mistakes(taken, given, told, place):
    with pytest.raises(ConfigError, match=told):
        job(0, 1, f"{flags(place, 'llama').replace(taken, '')} {given}", HFConfig)
