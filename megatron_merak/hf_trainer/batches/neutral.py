"""Padding that changed no result in a trial; all other batches stay as they are.

The first batch that padding would lengthen is computed both ways. In training, the loss and every gradient must agree.
In evaluation, every output must agree without the added positions; the shapes show on which axis these are:

    input 20 -> 24     logits [4, 20, 64] -> [4, 24, 64]: axis 1 is cropped     scores [4, 24] -> [4, 24]: none is

The trial is taken to hold for batches with the same entries whose relative padding is at most ``REACH`` times as large.
Batches with rows in which masked positions precede others have trials of their own: such a position attends to
nothing, which some code makes an average of the row, padding included, and the loss reads the last one of them.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DataError, MerakError
from ...parallel.agree import gather_json, together
from ...parallel.mesh import Mesh
from ...stages.blueprint import ModelTask
from ...stages.traced import OwnLoss
from ...stages.trials import outputs_differ
from .padding import Padding

Batch = Mapping[str, Any]
# of each output, its axes that padding lengthens, by what it lengthens
Axes = dict[str, dict[int, str]]
REACH = 4
WIDE = 8  # a trial in training pads by about this share of a length
TRAINING = ("training",)


class NeutralPadding:
    """Pads batches as ``padding`` does where a trial showed that to be neutral.

    loss: computes the outputs of evaluations; None: the model does.

    A purpose is TRAINING or the names of the outputs of an evaluation. ``settle`` is collective
    over all ranks, ``anywhere`` over the replicas.
    """

    def __init__(self, padding: Padding, mesh: Mesh, loss: OwnLoss | None = None):
        self.padding = padding
        self.mesh = mesh
        self.loss = loss
        self.refused: dict[tuple, str] = {}  # purpose -> why nothing is padded for it
        self._reach: dict[tuple, float] = {}
        self._axes: dict[tuple, Axes] = {}

    def propose(self, batches: Sequence[Batch], purpose: tuple) -> tuple[list[Any], int | None]:
        """Return the batches, padded where possible, and the index of one that has to be settled
        first.

        Raises DataError for a batch that is longer than the largest bucket.
        """
        if purpose in self.refused or not self.padding.active:
            return list(batches), None
        padded = [self._padded(batch, purpose) for batch in batches]
        growth = [self._growth(*pair) for pair in zip(batches, padded, strict=True)]
        known = [
            self._reach.get(self._key(purpose, *pair), 0.0)
            for pair in zip(batches, padded, strict=True)
        ]
        open_ = [place for place, more in enumerate(growth) if more > REACH * known[place]]
        return padded, max(open_, key=growth.__getitem__, default=None)

    def _padded(self, batch: Batch, purpose: tuple) -> Batch:
        reason = self.padding.unfit(batch)
        if reason:
            self._say("such batches", reason)
            return batch
        padded = self.padding(batch)
        moved = [*self._moved(batch, padded).values()]
        unambiguous = purpose == TRAINING or len(moved) == len({*moved})
        unambiguous = unambiguous or self._key(purpose, batch, padded) in self._axes
        return padded if unambiguous else batch  # an axis of an output could be either's

    def _moved(self, plain: Batch, padded: Batch) -> dict[str, tuple[int, int]]:
        """Return the lengths before and after of everything that padding lengthens, by name."""
        before = self.padding.lengths(plain)
        after = self.padding.lengths(padded)
        return {name: (before[name], after[name]) for name in before if after[name] > before[name]}

    def _growth(self, plain: Batch, padded: Batch) -> float:
        return max(
            (after / before - 1 for before, after in self._moved(plain, padded).values()),
            default=0.0,
        )

    def _key(self, purpose: tuple, plain: Batch, padded: Batch) -> tuple:
        names = tuple(sorted(name for name in plain if name != "num_items_in_batch"))
        return purpose, names, tuple(self._moved(plain, padded)), _hides_before_shown(plain)

    def anywhere(self, here: bool) -> bool:
        """Whether ``here`` is true on any replica, if anything may be padded. Collective over
        replicas.
        """
        if self.mesh.dp is None or not self.padding.active:
            return here
        count = torch.tensor([int(here)], device=self.mesh.device)
        dist.all_reduce(count, group=self.mesh.dp)
        return bool(count.item())

    def settle(self, engine, plain: Batch | None, padded: Batch | None, purpose: tuple) -> bool:
        """Compute a batch both ways and record whether they agree.

        A replica with nothing to settle passes a batch twice, or None in evaluation. Returns
        whether the trial told
        anything: a step whose gradients are all zero does not.
        """
        axes: Axes = {}
        if plain is None or padded is None:
            mismatch, axes = self._compare_outputs(engine, None, purpose)
        elif purpose == TRAINING:
            padded = self._widely(plain, padded)
            mismatch = engine.difference(padded, [plain])
        else:
            mismatch, axes = self._compare_outputs(engine, (plain, padded), purpose)
        if mismatch is None:
            return False
        if mismatch:
            self.refused[purpose] = mismatch
            self._say("training batches" if purpose == TRAINING else "evaluation batches", mismatch)
        elif plain is not None and padded is not None and (growth := self._growth(plain, padded)):
            key = self._key(purpose, plain, padded)
            self._reach[key], self._axes[key] = max(growth, self._reach.get(key, 0.0)), axes
        return True

    def _widely(self, plain: Batch, padded: Batch) -> Batch:
        """Pad a batch of one length so much that the trial holds for others."""
        lengths = self.padding.lengths(plain)
        if len(lengths) != 1 or not self._growth(plain, padded):
            return padded
        try:
            wide = self.padding(plain, more=max(lengths.values()) // WIDE)
        except DataError:  # beyond the largest bucket
            return padded
        return wide if self._growth(plain, wide) > self._growth(plain, padded) else padded

    def _say(self, what: str, reason: str) -> None:
        if self.mesh.rank == 0:
            text = f"{what} are not padded, and every length is captured by itself: {reason}."
            warnings.warn(text, stacklevel=2)  # once, by its own rule

    def _compare_outputs(
        self, engine, pair: tuple[Batch, Batch] | None, names: tuple
    ) -> tuple[str, Axes]:
        """pair: a batch as it is and padded; None: this replica has nothing to compare."""
        control = self.mesh.control
        batches = [*(pair or ())]
        try:
            with together(control, "cpu"):
                engine.admit(batches, False, ModelTask(self.loss, names))
        except MerakError as error:
            return f"{error.what} {error.value}: {error.reason}", {}
        outputs = engine.evaluate(batches, names, self.loss)
        reason = ""
        axes: Axes = {}
        if pair is not None and outputs:
            short, long = outputs
            reason, axes = self._axes_of(engine, pair[0], pair[1], short, long)
        return next((text for text in gather_json(reason, control, "cpu") if text), ""), axes

    def _axes_of(
        self, engine, plain: Batch, padded: Batch, short: Mapping, long: Mapping
    ) -> tuple[str, Axes]:
        moved = self._moved(plain, padded)
        names = {pair: name for name, pair in moved.items()}
        axes: Axes = {}
        for name, value in short.items():
            pairs = (
                list(zip(value.shape, long[name].shape, strict=True))
                if value.dim() == long[name].dim()
                else [()]
            )
            moving = {axis: pair for axis, pair in enumerate(pairs) if len({*pair}) != 1}
            if not all(pair in names for pair in moving.values()):
                return (
                    f"the output {name} of shape {tuple(value.shape)} becomes "
                    f"{tuple(long[name].shape)}",
                    {},
                )
            axes[name] = {axis: names[pair] for axis, pair in moving.items()}
            other = _narrowed(
                long[name], axes[name], {key: before for key, (before, _) in moved.items()}
            )
            own, others = _shown(plain, axes[name], value, other)
            if outputs_differ(own, others, engine.dtype):
                return f"the output {name} becomes another one", {}
        return "", axes

    def crop(self, name: str, value: Tensor, plain: Batch, padded: Batch, purpose: tuple) -> Tensor:
        """Return an output for ``padded`` without the positions that ``plain`` does not have."""
        if not self._moved(plain, padded):
            return value
        return _narrowed(
            value, self._axes[self._key(purpose, plain, padded)][name], self.padding.lengths(plain)
        )


def _narrowed(value: Tensor, axes: Mapping[int, str], lengths: Mapping[str, int]) -> Tensor:
    for axis, name in axes.items():
        value = value.narrow(axis, 0, lengths[name])
    return value


def _shown(plain: Batch, axes: Mapping[int, str], *values: Tensor) -> tuple[Tensor, ...]:
    """Return outputs per token at unmasked tokens only: nobody uses the others."""
    mask = plain.get("attention_mask")
    if axes.get(1) != "input" or not isinstance(mask, Tensor) or not torch.is_tensor(values[0]):
        return values
    shown = mask.to(values[0].device).bool()
    return tuple(value[shown] for value in values) if shown.shape == values[0].shape[:2] else values


def _hides_before_shown(batch: Batch) -> bool:
    """Whether a row's mask hides a position before one that it shows."""
    for name, mask in batch.items():
        if not name.endswith("attention_mask") or not isinstance(mask, Tensor) or mask.dim() != 2:
            continue
        hidden = mask == 0
        if (hidden[:, :-1] & ~hidden[:, 1:]).any():
            return True
    return False
