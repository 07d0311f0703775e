"""Batches that one rank has read, for all that compute with them."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DataError
from ..streams import current_device
from .utils import group_of

_DIMENSIONS = 8
# What the first rank may say of a tensor in place of its number of dimensions, with a remedy; all
# ranks raise it.
_PROBLEMS = {
    -1: ("the data has no such key", "Give it on the first rank"),
    -2: ("it has another type than {datatype}", "Convert it, or broadcast it on its own"),
    -3: (f"it has more than {_DIMENSIONS} dimensions", "Flatten some of them"),
}


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    tp_group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that the first rank of the group has, on every rank of it. Collective.

    keys:     their names.
    data:     tensors by name; read on the first rank only.
    datatype: of all of them.

    Raises DataError on every rank for a tensor that is missing or of another type.
    """
    group = group_of(tp_group)
    device = current_device()
    first = dist.get_process_group_ranks(group)[0]
    reads = group.rank() == 0
    given = data or {}
    shapes = torch.zeros(len(keys), 1 + _DIMENSIONS, dtype=torch.int64)
    if reads:
        for row, key in zip(shapes, keys, strict=True):
            _describe(row, given.get(key), datatype)
    shapes = shapes.to(device)
    dist.broadcast(shapes, first, group=group)
    sizes = []
    for key, (dimensions, *extents) in zip(keys, shapes.tolist(), strict=True):
        if dimensions < 0:
            reason, remedy = _PROBLEMS[dimensions]
            raise DataError("broadcast_data", key, reason.format(datatype=datatype), remedy)
        sizes.append(torch.Size(extents[:dimensions]))
    counts = [size.numel() for size in sizes]
    packed = torch.empty(sum(counts), dtype=datatype, device=device)
    if reads:
        for key, part in zip(keys, packed.split(counts), strict=True):
            part.copy_(given[key].reshape(-1))
    dist.broadcast(packed, first, group=group)
    parts = packed.split(counts)
    return {key: part.view(size) for key, part, size in zip(keys, parts, sizes, strict=True)}


def _describe(row: Tensor, tensor: Tensor | None, datatype: torch.dtype) -> None:
    """Write the shape of a tensor into ``row``, its number of dimensions first; or a problem."""
    if tensor is None:
        row[0] = -1
    elif tensor.dtype != datatype:
        row[0] = -2
    elif tensor.dim() > _DIMENSIONS:
        row[0] = -3
    else:
        row[0] = tensor.dim()
        row[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64)
