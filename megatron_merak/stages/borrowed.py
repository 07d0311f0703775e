"""Micro-batches of another replica, for a step that every replica computes for its neighbour."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.agree import broadcast_json
from ..parallel.mesh import Mesh


def batches_of_next(batches: Sequence[Mapping[str, Any]], mesh: Mesh) -> list[dict[str, Any]]:
    """Return the micro-batches of the next replica, on the CPU. Collective over all ranks.

    batches: of this replica, the same on all its ranks; values are tensors, or what JSON can
             represent.
    """
    grid = mesh.grid
    wanted = (mesh.dp_rank + 1) % mesh.grid.dp
    found: list[dict[str, Any]] = []
    for replica in range(grid.dp):
        received = _from_rank(grid.rank(dp=replica), batches, mesh)
        if replica == wanted:
            found = received
    return found


def _from_rank(
    source: int, batches: Sequence[Mapping[str, Any]], mesh: Mesh
) -> list[dict[str, Any]]:
    group = mesh.control
    sends = mesh.rank == source
    forms = broadcast_json(
        [_form(batch) for batch in batches] if sends else None, group, "cpu", source
    )
    received: list[dict[str, Any]] = []
    for index, form in enumerate(forms):
        batch: dict[str, Any] = {}
        for name, (dtype, content) in form.items():
            if dtype is None:
                batch[name] = content
                continue
            tensor = torch.empty(content, dtype=getattr(torch, dtype))
            if sends:
                tensor.copy_(batches[index][name])
            if tensor.numel():
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), source, group)
            batch[name] = tensor
        received.append(batch)
    return received


def _form(batch: Mapping[str, Any]) -> dict[str, tuple]:
    """Return (dtype, shape) of each tensor, and (None, value) of anything else."""
    form: dict[str, tuple] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            form[name] = (str(value.dtype).removeprefix("torch."), list(value.shape))
        else:
            form[name] = (None, value)
    return form
