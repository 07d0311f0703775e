"""Tokenizers from local files: what they encode, and what they say when they cannot."""

import json

import pytest
from tokenizers import Tokenizer

from megatron_merak.data.tokenizer import (
    FileTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    build_tokenizer,
)
from megatron_merak.data.train_tokenizer import train_byte_bpe
from megatron_merak.errors import DataError

TEXTS = ["def f(x):\n    return x\n", "def g(y):\n    return y + 1\n", "naïve – 数字 \x00"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_bpe(TEXTS, 300, path)
    return path


def test_trained_tokenizer_round_trips_any_text(file):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(file), None)
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.eod == 0 and 257 < tokenizer.vocab_size <= 300
    for text in [*TEXTS, "", "\r\n\t emoji 🦅"]:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]
    assert len(tokenizer.tokenize(TEXTS[0])) < len(TEXTS[0])


def test_directory_reads_like_the_file(file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    bare = build_tokenizer("HuggingFaceTokenizer", tmp_path, None)
    assert isinstance(bare, FileTokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "!",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    full = build_tokenizer("HuggingFaceTokenizer", tmp_path, None)
    assert isinstance(full, HuggingFaceTokenizer)
    assert (full.vocab_size, full.eod) == (bare.vocab_size, bare.eod)
    assert full.tokenize_batch(TEXTS) == bare.tokenize_batch(TEXTS)
    assert full.detokenize(full.tokenize(TEXTS[2])) == TEXTS[2]
    assert full.pad == full.tokenize("!")[0] and full.tokenize_batch([]) == []


def test_padding_that_is_also_the_end_of_document_is_none(file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(file.read_bytes())
    eod = "<|endoftext|>"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod, "pad_token": eod}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert build_tokenizer("HuggingFaceTokenizer", tmp_path, None).pad is None


def test_truncation_stored_in_a_file_is_switched_off(file, tmp_path):
    stored = Tokenizer.from_file(str(file))
    stored.enable_truncation(2)
    stored.enable_padding(length=9)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.tokenize_batch(TEXTS) == FileTokenizer(file).tokenize_batch(TEXTS)


def test_null_tokenizer():
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("3 14\n99 100") == [3, 14, 99, 100]
    assert tokenizer.detokenize([3, 14]) == "3 14"
    for bad in ("101", "-1", "x", "1.5", "٣"):
        with pytest.raises(DataError, match="below 101"):
            tokenizer.tokenize(bad)


def test_missing_and_damaged_tokenizers_are_named(file, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokenizer_config.json").write_text("{}")
    paths = ("gpt2", tmp_path / "tokenizer.json", tmp_path / "empty", tmp_path / "half", None)
    for path in paths:
        with pytest.raises(DataError, match="--tokenizer-model"):
            build_tokenizer("HuggingFaceTokenizer", path, None)
    with pytest.raises(DataError, match="--vocab-size"):
        build_tokenizer("NullTokenizer", None, None)
    with pytest.raises(DataError, match="--tokenizer-type"):
        build_tokenizer("ByteLevelTokenizer", None, None)


def test_tokenizer_without_an_end_of_document(file, tmp_path):
    content = file.read_text().replace("<|endoftext|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="end a document"):
        _ = FileTokenizer(tmp_path / "tokenizer.json").eod
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(DataError, match="eos_token"):
        _ = HuggingFaceTokenizer(tmp_path).eod
