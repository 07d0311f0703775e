"""Frozen weights of linear layers in 4 bits (NF4, FP4; Dettmers et al., 2023).

    weight [rows, columns]    64 values in the order of rows are a block
    a block                   32 bytes, two values each, and one scale, its largest absolute value
    a value                   scale * table[its 4 bits]; the table is NF4's or FP4's
    nested                    scales are 8 bits, too, in blocks of 256, with fp32 scales of their own

A weight and its scales are one piece of memory. A product reads a matrix that is made of it just
before, and again in the backward; in between there is none. bitsandbytes makes it, and is
imported by whoever has such a model.
"""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

NESTED_BLOCK = 256  # scales in 8 bits that share one
_CODES = 256  # values that 8 bits stand for
_ALIGNMENT = 16  # bytes
PACKED = ""
SCALES = "absmax"
NESTED_SCALES = "nested_absmax"
NESTED_TABLE = "nested_quant_map"
NESTED_OFFSET = "nested_offset"


class FourBit(NamedTuple):
    """How a weight is stored.

    kind:    "nf4" or "fp4".
    block:   number of values with one scale.
    rows:    of the weight, its output features.
    columns: of the weight, its input features: a number of whole blocks.
    dtype:   name of the dtype that it was rounded from; the backward multiplies values in it.
    nested:  whether scales are in 8 bits.
    """

    kind: str
    block: int
    rows: int
    columns: int
    dtype: str
    nested: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


class PackedPart(NamedTuple):
    """A tensor in the memory of a weight. start: in bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def of(self, stored: Tensor) -> Tensor:
        """Return it as a view of ``stored``, uint8 [bytes]."""
        return stored[self.start : self.stop].view(self.dtype).view(self.shape)


def places(how: FourBit) -> Mapping[str, PackedPart]:
    """Return what a weight in 4 bits is made of, by name.

    Every row consists of whole blocks, so that what shards the weight shards its packed values and
    its scales.
    """
    packed = (how.rows, how.columns // 2)
    scales = (how.rows, how.columns // how.block)
    parts: list[tuple[str, tuple[int, ...], torch.dtype]] = [(PACKED, packed, torch.uint8)]
    if how.nested:
        outer = (-(-prod(scales) // NESTED_BLOCK),)
        parts.append((SCALES, scales, torch.uint8))
        parts.append((NESTED_SCALES, outer, torch.float32))
        parts.append((NESTED_TABLE, (_CODES,), torch.float32))
        parts.append((NESTED_OFFSET, (), torch.float32))
    else:
        parts.append((SCALES, scales, torch.float32))
    found: dict[str, PackedPart] = {}
    end = 0
    for name, shape, dtype in parts:
        found[name] = PackedPart(-(-end // _ALIGNMENT) * _ALIGNMENT, shape, dtype)
        end = found[name].stop
    return MappingProxyType(found)


def stored_bytes(how: FourBit) -> int:
    """Return the bytes of a weight with its scales."""
    return max(place.stop for place in places(how).values())


def scales_of(stored: Tensor, how: FourBit) -> Tensor:
    """Return the scales of the blocks of a weight, fp32 [blocks]. stored: uint8 [bytes]."""
    where = places(how)
    scales = where[SCALES].of(stored).view(-1)
    if not how.nested:
        return scales
    return nested_scales(
        scales,
        where[NESTED_SCALES].of(stored),
        where[NESTED_TABLE].of(stored),
        where[NESTED_OFFSET].of(stored),
    )


def nested_scales(scales: Tensor, outer: Tensor, table: Tensor, offset: Tensor) -> Tensor:
    """Return scales that are in 8 bits, uint8 [blocks], as fp32.

    outer:  scales of these, fp32 [blocks / 256].
    table:  what 8 bits stand for, fp32 [256].
    offset: is added to all, fp32 [].
    """
    make = torch.ops.bitsandbytes.dequantize_blockwise.default
    return make(scales.reshape(-1), outer, table, NESTED_BLOCK, dtype=torch.float32) + offset


def matrix(stored: Tensor, how: FourBit, dtype: torch.dtype) -> Tensor:
    """Return the values of a weight, [rows, columns]. stored: uint8 [bytes]."""
    packed = places(how)[PACKED].of(stored).view(-1, 1)
    make = torch.ops.bitsandbytes.dequantize_4bit.default
    scales = scales_of(stored, how)
    return make(packed, scales, how.block, how.kind, shape=how.shape, dtype=dtype)


def matrices(
    weights: Sequence[Tensor],
    formats: Sequence[FourBit | None],
    dtype: torch.dtype,
    backward: bool = False,
) -> Sequence[Tensor]:
    """Return weights as matrices to multiply with: those of 4 bits side by side in new memory, and
    others as they are.

    formats:  of each, None for a matrix; empty where all are.
    backward: whether values pass through the dtypes that they were rounded from, as those of the
              backward of bitsandbytes do.
    """
    packed = [how for how in formats if how is not None]
    if not packed:
        return weights
    many = len(packed) > 1 and len({how.columns for how in packed}) == 1
    rows = [how.rows for how in packed]
    whole: Sequence[Tensor | None] = [None] * len(packed)
    if many:
        shape = (sum(rows), packed[0].columns)
        whole = weights[0].new_empty(shape, dtype=dtype).split(rows)
    pieces = iter(whole)
    found = []
    for weight, how in zip(weights, formats, strict=True):
        if how is None:
            found.append(weight)
            continue
        own = getattr(torch, how.dtype) if backward else dtype
        piece = next(pieces)
        values = matrix(weight, how, own)
        found.append(values.to(dtype) if piece is None else piece.copy_(values))
    return found


def row_counts(weights: Sequence[Tensor], formats: Sequence[FourBit | None]) -> list[int]:
    """Return the output features of each weight. formats: see ``matrices``."""
    if not formats:
        return [len(weight) for weight in weights]
    pairs = zip(weights, formats, strict=True)
    return [len(weight) if how is None else how.rows for weight, how in pairs]
