"""Packed rows: several documents in one row with their own positions; no token attends to another
document.

    position_ids   0  1  2  0  1  0  1  2        cu_seq_lens_q   0  3  5  8

A captured model masks attention by positions, like sdpa and eager attention of transformers. Its
flash attention uses ``cu_seq_lens_q`` if present: a batch in which the two disagree is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")


def starts(positions: Tensor) -> list[int]:
    """Return where documents begin in one row of positions, [length]."""
    begins = torch.cat((positions.new_ones(1, dtype=torch.bool), positions.diff() != 1))
    return begins.nonzero().flatten().tolist()


def check_documents(batches: Sequence[Mapping[str, object]], flash: bool) -> None:
    """Raise DataError for a batch whose documents differ for flash attention of transformers.

    flash: whether the model requests it.
    """
    for batch in batches if flash else ():
        _check(batch, batch.get("position_ids"))


def _check(batch: Mapping[str, Any], positions: Any) -> None:
    names = [name for name in LENGTHS if isinstance(batch.get(name), Tensor)]
    remedy = "Return position_ids from the collator that restart at each document, in one row"
    known = isinstance(positions, Tensor) and positions.dim() == 2
    for name in names:
        if not known or len(positions) != 1:
            reason = (
                "flash attention separates documents by it, but a captured model by "
                "position_ids of one row"
            )
            raise DataError("batch entry", name, reason, remedy)
        if batch[name].tolist() != [*starts(positions[0]), positions.shape[1]]:
            raise DataError(
                "batch entry", name, "its documents differ from those of position_ids", remedy
            )
    if not names and known and len(positions) > 1 and batch.get("attention_mask") is None:
        if any(len(starts(row)) > 1 for row in positions):
            reason = "flash attention supports packed documents only in a batch of one row"
            raise DataError("batch entry", "position_ids", reason, remedy)
