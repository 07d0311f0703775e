"""Token batches padded to few lengths, because every shape of a batch is captured once.

Padding stands at the end, is masked if the model takes a mask, and is no target, so that most
losses stay the same (``neutral.py`` finds those that do not):

    input_ids       7  8  9  |  pad  pad           labels        8  9 -100  |  -100 -100
    attention_mask  1  1  1  |    0    0           position_ids  0  1  0    |     0    1

Positions mark where the documents of a packed row begin: padding consists of further documents,
none longer than the present ones, so that it has no position that the row does not have.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import DataError

IGNORED = -100  # the label that no loss of transformers counts
ENCODER = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "special_tokens_mask",
    "completion_mask",
)
DECODER = ("decoder_input_ids", "decoder_attention_mask")
TARGETS = ("labels", "shift_labels")
UNPADDED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


@dataclass(frozen=True)
class Padding:
    """Pads the token tensors of a batch, [rows, ..., length], to one of few lengths.

    buckets:  "auto" (8, 16, 24, ..., 128, 144, ..., 256, 288, ...: above 64 at most a ninth is
              padding; for pairs of an encoder's and a decoder's length 8, 12, 16, 24, 32, 48, ...),
              the lengths themselves, or None for none.
    multiple: pad to a multiple of it, whatever the buckets.
    pad_id:   the token to pad with.
    mask:     whether to add an attention mask if there is none; packed rows, which have
              position_ids, never get one.
    limit:    the longest sequence of the model; "auto" and ``multiple`` do not pad beyond it,
              except rows with position_ids, which may contain several sequences.
    decoder:  whether the model is an encoder with a decoder, whose labels have their own length.
    """

    buckets: str | tuple[int, ...] | None = "auto"
    multiple: int | None = None
    pad_id: int = 0
    mask: bool = True
    limit: int | None = None
    decoder: bool = False

    @property
    def active(self) -> bool:
        return self.buckets is not None or self.multiple is not None

    def length(self, length: int, packed: bool = False) -> int:
        """Return the length to which ``length`` is padded. Raises DataError if it exceeds the
        largest bucket.

        packed: whether rows contain documents, so that ``limit`` does not apply.
        """
        if self.multiple is not None:
            target = -(-length // self.multiple) * self.multiple
        elif self.buckets is None:
            return length
        elif self.buckets == "auto":
            power = max(8, 1 << (length - 1).bit_length())
            step = max(power // 4, 4) if self.decoder else max(power // 16, 8)
            target = max(-(-length // step) * step, 8)
        else:
            buckets = tuple(map(int, self.buckets))
            place = bisect_left(buckets, length)
            if place == len(buckets):
                remedy = "Add a larger bucket, or truncate the sequences"
                raise DataError(
                    "a batch of length", length, f"the largest bucket is {buckets[-1]}", remedy
                )
            return buckets[place]
        return (
            max(length, min(target, self.limit))
            if not packed and self.limit is not None
            else target
        )

    def lengths(self, batch: Mapping[str, object]) -> dict[str, int]:
        """Return the lengths of a batch: "input", of its tokens, and "decoder" if the model has
        one.
        """
        tokens = {"input": _length(batch, "input_ids")}
        if self.decoder or "decoder_input_ids" in batch:
            tokens["decoder"] = _length(batch, "decoder_input_ids") or _length(batch, "labels")
        return {name: length for name, length in tokens.items() if length is not None}

    def unfit(self, batch: Mapping[str, object]) -> str:
        """Return why a batch cannot be padded; "" if it can."""
        for name in UNPADDED:
            if name in batch:
                return f"{name} gives the lengths of packed sequences"
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and isinstance(tokens := batch.get("input_ids"), Tensor):
            if mask.shape != tokens.shape:
                return (
                    f"the attention_mask of shape {tuple(mask.shape)} has not one value per token"
                )
        return ""

    def __call__(self, batch: Mapping[str, object], more: int = 0) -> dict[str, object]:
        """Return ``batch`` with its token tensors padded; other entries, and labels that are not
        per token, are unchanged.

        more: pad as if the batch were so much longer.

        Raises DataError if it is longer than the largest bucket.
        """
        padded = dict(batch)
        lengths = self.lengths(batch)
        if not self.active:
            return padded
        targets = {
            name: self.length(length + more, "position_ids" in batch)
            for name, length in lengths.items()
        }
        if targets.get("input", 0) > lengths.get("input", 0):
            tokens = batch["input_ids"]
            if (
                self.mask
                and isinstance(tokens, Tensor)
                and not {"attention_mask", "position_ids"} & batch.keys()
            ):
                padded["attention_mask"] = torch.ones_like(tokens)
            names = ENCODER if "decoder" in lengths else ENCODER + TARGETS
            self._pad(padded, names, lengths["input"], targets["input"])
        if "decoder" in lengths:
            self._pad(padded, DECODER + TARGETS, lengths["decoder"], targets["decoder"])
        return padded

    def _pad(
        self, batch: dict[str, object], names: tuple[str, ...], length: int, target: int
    ) -> None:
        for name in names:
            value = batch.get(name)
            if not isinstance(value, Tensor) or value.dim() < 2 or value.size(-1) != length:
                continue
            if name in TARGETS and value.is_floating_point():
                continue
            more = value.new_full((*value.shape[:-1], target - length), self._filler(name))
            if name == "position_ids":
                first = value[..., :1]
                span = int((value - first).max()) + 1
                more = first + torch.arange(target - length, device=value.device) % span
            batch[name] = torch.cat((value, more.to(value.dtype)), dim=-1)

    def _filler(self, name: str) -> int:
        if name in TARGETS:
            return IGNORED
        return (
            self.pad_id
            if name in ("input_ids", "decoder_input_ids")
            else int(name == "special_tokens_mask")
        )


def _length(batch: Mapping[str, object], name: str) -> int | None:
    value = batch.get(name)
    if isinstance(value, Tensor) and value.dim() > 1 and not value.is_floating_point():
        return value.size(-1)
    return None
