"""Rectangles that tile a tensor: whether they do, and what of them a part of it needs."""

import math
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..checkpoint.shard import Intervals


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor.

    offsets: of its first element in the tensor, one per dimension.
    shape:   its extents.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of a store.

    shape:  of the whole tensor.
    dtype:  of all chunks.
    chunks: that tile it; a tensor without elements may have none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


def untiled(tensor: DcpTensor) -> str:
    """Return why the chunks of a tensor do not cover it exactly once; "" if they do."""
    dims = len(tensor.shape)
    chunks = []
    for chunk in tensor.chunks:
        if len(chunk.offsets) != dims or len(chunk.shape) != dims:
            return f"one has {len(chunk.shape)} dimensions at {chunk.offsets}"
        ends = [start + extent for start, extent in zip(chunk.offsets, chunk.shape, strict=True)]
        if any(end > extent for end, extent in zip(ends, tensor.shape, strict=True)):
            return f"that at {chunk.offsets} of shape {chunk.shape} reaches out of it"
        if math.prod(chunk.shape):
            chunks.append(chunk)
    filled = sum(math.prod(chunk.shape) for chunk in chunks)
    if overlap := _overlap(tensor.shape, chunks):
        return overlap
    if filled != math.prod(tensor.shape):
        return f"{filled} of {math.prod(tensor.shape)} elements are in one"
    return ""


def _overlap(shape: tuple[int, ...], chunks: list[StoredChunk]) -> str:
    """Return which chunks have elements in common; "" if none do.

    A sweep along the dimension that is cut most, so that the time is not the square of their number.
    """
    if not shape:
        return "there are two of a single number" if len(chunks) > 1 else ""
    dim = max(range(len(shape)), key=lambda each: len({chunk.offsets[each] for chunk in chunks}))
    active: list[tuple[int, int]] = []
    chunks = sorted(chunks, key=lambda chunk: chunk.offsets[dim])
    for at, chunk in enumerate(chunks):
        start = chunk.offsets[dim]
        del active[: bisect_right(active, (start, len(chunks)))]
        for _, other in active:
            if _meet(chunk, chunks[other]):
                return f"those at {chunks[other].offsets} and {chunk.offsets} overlap"
        insort(active, (start + chunk.shape[dim], at))
    return ""


def _meet(one: StoredChunk, other: StoredChunk) -> bool:
    return all(
        start < other_start + other_extent and other_start < start + extent
        for start, extent, other_start, other_extent in zip(
            one.offsets, one.shape, other.offsets, other.shape, strict=True
        )
    )


def pieces(
    chunk: StoredChunk, dim: int | None, intervals: Intervals
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield (slices of what is read, slices of the chunk) of the elements that they share."""
    put = [slice(at, at + n) for at, n in zip(chunk.offsets, chunk.shape, strict=True)]
    take = [slice(0, n) for n in chunk.shape]
    if dim is None:
        yield tuple(put), tuple(take)
        return
    offset = 0
    first = chunk.offsets[dim]
    last = first + chunk.shape[dim]
    for start, stop in intervals:
        begin = max(start, first)
        end = min(stop, last)
        if begin < end:
            put[dim] = slice(offset + begin - start, offset + end - start)
            take[dim] = slice(begin - first, end - first)
            yield tuple(put), tuple(take)
        offset += stop - start
