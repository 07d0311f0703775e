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

from ..data.loader import Dataset, stack
from ..models.targets import IGNORED, targets


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


def shared_samples(dataset: Dataset, count: int, most: int = 1000) -> dict[str, Tensor] | None:
    """Return ``count`` samples of which two documents are kept, with targets in the second; None
    where the first ``most`` samples have none such.
    """
    found: list[Mapping[str, Tensor]] = []
    for index in range(min(len(dataset), most)):
        sample = dataset[index]
        starts = _starts(sample)
        if len(starts) > 2 and sample["loss_mask"][starts[1] : starts[2]].any():
            found.append(_cut(sample, 0, starts[2]))
        if len(found) == count:
            break
    return stack((found * count)[:count]) if found else None


def documents_alone(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return of samples with two documents: the first of each, and the second of each."""
    firsts = []
    seconds = []
    for row in range(len(batch["tokens"])):
        sample = {name: values[row] for name, values in batch.items()}
        _, begin, end, *_ = _starts(sample)
        firsts.append(_cut(sample, 0, begin))
        seconds.append(_cut(sample, begin, end))
    return [stack(firsts), stack(seconds)]


def _starts(sample: Mapping[str, Tensor]) -> list[int]:
    """Where documents begin, and the end of the sample."""
    positions = sample["position_ids"]
    return [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]


def _cut(sample: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """Return the positions [begin, end) of a sample at its beginning, and behind them a document
    without targets.
    """
    cut = {name: torch.zeros_like(value) for name, value in sample.items()}
    for name, value in sample.items():
        cut[name][: end - begin] = value[begin:end]
    rest = len(sample["tokens"]) - (end - begin)
    cut["position_ids"][end - begin :] = torch.arange(rest)
    return cut
