"""A part of a file of tokens, from which a data set makes its samples."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import DataError
from .gpt_index import Indices
from .index_cache import cached_arrays


class TokenSource(Protocol):
    """What a GPTDataset reads: an IndexedDataset, or generated tokens."""

    prefix: str
    sequence_lengths: np.ndarray

    def __len__(self) -> int: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class GPTDatasetConfig:
    """What the samples of every split and every file of a run share.

    `pad` fills up a partial sample and is masked wherever it is a label; -1 is no token and masks
    nothing else. `masked_eod`, an end-of-document id, is left out of the loss where it is an input.
    `path_to_cache` None keeps the indices in memory.
    """

    sequence_length: int
    random_seed: int
    vocab_size: int
    pad: int = -1
    masked_eod: int | None = None
    path_to_cache: Path | None = None
    drop_last_partial_sequence: bool = True


class SourcePart(ABC):
    """The sequences [first, last) of ``source``, and the order of the samples made of them.

    num_samples: at least so many; None: one pass.
    index_split: the name of the part.

    Raises `DataError` when the range holds no token.
    """

    def __init__(
        self,
        source: TokenSource,
        bounds: tuple[int, int],
        num_samples: int | None,
        index_split: str,
        config: GPTDatasetConfig,
    ):
        self.source = source
        self.bounds = bounds
        self.num_samples = num_samples
        self.config = config
        self.index_split = index_split
        first, last = bounds
        if not source.sequence_lengths[first:last].any():
            reason = (
                f"its {index_split} part, sequences [{first}, {last}) of {len(source)}, has "
                "no tokens"
            )
            raise DataError(
                "dataset", source.prefix, reason, "Change --split, or give a larger dataset"
            )
        self.document_index, self.sample_index, self.shuffle_index = self._indices()

    def __reduce__(self) -> tuple:
        """Pickle what rebuilds it, for the worker processes of a loader; they map cached
        indices.
        """
        return type(self), (
            self.source,
            self.bounds,
            self.num_samples,
            self.index_split,
            self.config,
        )

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def description(self) -> dict[str, object]:
        """Return everything that the indices depend on, JSON-safe."""
        return {
            "class": type(self).__name__,
            "dataset_path": self.source.prefix,
            "fingerprint": self.source.fingerprint(),
            "index_split": self.index_split,
            "bounds": list(self.bounds),
            "num_samples": self.num_samples,
            "sequence_length": self.config.sequence_length,
            "random_seed": self.config.random_seed,
        }

    @abstractmethod
    def build(self) -> Indices:
        """Return where the samples are."""

    def _indices(self) -> Indices:
        directory = self.config.path_to_cache
        if directory is None:
            return self.build()
        kind = f"{type(self).__name__}-{self.index_split}"
        arrays = cached_arrays(
            directory, kind, self.description(), Indices._fields, build=self.build
        )
        return Indices(*arrays)
