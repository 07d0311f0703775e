"""Broadcast predictions from the rank that has them: nested tensors, without pickle."""

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DataError


def _pack(value: object, tensors: list[Tensor]) -> object:
    """Return a JSON-safe form of ``value``; its tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"mapping": {key: _pack(each, tensors) for key, each in value.items()}}
    if isinstance(value, tuple | list):
        return {
            "tuple" if isinstance(value, tuple) else "list": [
                _pack(each, tensors) for each in value
            ]
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    reason = f"{type(value).__name__} is not a tensor, number, text, tuple, list or dictionary"
    raise DataError(
        "a prediction", repr(value)[:60], reason, "Let preprocess_logits_for_metrics return tensors"
    )


def _unpack(packed: dict, take) -> object:
    if "shape" in packed:
        return take(packed)
    if "mapping" in packed:
        return {key: _unpack(each, take) for key, each in packed["mapping"].items()}
    if "plain" in packed:
        return packed["plain"]
    ((kind, parts),) = packed.items()
    values = [_unpack(each, take) for each in parts]
    return tuple(values) if kind == "tuple" else values


def from_rank(
    source: int, value: object, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
) -> object:
    """Return the nested ``value`` of global rank ``source`` on every rank, tensors on the CPU.
    Collective over ``group``.

    value:  ignored on other ranks.
    device: of tensors that the group's backend transfers.
    group:  None for a single process.
    """
    if group is None:
        return value
    is_source = dist.get_rank() == source
    tensors: list[Tensor] = []
    text = json.dumps(_pack(value, tensors)).encode() if is_source else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, source, group)
    payload = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if is_source
        else torch.empty(int(length), dtype=torch.uint8)
    ).to(device)
    dist.broadcast(payload, source, group)
    ours = iter(tensors)

    def take(packed: dict) -> Tensor:
        tensor = (
            next(ours)
            if is_source
            else torch.empty(packed["shape"], dtype=getattr(torch, packed["dtype"]))
        )
        tensor = tensor.to(device)
        dist.broadcast(tensor, source, group)
        return tensor.cpu()

    return _unpack(json.loads(payload.cpu().numpy().tobytes()), take)
