"""What is wrong with an indexed dataset, by place."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ..errors import DataError
from .chat_dataset import ids_of
from .indexed_dataset import CHUNK, IndexedDataset, data_path
from .prefixes import check_dataset

MOST = 20  # faults that are named


def faults(prefix: str, vocab_size: int | None, chat: bool = False) -> list[str]:
    """Return what is wrong, at most `MOST` places; nothing: it is sound.

    vocab_size: ids are to be below it; None: they are to be no less than 0.
    chat:       whether it has conversations.
    """
    try:
        check_dataset(prefix, "PREFIX")
        dataset = IndexedDataset(prefix)
    except DataError as error:
        return [str(error)]
    return list(islice(_faults(dataset, vocab_size, chat), MOST))


def _faults(dataset: IndexedDataset, vocab_size: int | None, chat: bool) -> Iterator[str]:
    item = dataset.dtype.itemsize
    size = data_path(dataset.prefix).stat().st_size
    end = 0
    for start in range(0, len(dataset), CHUNK):
        lengths = dataset.sequence_lengths[start : start + CHUNK].astype(np.int64)
        pointers = dataset.sequence_pointers[start : start + CHUNK]
        ends = pointers + lengths * item
        before = np.concatenate([[end], ends[:-1]])
        for at in np.flatnonzero(pointers != before):
            yield (
                f"sequence {start + at} begins at byte {pointers[at]}, and the one before it ends "
                f"at byte {before[at]}"
            )
        end = int(ends[-1])
    if end != size:
        yield f"{data_path(dataset.prefix).name} has {size} bytes, and its sequences end at {end}"
    yield from _wrong_ids(dataset, vocab_size, chat)


def _wrong_ids(dataset: IndexedDataset, vocab_size: int | None, chat: bool) -> Iterator[str]:
    most = np.iinfo(dataset.dtype).max if vocab_size is None else vocab_size - 1
    documents = dataset.document_indices
    for number in range(len(dataset)):
        ids = dataset[number]
        assert isinstance(ids, np.ndarray), "one sequence"
        ids = ids_of(ids) if chat else ids
        if not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) <= most:
            continue
        at = int(np.flatnonzero((ids < 0) | (ids > most))[0])
        document = int(np.searchsorted(documents, number, "right")) - 1
        byte = int(dataset.sequence_pointers[number]) + at * dataset.dtype.itemsize
        limit = (
            "is below 0 (conversations are checked with --chat)"
            if ids[at] < 0
            else f"is not below {vocab_size}"
        )
        yield (
            f"token {at} of sequence {number}, in document {document}, at byte {byte}: "
            f"id {ids[at]} {limit}"
        )
