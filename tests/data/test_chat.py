"""Conversations in tokens, beside transformers' own masks; and packed into samples."""

import json
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from megatron_merak.cli.preprocess_data import main
from megatron_merak.data.chat import ChatEncoder
from megatron_merak.data.chat_dataset import ChatDataset, pack
from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_merak.data.source_part import GPTDatasetConfig
from megatron_merak.errors import DataError
from tests.data.chats import MARKED, PLAIN, conversation, tokenizer_directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tokenizer_directory(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def test_targets_are_what_transformers_marks_with_either_kind_of_template(tokenizer):
    plain = ChatEncoder(tokenizer, None, "t")
    marked = ChatEncoder(tokenizer, MARKED, "t")
    for number in range(12):
        messages = conversation(number)
        theirs = tokenizer.apply_chat_template(
            messages,
            chat_template=MARKED,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        for found in (plain.encode(messages), marked.encode(messages)):
            assert found.ids.tolist() == theirs["input_ids"]
            assert found.targets.tolist() == [bool(one) for one in theirs["assistant_masks"]]
        said = tokenizer.decode(found.ids[found.targets])
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert said == "".join(f"{answer}<|end|>" for answer in answers)


def test_what_is_no_conversation_is_told(tokenizer, directory):
    encoder = ChatEncoder(tokenizer, None, "t")
    user = {"role": "user", "content": "x"}
    for messages, reason in (
        ("text", "it is no list of messages"),
        ([], "it is no list of messages"),
        ([user], "no message is of the assistant, so that there are no targets"),
        ([user, {"content": "x"}], "message 2 has no 'role'"),
        ([{"role": "assistant"}], "message 1 has no 'content'"),
    ):
        with pytest.raises(ValueError, match=f"^{reason}$"):
            encoder.encode(messages)
    strict = (
        PLAIN + "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    )
    with pytest.raises(ValueError, match="the chat template refuses it: one message only"):
        ChatEncoder(tokenizer, strict, "t").encode([user, {"role": "assistant", "content": "y"}])
    # a template that writes an earlier answer otherwise once more follows
    forgets = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '...' }}")
    answer = {"role": "assistant", "content": "y"}
    with pytest.raises(ValueError, match="writes message 2 otherwise where more follows"):
        ChatEncoder(tokenizer, forgets, "t").encode([user, answer, user, answer])
    bare = AutoTokenizer.from_pretrained(directory)
    bare.chat_template = None
    with pytest.raises(DataError, match="--tokenizer-model t: it has no chat template"):
        ChatEncoder(bare, None, "t")


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_every_conversation_once_and_fit(seed):
    lengths = np.random.default_rng(seed).integers(0, 40, 200)
    rows = pack(lengths, 32)
    packed = sorted(chain(*rows))
    assert packed == [one for one, length in enumerate(lengths) if length]
    filled = np.minimum(lengths, 32)
    assert all(filled[row].sum() <= 32 for row in rows)
    least = -(-int(np.minimum(lengths, 32).sum()) // 32)
    assert len(rows) <= least * 1.1 + 1


def dataset(tmp_path, conversations, samples=None, **config):
    with IndexedDatasetWriter(tmp_path / "chats", np.int32) as writer:
        for each in conversations:
            writer.add_document(np.array(each))
    settings = GPTDatasetConfig(
        **{"sequence_length": 8, "random_seed": 3, "vocab_size": 50} | config
    )
    source = IndexedDataset(tmp_path / "chats")
    return ChatDataset(source, (0, len(source)), samples, "train", settings)


def test_a_row_by_hand(tmp_path):
    rows = dataset(tmp_path, [[~1, 2, 3], [~7, ~8, 9, 10]])
    assert len(rows) == 1
    row = {name: value.tolist() for name, value in rows[0].items()}
    assert row == {
        "tokens": [7, 8, 9, 10, 1, 2, 3, 0],
        "labels": [8, 9, 10, 0, 2, 3, 0, 0],
        "loss_mask": [0, 1, 1, 0, 1, 1, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0],
    }


def test_passes_have_their_own_order_and_caches_give_the_same(tmp_path):
    chats = [[~i, i, i, i, i] for i in range(1, 20)]
    rows = dataset(tmp_path, chats, samples=50)
    assert len(rows) == 57
    orders = rows.shuffle_index.reshape(3, 19)
    assert all(sorted(order) == list(range(19)) for order in orders.tolist())
    assert len({tuple(order) for order in orders.tolist()}) == 3
    cached = dataset(tmp_path, chats, samples=50, path_to_cache=tmp_path / "cache")
    again = dataset(tmp_path, chats, samples=50, path_to_cache=tmp_path / "cache")
    for index in (0, 20, 56):
        for other in (cached, again):
            assert all(torch.equal(rows[index][name], other[index][name]) for name in rows[index])


def test_a_long_conversation_is_cut_and_a_wrong_token_is_told(tmp_path):
    (row,) = [dataset(tmp_path, [[~1, *range(2, 12)]])[0]]
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert row["loss_mask"].tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    with pytest.raises(
        DataError, match="conversation 0 has token id 60, the vocabulary ends at 49"
    ):
        dataset(tmp_path, [[~1, 60]])[0]


def run(*words):
    """Run merak-preprocess; return its exit status."""
    try:
        return main([str(word) for word in words])
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_command_writes_what_the_encoder_gives(workers, directory, tokenizer, tmp_path, capsys):
    chats = [conversation(number) for number in range(9)]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    lines.insert(3, json.dumps({"messages": chats[0][:1]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "marked.jinja").write_text(MARKED)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", directory]
    words = ["--input", tmp_path / "chats.jsonl", "--output-prefix", tmp_path / "out", *flags]
    words += ["--chat", "--chat-template", tmp_path / "marked.jinja", "--workers", workers]
    assert run(*words) == 1
    assert "chats.jsonl:4: no message is of the assistant" in capsys.readouterr().err
    assert run(*words, "--skip-bad", 1) == 0
    encoder = ChatEncoder(tokenizer, None, "t")
    written = IndexedDataset(tmp_path / "out_messages_document")
    assert written.dtype == np.int32 and len(written) == 9
    for number, chat in enumerate(chats):
        assert np.array_equal(written[number], encoder.encode(chat).stored())
    prefix = tmp_path / "out_messages_document"
    assert run("verify", prefix) == 1
    assert "is below 0 (conversations are checked with --chat)" in capsys.readouterr().err
    assert run("verify", "--chat", "--vocab-size", 290, prefix) == 0
    capsys.readouterr()
    assert run("inspect", prefix, *flags) == 0
    assert "<|user|>what is a rank<|end|>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--chat-template", "x"], "--chat-template x: has no effect without --chat"),
        (["--chat", "--append-eod"], "--append-eod on: the chat template writes the ends"),
        (["--chat", "--json-keys", "a", "b"], "--json-keys a b: conversations are under one key"),
        (["--chat", "--chat-template", "/none"], "--chat-template /none: it cannot be read"),
    ],
)
def test_mistakes_of_the_command(words, told, directory, tmp_path, capsys):
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", directory]
    (tmp_path / "chats.jsonl").write_text("{}")
    given = ["--input", tmp_path / "chats.jsonl", "--output-prefix", tmp_path / "out"]
    assert run(*given, *flags, *words) == 2
    assert told in capsys.readouterr().err


def test_a_tokenizer_without_a_template_is_told(directory, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text("{}")
    given = ["--input", tmp_path / "chats.jsonl", "--output-prefix", tmp_path / "out", "--chat"]
    bare = directory / "tokenizer.json"
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", bare]
    assert run(*given, *flags) == 1
    assert "it has no chat template" in capsys.readouterr().err
    assert run(*given, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9") == 1
    told = "--tokenizer-type NullTokenizer: it has no chat template. Use HuggingFaceTokenizer. Name"
    assert told in capsys.readouterr().err
