"""Samples of whole conversations, several in a row, each of which is read by itself.

A dataset of conversations is an indexed one with a sequence for each. A token that is a target, one
of the assistant's, is stored as its id, any other one as ~id, which is negative, so that nothing
reads such a file as plain text. A dataset without negative numbers has targets only.
"""

import bisect
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from ..errors import DataError
from .source_part import GPTDatasetConfig, SourcePart, TokenSource


def ids_of(stored: np.ndarray) -> np.ndarray:
    """Return the token ids of what is stored."""
    # floating-point datasets have no conversations
    return np.where(stored < 0, ~stored, stored) if stored.dtype.kind == "i" else stored


class Packing(NamedTuple):
    """Where the samples of a data set are.

    document_index: conversations in the order of rows; int64.
    sample_index:   of each row the place of its first conversation in it, and the end; int64.
    shuffle_index:  the row of each sample, a pass over all of them after another; int64.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return rows of conversations that fit together: the longest first, each into the fullest row
    that has room for it (best fit, decreasing).

    lengths:  of the conversations, in tokens; one that is longer than a row fills it.
    capacity: of a row.
    """
    rows: list[list[int]] = []
    # (room left, row), ascending
    room: list[tuple[int, int]] = []
    for conversation in np.argsort(-lengths, kind="stable").tolist():
        length = min(int(lengths[conversation]), capacity)
        if length == 0:
            continue
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            left = capacity
            row = len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(conversation)
        bisect.insort(room, (left - length, row))
    return rows


class ChatDataset(SourcePart):
    """Map-style data set of at least ``num_samples`` rows (None: one pass) of the conversations
    [first, last) of ``source``.

    Item: dict(tokens int64[s], labels int64[s], loss_mask float32[s], position_ids int64[s]), with
    positions that begin anew at each conversation. What is left of a row is one more conversation,
    without targets. A conversation that is longer than a row is cut at its end. Every pass has its
    own order of rows, drawn from the seed.

    Raises `DataError` when the range has no conversation, and on reading a token outside the
    vocabulary.
    """

    def __init__(
        self,
        source: TokenSource,
        bounds: tuple[int, int],
        num_samples: int | None,
        index_split: str,
        config: GPTDatasetConfig,
    ):
        super().__init__(source, bounds, num_samples, index_split, config=config)
        packing = Packing(*self.cached(Packing._fields, self._build))
        self.document_index, self.sample_index, self.shuffle_index = packing

    def _build(self) -> Packing:
        first, last = self.bounds
        lengths = np.asarray(self.source.sequence_lengths[first:last])
        rows = pack(lengths, self.config.sequence_length)
        wanted = len(rows) if self.num_samples is None else self.num_samples
        passes = max(1, -(-wanted // len(rows)))
        draw = np.random.default_rng(self.config.random_seed)
        order = [draw.permutation(len(rows)) for _ in range(passes)]
        return Packing(
            document_index=first + np.array([one for row in rows for one in row], dtype=np.int64),
            sample_index=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            shuffle_index=np.concatenate(order).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        length = self.config.sequence_length
        row = int(self.shuffle_index[index])
        start, stop = self.sample_index[row : row + 2].tolist()
        tokens = torch.zeros(length, dtype=torch.int64)
        labels = torch.zeros(length, dtype=torch.int64)
        loss_mask = torch.zeros(length)
        position_ids = torch.empty(length, dtype=torch.int64)
        end = 0
        for conversation in self.document_index[start:stop].tolist():
            begin = end
            ids, targets = self._conversation(conversation)
            end = begin + len(ids)
            tokens[begin:end] = ids
            # the last token of a conversation has no successor
            labels[begin : end - 1] = ids[1:]
            loss_mask[begin : end - 1] = targets[1:].float()
            position_ids[begin:end] = torch.arange(len(ids))
        position_ids[end:] = torch.arange(length - end)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": position_ids,
        }

    def _conversation(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of a conversation, int64, and which of them are targets."""
        stored = self.source.get(number, 0, None).astype(np.int64)
        stored = stored[: self.config.sequence_length]
        ids = ids_of(stored)
        if ids.size and ids.max() >= self.config.vocab_size:
            reason = (
                f"conversation {number} has token id {ids.max()}, the vocabulary ends at "
                f"{self.config.vocab_size - 1}"
            )
            remedy = "Use the --tokenizer-model of its preprocessing"
            raise DataError("dataset of conversations", self.source.prefix, reason, remedy)
        return torch.from_numpy(ids), torch.from_numpy(stored >= 0)
