"""Buffers that belong to a model's weights though training does not change them: biases of routers, scales, tables.

A model that is made of its config alone has other ones, and nothing else would tell.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.digests import digest_of
from ..checkpoint.files import DTYPE_CODES, as_bytes
from ..checkpoint.shard import Shard
from ..errors import CheckpointError
from ..graph.capture.empty import is_fake

META = "buffers"  # what a checkpoint says of them

Constants = Mapping[str, Tensor]


def constants_of(model: nn.Module, updated: Collection[str]) -> dict[str, Tensor]:
    """Return the persistent buffers of a model but for those that its forward updates."""
    saved = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved
        and name not in updated
        and not is_fake(buffer)
        and buffer.dtype in DTYPE_CODES
    }


def constant_shards(constants: Constants, owner: bool) -> list[Shard]:
    """Return what a checkpoint has of them. owner: whether this rank writes them."""
    return [
        Shard(name, tuple(buffer.shape), None, (), tensor=buffer, owner=owner)
        for name, buffer in constants.items()
    ]


def described(constants: Constants) -> dict[str, dict[str, str]]:
    """Return the dtype and the digest of each, for a checkpoint's metadata."""
    return {
        name: {
            "dtype": str(buffer.dtype).removeprefix("torch."),
            "digest": digest_of(as_bytes(buffer)),
        }
        for name, buffer in constants.items()
    }


def check_same_constants(meta: Mapping[str, Any], constants: Constants) -> None:
    """Raise CheckpointError if a checkpoint was written with other values of a buffer.

    meta: the checkpoint's; of one of an earlier version, nothing is known.
    """
    saved = meta.get(META)
    if not isinstance(saved, dict):
        return
    for name, now in described(constants).items():
        then = saved.get(name)
        if isinstance(then, dict) and then.get("dtype") == now["dtype"] and then != now:
            value = _short(constants[name])
            reason = "the checkpoint's run had other values in it, which came with its weights"
            remedy = "Make the model from the directory of weights that the run began with"
            raise CheckpointError("buffer", f"{name} {value}", reason, remedy)


def _short(buffer: Tensor) -> str:
    few = buffer.detach().flatten()[:4].cpu()
    values = ", ".join(f"{value:g}" for value in few.to(torch.float64).tolist())
    return f"[{values}{', ...' if buffer.numel() > len(few) else ''}]"
