"""Bit equality with megatron-core itself, where it is installed
(`pip install --no-deps megatron-core`).
"""

import json

import numpy as np
import pytest
import torch

from megatron_merak.data.blend import exhaustive_blending_indices
from megatron_merak.data.build import build_datasets, build_tokenizer, check_files
from megatron_merak.data.indexed_dataset import IndexedDatasetWriter

from .test_build import config

INDICES = (
    "document_index",
    "sample_index",
    "shuffle_index",
    "dataset_index",
    "dataset_sample_index",
)


class TheirTokenizer:
    eod, vocab_size = 100, 101
    unique_identifiers: dict = {}

    @property
    def pad(self):
        raise NotImplementedError


@pytest.fixture
def prefixes(tmp_path):
    """Three datasets, each written by both sides and compared byte by byte."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = np.random.RandomState(5)
    for name in "abc":
        theirs = IndexedDatasetBuilder(f"{tmp_path}/their-{name}.bin", dtype=np.uint16)
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for length in draw.randint(1, 60, size=40):
                tokens = draw.randint(0, 101, size=length)
                writer.add_document(tokens)
                theirs.add_document(torch.from_numpy(tokens), [int(length)])
        theirs.finalize(f"{tmp_path}/their-{name}.idx")
        for suffix in ("bin", "idx"):
            written = (tmp_path / f"{name}.{suffix}").read_bytes()
            assert written == (tmp_path / f"their-{name}.{suffix}").read_bytes()
    return [str(tmp_path / name) for name in "abc"]


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def their_datasets(sizes, cache, eod_mask_loss, **source):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    settings = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        **source,
        path_to_cache=str(cache),
        tokenizer=TheirTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()


@pytest.mark.parametrize("train_iters", [1, 7, 40])
@pytest.mark.parametrize("weights", [None, [1.0], [0.3, 0.7], [5.0, 1.0, 2.5]])
def test_datasets_are_bit_equal(prefixes, one_rank, tmp_path, weights, train_iters):
    names = prefixes[: len(weights or [0])]
    data_path = (
        names
        if weights is None
        else [x for pair in zip(map(str, weights), names, strict=True) for x in pair]
    )
    ours = config(
        {
            "data_path": tuple(data_path),
            "split": "8,1,1",
            "tokenizer_type": "NullTokenizer",
            "eod_mask_loss": True,
        },
        {"train_iters": train_iters},
    )
    built = build_datasets(ours, build_tokenizer(ours), replicas=2)
    sizes = [8 * train_iters, 16, 16]
    source = {"blend": (names, weights), "split": "8,1,1"}
    assert_equal(built, their_datasets(sizes, tmp_path / "cache", True, **source))


def assert_equal(built, theirs):
    for our_part, their_part in zip(built, theirs, strict=True):
        assert (our_part is None) == (their_part is None)
        if our_part is None:
            continue
        for name in INDICES:
            assert hasattr(our_part, name) == hasattr(their_part, name)
            if hasattr(our_part, name):
                one, two = getattr(our_part, name), getattr(their_part, name)
                assert one.dtype == two.dtype and np.array_equal(one, two), name
        for i in range(len(our_part)):
            item, their_item = our_part[i], their_part[i]
            assert all(torch.equal(item[key], their_item[key]) for key in item)


@pytest.mark.parametrize("threads", [1, 3])
def test_blends_without_weights_are_bit_equal(prefixes, one_rank, tmp_path, threads):
    data = {
        "data_path": tuple(prefixes),
        "split": "8,1,1",
        "tokenizer_type": "NullTokenizer",
        "num_dataset_builder_threads": threads,
    }
    ours = config(data, {"train_iters": 7, "eval_iters": 1})
    built = build_datasets(ours, build_tokenizer(ours), replicas=2)
    source = {"blend": (prefixes, None), "split": "8,1,1"}
    assert_equal(built, their_datasets([56, 8, 8], tmp_path / "cache", False, **source))


@pytest.mark.parametrize("valid", ["{2}", "1 {2}", "3 {1} 4.5 {0}", None])
def test_lists_in_files_are_bit_equal(prefixes, one_rank, tmp_path, valid):
    """Each part of its own data, as Megatron-LM's training script reads the file."""
    from megatron.core.datasets.utils import get_blend_from_list

    parts = {
        "train": [0.25, prefixes[0], 0.75, prefixes[1]],
        "valid": valid and valid.format(*prefixes),
        "test": [prefixes[1], prefixes[2]],
    }
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    data = {
        "per_split_data_args_path": str(tmp_path / "parts.json"),
        "tokenizer_type": "NullTokenizer",
    }
    ours = config(data, {"train_iters": 40})
    check_files(ours)
    built = build_datasets(ours, build_tokenizer(ours), replicas=2)
    words = [part.split() if isinstance(part, str) else part for part in parts.values()]
    source = {"blend_per_split": [get_blend_from_list(each) for each in words]}
    assert_equal(built, their_datasets([320, 16, 16], tmp_path / "cache", False, **source))


def test_a_list_in_a_file_is_bit_equal(prefixes, one_rank, tmp_path):
    from megatron.core.datasets.utils import get_blend_from_list

    (tmp_path / "blend.txt").write_text(f"2 {prefixes[2]}\n0.5\n{prefixes[0]}\n")
    data = {"data_args_path": str(tmp_path / "blend.txt"), "split": "9,1"}
    ours = config({**data, "tokenizer_type": "NullTokenizer"})
    check_files(ours)
    built = build_datasets(ours, build_tokenizer(ours), replicas=2)
    blend = get_blend_from_list((tmp_path / "blend.txt").read_text().split())
    source = {"blend": blend, "split": "9,1"}
    assert_equal(built, their_datasets([40, 16, 16], tmp_path / "cache", False, **source))


@pytest.mark.parametrize("sizes", [[5], [3, 3], [1, 10, 4], [30, 20, 7, 7]])
def test_exhaustive_blend_is_bit_equal(sizes):
    from megatron.core.datasets import helpers

    dataset_index, sample_index = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(
        dataset_index, sample_index, np.array(sizes), len(sizes)
    )
    ours = exhaustive_blending_indices(sizes)
    assert np.array_equal(ours[0], dataset_index) and np.array_equal(ours[1], sample_index)
