"""Random numbers: seeds derived from names and positions, and where dropout draws."""

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else: equal on every rank, process
    and machine.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that dropout draws from on ``device``."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    return module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
