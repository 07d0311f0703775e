"""Samples of a fixed length from a stream of shuffled documents."""

from collections.abc import Mapping

import numpy as np
import torch

from ..errors import DataError
from .gpt_index import Indices, build_indices
from .source_part import GPTDatasetConfig, SourcePart


class GPTDataset(SourcePart):
    """Map-style data set of at least `num_samples` samples (None: one pass) from sequences [first,
    last) of `source`.

    Item: dict(tokens int64[s], labels int64[s], loss_mask float32[s], position_ids int64[s]),
    labels being tokens
    shifted by one. The rules of order and packing are those of `gpt_index`. Raises `DataError` when
    the range holds no token, and on reading a token outside the vocabulary.
    """

    def description(self) -> dict[str, object]:
        """Return everything that the indices depend on, JSON-safe."""
        drop_last = self.config.drop_last_partial_sequence
        return super().description() | {"drop_last_partial_sequence": drop_last}

    def build(self) -> Indices:
        config = self.config
        documents = np.arange(*self.bounds, dtype=np.int32)
        return build_indices(
            self.source.sequence_lengths,
            documents,
            self.num_samples,
            config.sequence_length,
            seed=config.random_seed,
            drop_last=config.drop_last_partial_sequence,
        )

    def tokens(self, index: int) -> np.ndarray:
        """Return the sequence_length + 1 token ids of item `index`, int64, padded."""
        sample = int(self.shuffle_index[index])
        (first, begin), (last, end) = self.sample_index[sample : sample + 2].tolist()
        parts = []
        for position in range(first, last + 1):
            document = int(self.document_index[position])
            start = begin if position == first else 0
            stop = end + 1 if position == last else int(self.source.sequence_lengths[document])
            parts.append(self._checked(document, self.source.get(document, start, stop - start)))
        text = np.full(self.config.sequence_length + 1, self.config.pad, dtype=np.int64)
        joined = np.concatenate(parts)
        text[: len(joined)] = joined
        return text

    def _checked(self, document: int, tokens: np.ndarray) -> np.ndarray:
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab_size:
            reason = (
                f"document {document} holds token ids from {tokens.min()} to {tokens.max()}, the "
                "vocabulary ends at "
                f"{self.config.vocab_size - 1}"
            )
            remedy = "Use the --tokenizer-model of its preprocessing"
            if tokens.min() < 0:
                remedy = "If it has conversations, add --sft to merak-pretrain-hf"
            raise DataError("dataset", self.source.prefix, reason, remedy)
        return tokens

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        return sample_of(torch.from_numpy(self.tokens(index)), self.config)


def sample_of(text: torch.Tensor, config: GPTDatasetConfig) -> Mapping[str, torch.Tensor]:
    """Return the item of a data set that is made of the sequence_length + 1 token ids of a sample."""
    tokens = text[:-1].clone()
    labels = text[1:].clone()
    loss_mask = (labels != config.pad).float()
    if config.masked_eod is not None:
        loss_mask[tokens == config.masked_eod] = 0.0
    tokens[tokens == config.pad] = 0
    labels[labels == config.pad] = 0
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": torch.arange(config.sequence_length),
    }
