"""Samples of whole conversations, several in a row, each of which is read by itself.

A dataset of conversations is an indexed one with a sequence for each. A token that is a target, one
of the assistant's, is stored as its id, any other one as ~id, which is negative, so that nothing
reads such a file as plain text. A dataset without negative numbers has targets only.
"""

import bisect
from collections.abc import Mapping

import numpy as np
import torch

from ..errors import DataError
from .gpt_index import Indices
from .source_part import SourcePart


def ids_of(stored: np.ndarray) -> np.ndarray:
    """Return the token ids of what is stored."""
    # floating-point datasets have no conversations
    return np.where(stored < 0, ~stored, stored) if stored.dtype.kind == "i" else stored


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return rows of conversations that fit together: the longest first, each into the fullest row
    that has room for it (best fit, decreasing).

    lengths:  of the conversations, in tokens; one that is longer than a row fills it.
    capacity: of a row.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # that rows have left, ascending, each once
    with_room: dict[int, list[int]] = {}
    for conversation in np.argsort(-lengths, kind="stable").tolist():
        length = min(int(lengths[conversation]), capacity)
        if length == 0:
            continue
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            room = capacity
            row = len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows[row].append(conversation)
        left = room - length
        if left and left not in with_room:
            bisect.insort(rooms, left)
        if left:
            with_room.setdefault(left, []).append(row)
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

    def build(self) -> Indices:
        first, last = self.bounds
        lengths = np.asarray(self.source.sequence_lengths[first:last])
        rows = pack(lengths, self.config.sequence_length)
        wanted = len(rows) if self.num_samples is None else self.num_samples
        passes = max(1, -(-wanted // len(rows)))
        draw = np.random.default_rng(self.config.random_seed)
        order = [draw.permutation(len(rows)) for _ in range(passes)]
        return Indices(
            document_index=first + np.concatenate(rows).astype(np.int64),
            sample_index=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            shuffle_index=np.concatenate(order).astype(np.int64),
        )

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
