"""Bit equality with megatron-core itself, where it is installed
(`pip install --no-deps megatron-core`).
"""

import numpy as np
import pytest
import torch

from megatron_merak.data.blend import exhaustive_blending_indices
from megatron_merak.data.build import build_datasets, build_tokenizer
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


def their_datasets(prefixes, weights, split, sizes, cache, eod_mask_loss):
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    settings = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=(prefixes, weights),
        split=split,
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
    theirs = their_datasets(
        names, weights, "8,1,1", [8 * train_iters, 16, 16], tmp_path / "cache", True
    )
    for our_part, their_part in zip(built, theirs, strict=True):
        for name in INDICES:
            assert hasattr(our_part, name) == hasattr(their_part, name)
            if hasattr(our_part, name):
                one, two = getattr(our_part, name), getattr(their_part, name)
                assert one.dtype == two.dtype and np.array_equal(one, two), name
        for i in range(len(our_part)):
            item, their_item = our_part[i], their_part[i]
            assert all(torch.equal(item[key], their_item[key]) for key in item)


@pytest.mark.parametrize("sizes", [[5], [3, 3], [1, 10, 4], [30, 20, 7, 7]])
def test_exhaustive_blend_is_bit_equal(sizes):
    from megatron.core.datasets import helpers

    dataset_index, sample_index = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(
        dataset_index, sample_index, np.array(sizes), len(sizes)
    )
    ours = exhaustive_blending_indices(sizes)
    assert np.array_equal(ours[0], dataset_index) and np.array_equal(ours[1], sample_index)
