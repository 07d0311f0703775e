"""Attention masks that hide nothing but padding at the end of rows, left out where they change nothing.

Under causal attention no token looks at padding behind it, and what stands at padding is no target:

    attention_mask  1  1  1  0  0        labels  -100  8  9 -100 -100
                    1  1  1  1  1                   4  5  6    7    8

Without the mask the kernels for causal attention run. That it changes neither the loss nor a gradient is shown by the
engine with the first such batch, for batches with the same entries of which at most ``REACH`` times as large a share
is masked.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..stages.traced import MASK, without_mask
from .neutral import REACH
from .padding import IGNORED, TARGETS

Batch = Mapping[str, object]


class RightMasks:
    """Leaves out the masks of training batches, and knows for which that was shown to be neutral.

    refused: why every mask stays; "": none is known. ``settle`` is collective over all ranks.
    """

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self._shown: dict[tuple[str, ...], float] = {}  # entries of a batch -> the largest share that was masked

    def propose(self, batches: Sequence[Batch], engine) -> tuple[list[Batch], int | None]:
        """The batches, without masks that may be left out, and the place of one that is to be settled before that is
        used. engine: a CapturedTrainer, or None: no mask is left out."""
        if engine is None or self.refused or not engine.is_causal:
            return list(batches), None
        shares = [_masked_share(batch) for batch in batches]
        known = [self._shown.get(_entries(batch), 0.0) for batch in batches]
        bare = [without_mask(batch) if share else batch for batch, share in zip(batches, shares, strict=True)]
        open_ = [place for place, share in enumerate(shares) if share > REACH * known[place]]
        return bare, max(open_, key=shares.__getitem__, default=None)

    def settle(self, engine, masked: Batch, bare: Batch) -> bool:
        """Try a batch both ways; a replica that has nothing to settle passes a batch twice. Returns whether that told
        anything: a step whose gradients are all zero does not."""
        found = engine.difference(bare, [masked])
        if found is None:
            return False
        if found:
            self.refused = found
        else:
            entries = _entries(masked)
            self._shown[entries] = max(self._shown.get(entries, 0.0), _masked_share(masked))
        return True


def _entries(batch: Batch) -> tuple[str, ...]:
    return tuple(sorted(name for name in batch if name != "num_items_in_batch"))


def _masked_share(batch: Batch) -> float:
    """The share of positions that the mask hides; 0 where it may not be left out: where it hides none, or others than
    the last ones of rows, or a target."""
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
