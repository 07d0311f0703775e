"""From flags to data sets."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_merak.config import Config, DataConfig, ModelConfig, TrainConfig
from megatron_merak.data.blend import BlendedDataset
from megatron_merak.data.build import (
    build_datasets,
    build_tokenizer,
    check_files,
    samples_wanted,
    vocabulary,
)
from megatron_merak.data.corpus import unigram_entropy
from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_merak.data.tokenizer import FileTokenizer, NullTokenizer
from megatron_merak.errors import DataError


def config(data: dict, train: dict | None = None, vocab_size: int | None = 100) -> Config:
    train = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_iters": 5,
        "eval_iters": 2,
        **(train or {}),
    }
    return Config(
        model=ModelConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=16, vocab_size=vocab_size
        ),
        train=TrainConfig(**train),
        data=DataConfig(**data),
    )


def datasets(config: Config):
    return build_datasets(config, build_tokenizer(config), replicas=2)


@pytest.fixture
def prefix(tmp_path):
    with IndexedDatasetWriter(tmp_path / "set", "uint16") as writer:
        for document in range(100):
            writer.add_document([document % 100] * (document % 17 + 1))
    return str(tmp_path / "set")


def null(*data_path, **more):
    return {"data_path": data_path, "tokenizer_type": "NullTokenizer", **more}


def test_samples_wanted():
    assert samples_wanted(config({}), 2) == (40, 16, 16)
    assert samples_wanted(config({}, {"eval_interval": 2}), 2) == (40, 48, 16)
    assert samples_wanted(config({}, {"eval_iters": 0, "train_iters": None}), 2) == (0, 0, 0)


def test_mock_data_needs_no_file():
    built = datasets(config({"mock_data": True}))
    assert [len(part) >= wanted for part, wanted in zip(built, (40, 16, 16), strict=True)] == [
        True
    ] * 3
    assert int(built.train[0]["tokens"].max()) < 100
    again = datasets(config({"mock_data": True}))
    assert all(torch.equal(built.valid[i]["labels"], again.valid[i]["labels"]) for i in range(16))


def test_one_prefix_is_split_and_cached_beside_it(prefix):
    built = datasets(config(null(prefix, split="8,1,1")))
    assert [part.bounds for part in built] == [(0, 80), (80, 90), (90, 100)]
    assert len(list(Path(f"{prefix}/cache/GPTDataset_indices").glob("*.npy"))) == 9


def test_parts_without_samples_are_none(prefix):
    built = datasets(config(null(prefix, split="9,1,0"), {"eval_iters": 0}))
    assert built.valid is None and built.test is None
    assert datasets(config(null(prefix, split="9,1,0"))).test is None


def test_part_that_rounds_to_nothing(prefix, caplog):
    built = datasets(config(null(prefix, split="998,1,1")))
    assert built.valid is None and built.test is None
    assert "no valid data: --split 998,1,1 leaves none of the 100 sequences" in caplog.text
    with pytest.raises(DataError, match="--split"):
        datasets(config(null(prefix, split="998,1,1"), {"eval_interval": 1}))


def test_parts_given_one_by_one(prefix, tmp_path):
    data = {
        "train_data_path": (prefix,),
        "valid_data_path": ("5", prefix),
        "tokenizer_type": "NullTokenizer",
    }
    built = datasets(config({**data, "data_cache_path": str(tmp_path / "cache")}))
    assert built.train.bounds == built.valid.bounds == (0, 100) and built.test is None
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 6


def test_files_that_are_not_there_are_named_before_anything_is_built(prefix, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    for there in (null(prefix), null("3", prefix, "1", prefix), {"mock_data": True}):
        check_files(config(there))
    with pytest.raises(DataError, match="nowhere.idx: .* Check the path given with --data-path"):
        check_files(config(null("3", prefix, "1", nowhere)))
    own = {"train_data_path": (prefix,), "valid_data_path": (nowhere,)}
    with pytest.raises(DataError, match="Check the path given with --valid-data-path"):
        check_files(config(own))
    check_files(config(own, {"eval_iters": 0}))  # no sample of it is needed
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DataError, match="data file"):
        check_files(config(null(prefix)))
    assert list(tmp_path.iterdir()) == [Path(f"{prefix}.idx")]


def test_blends(prefix):
    weighted = datasets(config(null("3", prefix, "1", prefix, split="1,0,0"))).train
    assert (
        isinstance(weighted, BlendedDataset)
        and len(weighted) == 40
        and weighted.weights == [0.75, 0.25]
    )
    plain = datasets(config(null(prefix, prefix, split="1,0,0"))).train
    assert isinstance(plain, BlendedDataset) and len(plain) == 40 and plain.weights == [0.5, 0.5]
    with pytest.raises(DataError, match="Give weights"):
        datasets(config(null(prefix, prefix, split="1,0,0"), {"train_iters": 500}))


def test_eod_is_masked_on_request(prefix):
    changed = config(null(prefix, split="1,0,0", eod_mask_loss=True))
    assert datasets(changed).train.config.masked_eod == 100


def test_vocabulary(tmp_path):
    assert vocabulary(config(null("p")), NullTokenizer(100)) == 101
    assert build_tokenizer(config({"mock_data": True})).vocab_size == 100
    tokenizer = build_tokenizer(config({"mock_data": True}, vocab_size=50))
    tokenizer = dataclasses.make_dataclass("T", [("vocab_size", int, tokenizer.vocab_size)])()
    assert vocabulary(config({}, vocab_size=None), tokenizer) == 50
    assert vocabulary(config({}, vocab_size=64), tokenizer) == 64
    with pytest.raises(DataError, match="--vocab-size 49"):
        vocabulary(config({}, vocab_size=49), tokenizer)


def script(path):
    """A script of the repository as a module."""
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(Path(path).stem, root / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stdlib_corpus(tmp_path, capsys):
    example = script("examples/stdlib_corpus.py")
    arguments = [
        "--output-dir",
        str(tmp_path / "corpus"),
        "--vocab-size",
        "600",
        "--max-bytes",
        "300000",
    ]
    assert example.main(arguments) == 0
    facts = json.loads((tmp_path / "corpus" / "stdlib.json").read_text())
    dataset = IndexedDataset(tmp_path / "corpus" / "stdlib_text_document")
    assert len(dataset) == facts["documents"] > 10
    assert dataset.sequence_lengths.sum() == facts["tokens"]
    assert 3 < facts["unigram_entropy_nats"] == unigram_entropy(dataset) < math.log(600)
    tokenizer = FileTokenizer(tmp_path / "corpus" / "tokenizer.json")
    assert all(
        sequence[-1] == tokenizer.eod and (sequence == tokenizer.eod).sum() == 1
        for sequence in dataset[:]
    )
    compile(tokenizer.detokenize(dataset[0][:-1]), "first document", "exec", dont_inherit=True)

    stamp = (tmp_path / "corpus" / "stdlib_text_document.bin").stat().st_mtime_ns
    assert example.main(arguments) == 0
    assert stamp == (tmp_path / "corpus" / "stdlib_text_document.bin").stat().st_mtime_ns
    (tmp_path / "corpus" / "stdlib_text_document.idx").write_bytes(b"")
    assert example.main(arguments) == 0
    assert len(IndexedDataset(tmp_path / "corpus" / "stdlib_text_document")) == facts["documents"]
    capsys.readouterr()


def test_preprocess_tool(tmp_path, capsys):
    tool = script("tools/preprocess_data.py")
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n{"text": "3"}\n')
    arguments = [
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "10",
        "--append-eod",
    ]
    assert tool.main(arguments) == 0
    written = f"wrote {tmp_path / 'out'}_text_document.bin and .idx\n"
    assert capsys.readouterr().out == f"2 documents, 5 tokens, 0 skipped\n{written}"
    (tmp_path / "in.jsonl").write_text("{\n")
    assert tool.main(arguments) == 1
    assert "in.jsonl:1: not JSON" in capsys.readouterr().err
