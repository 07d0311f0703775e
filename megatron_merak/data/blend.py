"""Several data sets read as one, in fixed proportions; compiled steps are in
`csrc/py/indices.cpp`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from .. import _native
from ..errors import DataError
from .chat_dataset import ChatDataset
from .gpt_dataset import GPTDataset
from .index_cache import cached_arrays

# dataset_index is int16 on disk.
MAX_DATASETS = np.iinfo(np.int16).max


def parse_blend(flag: str, values: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Read "P", "P P ..." or "W P W P ..." into (prefixes, weights or None)."""
    numbers = [_number(value) for value in values]
    if all(number is None for number in numbers):
        return [value.strip() for value in values], None
    paired = len(values) % 2 == 0 and all(
        (number is None) == (i % 2 == 1) for i, number in enumerate(numbers)
    )
    if not paired:
        reason = "weights and prefixes do not alternate"
        raise DataError(
            flag, " ".join(values), reason, "Write 'W1 PREFIX1 W2 PREFIX2 ...', or prefixes only"
        )
    weights = [number for number in numbers if number is not None]
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise DataError(
            flag,
            " ".join(values),
            "a weight is not a positive number",
            "Remove that prefix, or give it a positive weight",
        )
    return [value.strip() for value in values[1::2]], weights


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, dtype=np.float64)
    return (array / array.sum()).tolist()


def samples_per_dataset(weights: Sequence[float], samples: int, surplus: float = 0.0) -> list[int]:
    """Return how many samples of each data set a blend of `samples` by normalised weights needs,
    with a margin.
    """
    return [math.ceil(math.ceil(samples * weight) * (1 + surplus)) for weight in weights]


def blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset_index int16[size], dataset_sample_index int64[size]) of a blend by normalised
    weights.

    At step t the data set that lags furthest behind its share, argmax_d of weights[d] * max(t, 1) -
    taken[d], gives its next sample; a tie goes to the lowest d (Megatron-LM,
    build_blending_indices).
    """
    share = np.array(weights, dtype=np.float64)
    host = _native.host()
    if host is not None and np.isfinite(share).all():
        return host.blend(share.tolist(), [], size)
    taken = np.zeros(len(share))
    dataset_index = np.empty(size, dtype=np.int16)
    for step in range(size):
        chosen = (share * max(step, 1) - taken).argmax()
        dataset_index[step] = chosen
        taken[chosen] += 1
    return dataset_index, _ranks(dataset_index, len(share))


def exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Blend every sample of every data set once: weights are sizes / total, an exhausted data set
    drops out.
    """
    left = np.array(sizes, dtype=np.int64)
    total = int(left.sum())
    share = left / float(total)
    host = _native.host()
    if host is not None and total:
        return host.blend(share.tolist(), left.tolist(), total)
    taken = np.where(left > 0, 0.0, np.inf)
    dataset_index = np.empty(total, dtype=np.int16)
    for step in range(total):
        chosen = (share * max(step, 1) - taken).argmax()
        dataset_index[step] = chosen
        left[chosen] -= 1
        taken[chosen] = taken[chosen] + 1 if left[chosen] else np.inf
    return dataset_index, _ranks(dataset_index, len(share))


def _ranks(dataset_index: np.ndarray, count: int) -> np.ndarray:
    """Return for each entry how many entries before it name the same data set; int64."""
    ranks = np.empty(len(dataset_index), dtype=np.int64)
    for dataset in range(count):
        places = np.flatnonzero(dataset_index == dataset)
        ranks[places] = np.arange(len(places))
    return ranks


class BlendedDataset:
    """`size` samples of `datasets` in the proportion of `weights`; size None uses every sample
    exactly once.

    An item is the item of the data set that it comes from. `path_to_cache` None keeps the indices
    in memory.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset | ChatDataset],
        weights: Sequence[float],
        size: int | None,
        path_to_cache: Path | None = None,
    ):
        assert 0 < len(datasets) == len(weights) <= MAX_DATASETS
        self.datasets = list(datasets)
        # Megatron normalises here a second time; the last bit of a weight decides ties.
        self.weights = normalized(normalized(weights))
        self.size = sum(len(dataset) for dataset in datasets) if size is None else size
        indices: Sequence[np.ndarray]
        if path_to_cache is None:
            indices = self._build(size)
        else:
            kind = f"{type(self).__name__}-{self.datasets[0].index_split}"
            names = ("dataset_index", "dataset_sample_index")
            indices = cached_arrays(
                path_to_cache, kind, self._description(size), names, build=lambda: self._build(size)
            )
        self.dataset_index, self.dataset_sample_index = indices
        self._check()

    def _build(self, size: int | None) -> tuple[np.ndarray, np.ndarray]:
        if size is None:
            return exhaustive_blending_indices([len(dataset) for dataset in self.datasets])
        return blending_indices(self.weights, size)

    def _description(self, size: int | None) -> dict[str, object]:
        datasets = [dataset.description() for dataset in self.datasets]
        return {
            "class": type(self).__name__,
            "datasets": datasets,
            "weights": self.weights,
            "size": size,
        }

    def _check(self) -> None:
        taken = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, taken.tolist(), strict=True):
            if count > len(dataset):
                reason = (
                    f"the blend takes {count} of its {len(dataset)} {dataset.index_split} samples"
                )
                raise DataError(
                    "dataset", dataset.source.prefix, reason, "Raise --mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        return self.datasets[int(self.dataset_index[index])][int(self.dataset_sample_index[index])]
