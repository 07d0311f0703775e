"""Generated documents, for runs that measure or test and need no file."""

import numpy as np

DOCUMENTS = 10_000
MAX_LENGTH = 2048


class MockIndexedDataset:
    """A source of `DOCUMENTS` documents of 2 to `MAX_LENGTH` tokens, the last one `eod`.

    Document d counts upwards modulo the vocabulary from a start and with a stride that depend on d,
    so that a model can learn it, and any part of it can be computed separately. Equal in every
    process.
    """

    def __init__(self, vocab_size: int, eod: int):
        assert vocab_size >= 2 and 0 <= eod < vocab_size
        self.prefix = "--mock-data"
        self.vocab_size = vocab_size
        self.eod = eod
        self.sequence_lengths = (_scattered(np.arange(DOCUMENTS)) % (MAX_LENGTH - 1) + 2).astype(
            np.int32
        )

    def __len__(self) -> int:
        return DOCUMENTS

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        total = int(self.sequence_lengths[index])
        stop = total if length is None else offset + length
        start, stride = _scattered(np.array([index + 1, ~index])).tolist()
        ids = (start + np.arange(offset, stop) * (1 + stride % 7)) % (self.vocab_size - 1)
        ids += ids >= self.eod
        if stop == total:
            ids[total - 1 - offset :] = self.eod
        return ids

    def fingerprint(self) -> str:
        return f"mock-{self.vocab_size}-{self.eod}"


def _scattered(numbers: np.ndarray) -> np.ndarray:
    """Knuth's multiplicative hash: 31-bit integers, int64."""
    return (numbers.astype(np.int64) * 2654435761 & 0xFFFFFFFF) >> 1
