"""Random numbers: seeds derived from names and positions, and streams that differ inside
tensor-parallel regions.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MODEL_PARALLEL = "model-parallel-rng"


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


class RngTracker:
    """Named streams of the device's generator, as in Megatron-LM: inside ``fork`` dropout draws
    from the named one.

    Outside, the default stream has one seed on all tensor-parallel ranks, so replicated regions
    draw the same masks.
    """

    def __init__(self, device: torch.device):
        self.generator = default_generator(device)
        self.states: dict[str, torch.Tensor] = {}
        self.seeds: dict[int, str] = {}

    def add(self, name: str, seed: int) -> None:
        """Start the stream ``name`` at ``seed``; the default stream is not moved."""
        assert name not in self.states, f"stream {name} exists"
        assert seed not in self.seeds, (
            f"stream {self.seeds[seed]} has seed {seed}: both would draw the same numbers"
        )
        self.seeds[seed] = name
        before = self.generator.get_state()
        self.generator.manual_seed(seed)
        self.states[name] = self.generator.get_state()
        self.generator.set_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the stream ``name`` until the block ends."""
        before = self.generator.get_state()
        self.generator.set_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self.generator.get_state()
            self.generator.set_state(before)


def model_parallel_seed(seed: int, tp_rank: int, device: torch.device) -> RngTracker:
    """Seed the default stream with ``seed`` and the model-parallel one with seed + 2718 + tp_rank,
    as Megatron-LM.
    """
    tracker = RngTracker(device)
    tracker.generator.manual_seed(seed)
    tracker.add(MODEL_PARALLEL, seed + 2718 + tp_rank)
    return tracker
