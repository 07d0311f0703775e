"""Batches that one rank has read, for all that compute with them."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DataError
from ..streams import current_device
from .utils import group_of

_DIMENSIONS = 8


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

    Raises DataError on the first rank for a tensor of another type, which must be told before the
    others wait.
    """
    group = group_of(tp_group)
    device = current_device()
    first = dist.get_process_group_ranks(group)[0]
    shapes = torch.full((len(keys), 1 + _DIMENSIONS), 0, dtype=torch.int64)
    packed = torch.empty(0, dtype=datatype)
    if group.rank() == 0:
        tensors = [_checked(key, {} if data is None else data, datatype) for key in keys]
        for row, tensor in zip(shapes, tensors, strict=True):
            row[0] = tensor.dim()
            row[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64)
        packed = torch.cat([packed, *(tensor.reshape(-1) for tensor in tensors)]).to(device)
    shapes = shapes.to(device)
    dist.broadcast(shapes, first, group=group)
    sizes = [row[1 : 1 + row[0]] for row in shapes.tolist()]
    counts = [torch.Size(size).numel() for size in sizes]
    if group.rank() != 0:
        packed = torch.empty(sum(counts), dtype=datatype, device=device)
    dist.broadcast(packed, first, group=group)
    parts = packed.split(counts)
    return {key: part.view(size) for key, part, size in zip(keys, parts, sizes, strict=True)}


def _checked(key: str, data: Mapping[str, Tensor], datatype: torch.dtype) -> Tensor:
    if key not in data:
        raise DataError("broadcast_data", key, "the data has no such key", "Give it on rank 0")
    tensor = data[key]
    if tensor.dtype != datatype:
        remedy = "Convert it, or broadcast it on its own"
        raise DataError("broadcast_data", key, f"it is {tensor.dtype}, not {datatype}", remedy)
    if tensor.dim() > _DIMENSIONS:
        reason = f"it has {tensor.dim()} dimensions"
        raise DataError("broadcast_data", key, reason, f"Use at most {_DIMENSIONS}")
    return tensor
