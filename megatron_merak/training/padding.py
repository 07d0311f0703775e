"""Token batches padded to few lengths, because every shape of a batch is captured once.

Padding stands at the end, is masked where the model takes a mask and is no target, so that the loss stays the same:

    input_ids       7  8  9  |  pad  pad           labels        8  9 -100  |  -100 -100
    attention_mask  1  1  1  |    0    0           position_ids  0  1  2    |     3    4
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError

IGNORED = -100  # the label that no loss of transformers counts
ENCODER = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask")
DECODER = ("decoder_input_ids", "decoder_attention_mask")
TARGETS = ("labels", "shift_labels")
UNPADDED = ("cu_seq_lens_q", "cu_seq_lens_k")


@dataclass(frozen=True)
class Padding:
    """Pads the token tensors of a batch, [rows, ..., length], to a length that few batches differ in.

    buckets: "auto" (8, 12, 16, 24, 32, 48, ...: at most a third is padding), the lengths themselves, or None for none.
    multiple: pad to a multiple of it, whatever the buckets are. pad_id: the token to pad with. mask: whether to add an
    attention mask where there is none; packed sequences, which are told by position_ids, never get one. limit: the
    longest sequence that the model takes; "auto" and ``multiple`` do not pad beyond it.
    """

    buckets: str | tuple[int, ...] | None = "auto"
    multiple: int | None = None
    pad_id: int = 0
    mask: bool = True
    limit: int | None = None

    def length(self, length: int) -> int:
        """The length that ``length`` is padded to. Raises DataError when it exceeds the largest bucket."""
        if self.multiple is not None:
            target = -(-length // self.multiple) * self.multiple
        elif self.buckets is None:
            return length
        elif self.buckets == "auto":
            power = max(8, 1 << (length - 1).bit_length())
            target = power * 3 // 4 if power > 8 and length <= power * 3 // 4 else power
        else:
            place = bisect_left(self.buckets, length)
            if place == len(self.buckets):
                remedy = "Add a larger bucket, or truncate the sequences"
                raise DataError("a batch of length", length, f"the largest bucket is {self.buckets[-1]}", remedy)
            return self.buckets[place]
        return target if self.limit is None else max(length, min(target, self.limit))

    def __call__(self, batch: Mapping[str, object]) -> dict[str, object]:
        """``batch`` with its token tensors padded; anything else in it is left as it is."""
        padded = dict(batch)
        if self.buckets is None and self.multiple is None:
            return padded
        length = _length(batch, "input_ids")
        target_length = _length(batch, "decoder_input_ids") or _length(batch, "labels")  # floats are no tokens
        if length is not None and (target := self.length(length)) > length:
            self._check(batch)
            if self.mask and not {"attention_mask", "position_ids"} & batch.keys():
                padded["attention_mask"] = torch.ones_like(batch["input_ids"])
            self._pad(padded, ENCODER, length, target)
        if target_length is not None:
            self._pad(padded, DECODER + TARGETS, target_length, self.length(target_length))
        return padded

    def _check(self, batch: Mapping[str, object]) -> None:
        for name in UNPADDED:
            if name in batch:
                remedy = "Leave it out: position_ids tell where a sequence begins; or set length_buckets none"
                raise DataError("the batch's", name, "lengths of packed sequences cannot be padded", remedy)
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape != batch["input_ids"].shape:
            remedy = "Give one value per token, or set length_buckets none"
            raise DataError("attention_mask of shape", tuple(mask.shape), "it cannot be padded", remedy)

    def _pad(self, batch: dict[str, object], names: tuple[str, ...], length: int, target: int) -> None:
        for name in names:
            value = batch.get(name)
            if not isinstance(value, Tensor) or value.dim() < 2 or value.size(-1) != length:
                continue
            more = value.new_full((*value.shape[:-1], target - length), self._filler(name))
            if name == "position_ids":
                more = value[..., -1:] + torch.arange(1, target - length + 1, device=value.device)
            batch[name] = torch.cat((value, more.to(value.dtype)), dim=-1)

    def _filler(self, name: str) -> int:
        if name in TARGETS:
            return IGNORED
        return self.pad_id if name in ("input_ids", "decoder_input_ids") else int(name == "special_tokens_mask")


def _length(batch: Mapping[str, object], name: str) -> int | None:
    value = batch.get(name)
    whole = isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point()
    return value.size(-1) if whole else None


def crop(value: Tensor, padded: Mapping[str, object], batch: Mapping[str, object]) -> Tensor:
    """A model output for ``padded``, [rows, length, ...], without the positions that ``batch`` does not have."""
    if value.dim() < 2:
        return value
    for name in ("decoder_input_ids", "labels", "input_ids"):
        before, after = _length(batch, name), _length(padded, name)
        if before is not None and value.size(1) == after:
            return value[:, :before]
    return value
