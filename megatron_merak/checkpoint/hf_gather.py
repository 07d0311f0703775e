"""Send rectangles of tensors that are sharded over ranks to the first rank on demand."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_merak.checkpoint.files import DTYPE_NAMES
from megatron_merak.checkpoint.hf_patchwork import Range
from megatron_merak.checkpoint.shard import (
    Part,
    Shard,
    overlaps_of_rectangle,
    part_of,
    untiled,
)
from megatron_merak.errors import CheckpointError
from megatron_merak.parallel.agree import gather_json


class Tensors(Protocol):
    """Tensors of which the first rank reads rectangles.

    first:  whether this is the first rank.
    shapes: the full shape of each tensor.
    dtypes: the dtype of each tensor.
    """

    first: bool
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def __call__(self, name: str, take: tuple[Range, ...]) -> torch.Tensor: ...


class Gather:
    """``gather(name, take)``: the rectangle on the first rank, a "meta" tensor of its shape on
    others. Collective.

    replicated:     tensors that the first rank takes from its own, if no rank has a shard of that
                    name.
    shapes, dtypes: of all tensors, on every rank.

    All ranks request the same rectangles in the same order. Raises `CheckpointError` on every rank
    if the shards of a tensor do not tile it or differ in shape or dtype.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        replicated: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ):
        self._group = group
        self._device = device
        self._rank = 0 if group is None else dist.get_rank(group)
        self.first = self._rank == 0
        self._own_shards = {shard.name: shard for shard in shards if shard.owner}
        self._fetch = {shard.name: shard.fetch for shard in shards if shard.fetch is not None}
        described = [
            (s.name, s.shape, str(s.tensor.dtype).removeprefix("torch."), *s.part)
            for s in self._own_shards.values()
        ]
        self._parts: dict[str, list[tuple[int, Part]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for rank, reports in enumerate(gather_json(described, group, device)):
            for name, shape, dtype, *part in reports:
                self._parts.setdefault(name, []).append((rank, part_of(*part)))
                known = (
                    self.shapes.setdefault(name, tuple(shape)),
                    self.dtypes.setdefault(name, DTYPE_NAMES[dtype]),
                )
                if known != (tuple(shape), DTYPE_NAMES[dtype]):
                    raise _misfit(
                        name,
                        f"the ranks disagree on its shape or dtype, {shape} and {dtype} on one "
                        "of them",
                    )
        for name, parts in self._parts.items():
            self._check(name, parts)
        self._replicated = {
            name: tensor for name, tensor in replicated.items() if name not in self._parts
        }
        for name, tensor in self._replicated.items():
            self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype

    def __call__(self, name: str, take: tuple[Range, ...]) -> torch.Tensor:
        shape = [stop - start for start, stop in take]
        dtype = self.dtypes[name]
        result = torch.empty(shape, dtype=dtype, device="cpu" if self.first else "meta")
        if name in self._replicated:
            return result.copy_(
                self._replicated[name].detach()[tuple(slice(*bounds) for bounds in take)]
            )
        if name in self._fetch:
            self._fetch[name]()
        for rank, part in self._parts[name]:
            for source, target in overlaps_of_rectangle(self.shapes[name], part, take):
                if rank == self._rank:
                    values = self._own_shards[name].tensor.detach()[source]
                    result[target].copy_(values) if self.first else self._send(values)
                elif self.first:
                    result[target].copy_(self._receive(result[target], rank))
        return result

    def _send(self, values: torch.Tensor) -> None:
        dist.send(_bytes(values.to(self._device)), group=self._group, group_dst=0)

    def _receive(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        values = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        dist.recv(_bytes(values), group=self._group, group_src=rank)
        return values

    def _check(self, name: str, parts: list[tuple[int, Part]]) -> None:
        dims = {dim for _, (dim, _, _) in parts}
        shape = self.shapes[name]
        if len(dims) > 1:
            raise _misfit(name, "the ranks divide it along different dimensions")
        (dim,) = dims
        if dim is None and len(parts) > 1:
            raise _misfit(name, f"ranks {', '.join(str(rank) for rank, _ in parts)} all own it")
        problem = dim is not None and untiled(
            shape, dim, [(spans, slab) for _, (_, spans, slab) in parts]
        )
        if problem:
            raise _misfit(name, problem)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes, which every backend can transfer."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def _misfit(name: str, reason: str) -> CheckpointError:
    return CheckpointError("tensor", name, reason, "Give each part of a tensor one owner")
