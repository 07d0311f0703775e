"""What a contestant gives to the worker."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Runner:
    """One rank of a contestant, built and ready.

    step(tokens): one optimizer step over the global batch `tokens`, int64 [micro_batches *
    micro_batch, sequence + 1];
        a sequence's inputs are [:-1], its labels [1:]. Every rank is given the whole batch and
        takes its part. Returns the mean loss of the global batch before the update, or None on a
        rank that does not know it; rank world_size - 1 must know it.
    notes: what the JSON file should say about this contestant (choices made, probes taken). JSON
           values only.
    """

    step: Callable[[torch.Tensor], float | None]
    notes: dict[str, object]
