"""From samples of GPT data sets to batches of a HuggingFace causal language model, with the same
targets.

Data sets shift labels: label t is token t + 1. Models take labels in one of three ways:

    - "shifted": the loss takes labels that are already shifted, as a separate argument;
    - "longer": the loss shifts labels itself, so the model gets one more token, which has no
      target;
    - "plain": the loss compares position t with label t (decoders of encoder-decoder models).

    shifted   input_ids  t0 t1 .. ts-1       shift_labels   t1 t2 .. ts
    longer    input_ids  t0 t1 .. ts-1 ts    labels         -100 t1 t2 .. ts
    plain     input_ids  t0 t1 .. ts-1       labels         t1 t2 .. ts
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # a label that is left out of the loss


def targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token that follows each position, int64[b, s]; ``IGNORED`` where the loss mask is
    0.
    """
    return batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)


def token_count(batch: Mapping[str, Tensor]) -> int:
    """Return the number of targets of a batch that count."""
    return int((batch["loss_mask"] != 0).sum())


@dataclass(frozen=True)
class TokenBatches:
    """Makes a model's batches.

    way:    "shifted", "longer" or "plain".
    packed: whether samples have several documents, which positions tell apart.
    """

    way: str = "shifted"
    packed: bool = False

    @property
    def more(self) -> int:
        """Number of tokens that the model gets beside those of a sample."""
        return int(self.way == "longer")

    def __call__(
        self, batch: Mapping[str, Tensor], num_items: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the model's batch. num_items: float, [], by which the sum of losses is divided
        instead of the number of targets.
        """
        tokens = batch["tokens"]
        labels = targets(batch)
        prepared = {"input_ids": tokens, "labels": labels}
        if self.way == "shifted":
            prepared["shift_labels"] = labels
        elif self.way == "longer":
            first = torch.full_like(labels[:, :1], IGNORED)
            prepared = {
                "input_ids": torch.cat([tokens, batch["labels"][:, -1:]], 1),
                "labels": torch.cat([first, labels], 1),
            }
        if self.packed:
            prepared["position_ids"] = self._positions(batch["position_ids"])
        return prepared if num_items is None else prepared | {"num_items_in_batch": num_items}

    def _positions(self, positions: Tensor) -> Tensor:
        """Return the positions of the model's tokens: one behind a sample begins a document."""
        return torch.cat([positions, positions.new_zeros(len(positions), self.more)], 1)

    def example(self, samples: int, length: int, num_items: bool = False) -> dict[str, Tensor]:
        """Return a batch of ``samples`` sequences of ``length`` tokens, of which only the shapes
        matter.
        """
        tokens = torch.zeros(samples, length, dtype=torch.long)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(samples, length)}
        if self.packed:
            batch["position_ids"] = torch.arange(length).expand(samples, -1)
        return self(batch, torch.tensor(1.0) if num_items else None)
