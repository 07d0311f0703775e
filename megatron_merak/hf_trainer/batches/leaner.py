"""Changes to training batches that save work and change no result, if padding stands at the end of
rows only:

    a batch                        without its mask               its rows as documents of one
    input_ids       1 2 3 0 0      input_ids  1 2 3 0 0           input_ids     1 2 3 4 5 6 7 8
                    4 5 6 7 8                 4 5 6 7 8           position_ids  0 1 2 0 1 2 3 4
    attention_mask  1 1 1 0 0
                    1 1 1 1 1

Without the mask, kernels for causal attention run: no token attends to padding after it, and
padding is no target. In one row, nothing is computed for padding at all if attention treats
documents separately.

The engine computes the first changed batch both ways: the loss and every gradient must stay the
same. The trial is taken to hold for batches with the same entries whose masked share is at most
``REACH`` times as large. Two kinds of batches have trials of their own: those with rows that begin
with a target, and those with more tokens than a row of the model may have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...stages.traced import MASK, without_mask
from .neutral import REACH
from .padding import IGNORED, TARGETS

Batch = Mapping[str, Any]
# tokens of one row: the mask that separates its documents has a byte for each pair of tokens
LONGEST = 8192


@dataclass
class Leaner:
    """Makes a change to batches, and knows for which batches a trial showed it to be neutral.

    change:  of a batch.
    fits:    (batch, engine) -> whether the change is possible and saves work.
    refused: why no batch is changed; "" if no reason is known.
    limit:   tokens of the longest row that the model takes; None: any.

    ``settle`` is collective over all ranks.
    """

    change: Callable[[Batch], Batch]
    fits: Callable[[Batch, Any], bool]
    refused: str = ""
    limit: int | None = None
    # kind of batch -> the largest share that was masked
    _shown: dict[tuple, float] = field(default_factory=dict)

    def propose(self, batches: Sequence[Batch], engine: Any) -> tuple[list[Batch], int | None]:
        """Return the batches, changed where possible, and the index of one whose change has to be
        settled first.

        engine: a CapturedModel; None: nothing is changed.
        """
        if engine is None or self.refused or not engine.is_causal:
            return list(batches), None
        shares = [masked_share(batch) for batch in batches]
        spared = [
            bool(share) and self.fits(batch, engine)
            for batch, share in zip(batches, shares, strict=True)
        ]
        known = [
            self._known(batch) if fits else 0.0 for batch, fits in zip(batches, spared, strict=True)
        ]
        changed = [
            self.change(batch) if fits else batch
            for batch, fits in zip(batches, spared, strict=True)
        ]
        open_ = [
            place
            for place, share in enumerate(shares)
            if spared[place] and share > REACH * known[place]
        ]
        return changed, max(open_, key=shares.__getitem__, default=None)

    def settle(self, engine: Any, batch: Batch, changed: Batch) -> bool:
        """Compute a batch both ways and record whether they agree.

        A replica with nothing to settle passes a batch twice. Returns whether the trial told
        anything: a step whose gradients are all zero does not.
        """
        mismatch = engine.difference(changed, [batch])
        if mismatch is None:
            return False
        if mismatch:
            self.refused = mismatch
        elif changed is not batch:
            kind = self._kind(batch)
            self._shown[kind] = max(self._shown.get(kind, 0.0), masked_share(batch))
        return True

    def _known(self, batch: Batch) -> float:
        entries, begins, long = self._kind(batch)
        return max(self._shown.get((entries, each, long), 0.0) for each in (begins, True))

    def _kind(self, batch: Batch) -> tuple[tuple[str, ...], bool, bool]:
        """Return a batch's entries, whether a row begins with a target, and whether it has more
        tokens than a row may have.
        """
        entries = tuple(sorted(name for name in batch if name != "num_items_in_batch"))
        begins = "labels" in batch and bool((batch["labels"][:, 0] != IGNORED).any())
        return entries, begins, self.limit is not None and int(batch[MASK].sum()) > self.limit


def without_masks(refused: str = "") -> Leaner:
    """Return the change that removes masks."""
    return Leaner(without_mask, lambda batch, engine: True, refused)


def in_one_row(refused: str = "", limit: int | None = None) -> Leaner:
    """Return the change that makes one row of a batch, where the engine attends by document: on
    CPUs.
    """
    return Leaner(as_documents, _fits_one_row, refused, limit)


def as_documents(batch: Batch) -> Batch:
    """Concatenate the rows of a batch, without masked positions, into one row.

    The first token of a row is no target: nothing before it belongs to its document.
    """
    shown = batch[MASK].bool()
    changed = dict(without_mask(batch))
    for name, value in changed.items():
        if isinstance(value, Tensor) and value.shape == shown.shape:
            if name == "labels":
                value = torch.cat((torch.full_like(value[:, :1], IGNORED), value[:, 1:]), 1)
            changed[name] = value[shown][None]
    places = torch.arange(shown.shape[1], device=shown.device).expand_as(shown)
    return changed | {"position_ids": places[shown][None]}


def in_rows(value: Tensor, mask: Tensor) -> Tensor:
    """Undo ``as_documents`` for values per token, [1, n or more] -> [rows, length]; 0 at padding.

    mask: the batch's, [rows, length]. Other tensors are returned as they are.
    """
    if value.dim() < 2 or value.shape[0] != 1:
        return value
    shown = mask.to(value.device).bool()
    rows = value.new_zeros(*shown.shape, *value.shape[2:])
    rows[shown] = value[0, : int(shown.sum())]
    return rows


def _fits_one_row(batch: Batch, engine: Any) -> bool:
    mask = batch[MASK]
    halves = engine.plan.overlap == "sub-pipeline"
    if engine.mesh.device.type != "cpu" or halves or int(mask.sum()) > LONGEST:
        return False
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    return (
        "labels" in batch
        and "position_ids" not in batch
        and all(value.shape == mask.shape for value in tensors)
    )


def masked_share(batch: Batch) -> float:
    """Return the masked share of positions.

    0 if nothing is masked, or if positions other than the last ones of rows, a target, or an entire
    row are masked.
    """
    mask = batch.get(MASK)
    targets = [batch[name] for name in TARGETS if isinstance(batch.get(name), Tensor)]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not targets:
        return 0.0
    hidden = mask == 0
    if not hidden.any() or hidden[:, 0].any():
        return 0.0
    if not ((mask == 1) | hidden).all() or not (hidden[:, 1:] >= hidden[:, :-1]).all():
        return 0.0
    if any(target.shape != mask.shape or (target[hidden] != IGNORED).any() for target in targets):
        return 0.0
    return float(hidden.float().mean())
