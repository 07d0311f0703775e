"""What CUDA's driver tells of a machine with one GPU, so that a job starts there as it would on it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from megatron_merak.stages import user_model

_TOLD = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "get_device_name": lambda device: "NVIDIA H200",
    "is_bf16_supported": lambda *arguments: True,
    "manual_seed_all": lambda seed: None,
    "get_rng_state_all": lambda: [],
}


@contextmanager
def driver() -> Iterator[None]:
    """One H200, whose host memory is all pinned."""
    with ExitStack() as patches:
        for name, told in _TOLD.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, told))
        patches.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *device: tensor))
        # Tables of the user's model would have no values on a fake GPU, and later captures need them.
        patches.enter_context(mock.patch.object(user_model, "is_fake", lambda tensor: True))
        yield
