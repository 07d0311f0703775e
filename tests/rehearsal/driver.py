"""What CUDA's driver tells of a machine with one GPU, so that a job starts there as it
would on it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from megatron_merak.stages import user_model

from .memory import Memory

_TOLD = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "is_bf16_supported": lambda *arguments: True,
    "manual_seed_all": lambda seed: None,
    "get_rng_state_all": lambda: [],
    "is_current_stream_capturing": lambda: False,
    "synchronize": lambda *device: None,
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda *device: None,
}


@contextmanager
def driver(card: str = "NVIDIA H200", memory: Memory | None = None) -> Iterator[None]:
    """One card, whose host memory is all pinned. memory: what a `Rehearsal` counts."""
    counted = memory or Memory()
    size = counted.limit or 150_000_000_000
    properties = SimpleNamespace(
        total_memory=size, multi_processor_count=132, name=card, major=9, minor=0
    )
    answers = _TOLD | {
        "get_device_name": lambda *device: card,
        "get_device_properties": lambda *device: properties,
        "mem_get_info": lambda *device: (size - counted.now, size),
        "max_memory_allocated": lambda *device: counted.peak,
        "max_memory_reserved": lambda *device: counted.peak,
        "memory_allocated": lambda *device: counted.now,
    }
    with ExitStack() as patches:
        for name, told in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, told))
        patches.enter_context(
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *device: tensor)
        )
        # Tables of the user's model would have no values on a fake GPU, and later captures need
        # them.
        patches.enter_context(mock.patch.object(user_model, "is_fake", lambda tensor: True))
        yield
