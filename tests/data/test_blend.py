"""The blending rule against a plain loop, and the blended data set built from it."""

from fractions import Fraction

import numpy as np
import pytest

from megatron_merak.data.blend import (
    BlendedDataset,
    blending_indices,
    exhaustive_blending_indices,
    normalized,
    parse_blend,
    samples_per_dataset,
)
from megatron_merak.data.gpt_dataset import GPTDataset
from megatron_merak.data.mock import MockIndexedDataset
from megatron_merak.data.source_part import GPTDatasetConfig
from megatron_merak.errors import DataError


def slow_blend(weights, size):
    """The rule in exact arithmetic."""
    taken = [0] * len(weights)
    rows = []
    for step in range(size):
        lags = [
            Fraction(weight) * max(step, 1) - count
            for weight, count in zip(weights, taken, strict=True)
        ]
        chosen = lags.index(max(lags))
        rows.append((chosen, taken[chosen]))
        taken[chosen] += 1
    return rows


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [0.25, 0.25, 0.5], [0.0625, 0.4375, 0.375, 0.125]]
)
def test_weighted_blend_follows_the_rule(weights):
    dataset_index, sample_index = blending_indices(weights, 200)
    assert dataset_index.dtype == np.int16 and sample_index.dtype == np.int64
    assert list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True)) == slow_blend(
        weights, 200
    )


def test_blend_keeps_the_proportions_throughout():
    weights = normalized([3, 1, 7.5, 0.2])
    dataset_index, _ = blending_indices(weights, 3000)
    taken = np.cumsum(dataset_index[:, None] == np.arange(4), axis=0)
    assert (np.abs(taken - np.arange(1, 3001)[:, None] * weights) < 1.5).all()


@pytest.mark.parametrize("sizes", [[5], [3, 3], [1, 10, 4], [7, 0, 2]])
def test_exhaustive_blend_uses_every_sample_once(sizes):
    dataset_index, sample_index = exhaustive_blending_indices(sizes)
    pairs = list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True))
    assert sorted(pairs) == [
        (dataset, sample) for dataset, size in enumerate(sizes) for sample in range(size)
    ]


def test_samples_per_dataset():
    assert samples_per_dataset([0.3, 0.7], 10) == [3, 7]
    assert samples_per_dataset([0.31, 0.69], 1000, surplus=0.005) == [312, 694]


def test_parse_blend():
    assert parse_blend("--data-path", ["p"]) == (["p"], None)
    assert parse_blend("--data-path", ["p", "q"]) == (["p", "q"], None)
    assert parse_blend("--data-path", ["3", "p", "0.5", "q"]) == (["p", "q"], [3.0, 0.5])
    for bad in (
        ["p", "1"],
        ["1", "p", "q"],
        ["1"],
        ["1", "p", "q", "r"],
        ["0", "p"],
        ["nan", "p"],
        ["-1", "p"],
    ):
        with pytest.raises(DataError, match="--data-path"):
            parse_blend("--data-path", bad)


def mock_dataset(samples, seed):
    config = GPTDatasetConfig(sequence_length=16, random_seed=seed, vocab_size=50)
    return GPTDataset(MockIndexedDataset(50, 49), (0, 20 + seed), samples, "train", config)


def test_blended_items_come_from_their_datasets(tmp_path):
    parts = [mock_dataset(30, 0), mock_dataset(80, 1)]
    for cache in (None, tmp_path, tmp_path):
        blend = BlendedDataset(parts, [1, 3], 100, cache)
        assert len(blend) == 100
        for i in range(100):
            expected = parts[blend.dataset_index[i]].tokens(blend.dataset_sample_index[i])
            assert blend[i]["tokens"].tolist() == expected[:-1].tolist()
    assert np.bincount(blend.dataset_index).tolist() == [25, 75]


def test_exhaustive_blended_dataset():
    parts = [mock_dataset(None, 0), mock_dataset(None, 1)]
    blend = BlendedDataset(parts, [len(part) for part in parts], None)
    assert (
        len(blend)
        == len(parts[0]) + len(parts[1])
        == len(
            set(zip(blend.dataset_index.tolist(), blend.dataset_sample_index.tolist(), strict=True))
        )
    )


def test_too_many_samples_of_one_dataset():
    part = mock_dataset(None, 0)
    with pytest.raises(DataError, match="--mid-level-dataset-surplus"):
        BlendedDataset([part, part], [1, 1], 2 * len(part) + 2)
