"""What is in an indexed dataset."""

from typing import Any

import numpy as np

from .chat_dataset import ids_of
from .indexed_dataset import CHUNK, IndexedDataset

SHOWN = 200  # tokens of the first document


def dataset_facts(dataset: IndexedDataset) -> dict[str, Any]:
    """Return its numbers; ``lengths`` has (least, most, how many) of sequences, by powers of 2."""
    lengths = dataset.sequence_lengths
    tokens = sum(
        int(lengths[start : start + CHUNK].sum(dtype=np.int64))
        for start in range(0, len(lengths), CHUNK)
    )
    return {
        "documents": len(dataset.document_indices) - 1,
        "sequences": len(dataset),
        "tokens": tokens,
        "dtype": dataset.dtype.name,
        "bytes": tokens * dataset.dtype.itemsize,
        "lengths": _histogram(lengths),
        "first_document": first_document(dataset)[:SHOWN],
    }


def first_document(dataset: IndexedDataset) -> list[int]:
    """Return the ids of the first document that has some; those of a conversation, too."""
    ids = next((dataset[number] for number in range(len(dataset)) if len(dataset[number])), [])
    return ids_of(np.asarray(ids[:SHOWN])).tolist()


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    powers = np.zeros(33, np.int64)
    for start in range(0, len(lengths), CHUNK):
        # 0 stays 0, 1 becomes 1, 2 and 3 become 2, and so on
        exponents = np.frexp(lengths[start : start + CHUNK].astype(np.float64))[1]
        powers += np.bincount(exponents, minlength=33)
    return [
        (2**power // 2, max(2**power - 1, 0), int(count))
        for power, count in enumerate(powers)
        if count
    ]
