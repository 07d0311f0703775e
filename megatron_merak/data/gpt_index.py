"""Which tokens form sample i: Megatron's document, sample and shuffle indices, as pure functions of
numpy arrays.

Random numbers come from `numpy.random.RandomState`, whose stream is frozen, in the order in which
Megatron-LM (megatron/core/datasets/gpt_dataset.py) draws them, so that equal inputs give bit-equal
indices. `csrc/py/indices.cpp` has the compiled loops; the NumPy code here computes the same bits.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import _native

SPLITS = ("train", "valid", "test")
# Longest array whose places RandomState draws from 32 bits; beyond that it is left to NumPy.
_SHUFFLED_HERE = 2**32
_MOST_THREADS = 16


class Indices(NamedTuple):
    """`document_index` int32[E * documents] ids in reading order; `sample_index` [N + 1, 2] of
    (position in document_index, token offset), int32 (int64 when positions need it);
    `shuffle_index` uint32[N] (int64 from 2**32 - 2 samples): item i is sample shuffle_index[i]."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


class Epochs(NamedTuple):
    """How often a split is read.

    passes:    their number.
    sans_last: number of samples of all passes but the last, if that one is shuffled separately;
               else None.
    """

    passes: int
    sans_last: int | None


def split_bounds(weights: Sequence[float], sequences: int) -> list[tuple[int, int] | None]:
    """Cut [0, sequences) by the `--split` weights of train, valid and test; None for a weight of
    zero.
    """
    assert len(weights) == len(SPLITS) and sum(weights) > 0
    bounds: list[tuple[int, int] | None] = []
    start = 0.0
    for fraction in (np.array(weights, dtype=np.float64) / sum(weights)).tolist():
        stop = start + fraction
        cut = int(round(start * float(sequences))), int(round(stop * float(sequences)))
        bounds.append(cut if stop > start else None)
        start = stop
    return bounds


def count_epochs(tokens_per_epoch: int, num_samples: int | None, sequence_length: int) -> Epochs:
    """Return the fewest passes that give `num_samples` samples (None: one pass).

    The last pass is shuffled separately if less than 80 % of it is needed, so that its samples come
    last and no document is seen more than one time too often.
    """
    if num_samples is None:
        return Epochs(1, None)
    tokens = num_samples * sequence_length + 1
    count = max(1, -(-tokens // tokens_per_epoch))
    if count == 1:
        return Epochs(1, None)
    sans_last = ((count - 1) * tokens_per_epoch - 1) // sequence_length
    per_epoch = (tokens_per_epoch - 1) // sequence_length
    separate = num_samples - sans_last < int(0.8 * per_epoch)
    return Epochs(count, sans_last if separate else None)


def shuffle(items: np.ndarray, random: np.random.RandomState) -> None:
    """Do `random.shuffle(items)` in place, with the same draws. `items`: one contiguous
    dimension.
    """
    host = _native.host()
    if host is None or items.itemsize not in (4, 8) or len(items) > _SHUFFLED_HERE:
        random.shuffle(items)
        return
    name, words, position, *others = random.get_state()
    position = host.shuffle(items, words, position)
    random.set_state((name, words, position, *others))


def document_order(
    documents: np.ndarray, epochs: Epochs, random: np.random.RandomState
) -> np.ndarray:
    """int32[E * documents]: the passes shuffled together, or all but the last together and then the
    last.
    """
    counts = [epochs.passes] if epochs.sans_last is None else [epochs.passes - 1, 1]
    order = np.tile(documents.astype(np.int32), epochs.passes)
    for part in np.split(order, [len(documents) * counts[0]]):
        shuffle(part, random)
    return order


def count_tokens(sequence_lengths: np.ndarray, documents: np.ndarray) -> int:
    """Return the number of tokens of `documents`, ids into `sequence_lengths`."""
    host = _native.host()
    if host is None:
        return int(sequence_lengths[documents].sum(dtype=np.int64))
    return host.count_tokens(_full(sequence_lengths), _full(documents), _threads())


def sample_starts(
    sequence_lengths: np.ndarray,
    documents: np.ndarray,
    sequence_length: int,
    drop_last: bool = True,
) -> np.ndarray:
    """[N + 1, 2] (position, offset): where each sample starts in `documents`, ids into
    `sequence_lengths`, in order.

    Samples are packed greedily with one extra token, the label of the last position, which is also
    the first token of the next sample: sample k starts at token k * sequence_length of the stream,
    in the first document that reaches beyond it. N = (tokens - 1) // sequence_length, or the
    ceiling with `drop_last=False`.
    """
    host = _native.host()
    if host is not None:
        lengths = _full(sequence_lengths)
        order = _full(documents)
        return host.sample_starts(lengths, order, sequence_length, drop_last, _threads())
    lengths = sequence_lengths[documents]
    ends = np.cumsum(lengths, dtype=np.int64)
    extent = int(ends[-1]) - 1
    samples = extent // sequence_length if drop_last else -(-extent // sequence_length)
    tokens = np.minimum(np.arange(samples + 1, dtype=np.int64) * sequence_length, extent)
    positions = np.searchsorted(ends, tokens, side="right")
    offsets = tokens - (ends[positions] - lengths[positions])
    # Megatron's first row names the first document even if that one is empty.
    positions[0] = offsets[0] = 0
    dtype = (
        np.int32 if max(len(lengths), int(lengths.max())) <= np.iinfo(np.int32).max else np.int64
    )
    return np.stack([positions, offsets], axis=1).astype(dtype)


def _full(values: np.ndarray) -> np.ndarray:
    """Return the array contiguous, as int32 or int64."""
    return np.ascontiguousarray(
        values if values.dtype in (np.int32, np.int64) else values.astype(np.int64)
    )


def _threads() -> int:
    """Return the number of this process's cores, up to where memory is the limit."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, _MOST_THREADS)


def sample_order(samples: int, epochs: Epochs, random: np.random.RandomState) -> np.ndarray:
    """A permutation of the samples, or of those before the separate last pass followed by one of
    the rest.
    """
    dtype = np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(samples, dtype=dtype)
    for part in np.split(order, [samples if epochs.sans_last is None else epochs.sans_last]):
        shuffle(part, random)
    return order


def build_indices(
    sequence_lengths: np.ndarray,
    documents: np.ndarray,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    drop_last: bool = True,
) -> Indices:
    """The three indices of the split `documents` (ids into `sequence_lengths`, which holds at least
    one token).
    """
    tokens_per_epoch = count_tokens(sequence_lengths, documents)
    assert tokens_per_epoch > 0, "an empty split has no indices"
    epochs = count_epochs(tokens_per_epoch, num_samples, sequence_length)
    random = np.random.RandomState(seed)
    document_index = document_order(documents, epochs, random)
    sample_index = sample_starts(sequence_lengths, document_index, sequence_length, drop_last)
    return Indices(
        document_index, sample_index, sample_order(len(sample_index) - 1, epochs, random)
    )
