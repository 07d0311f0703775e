"""Random numbers for one purpose, separate from whatever else draws from the global generators."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

DIGITS = 1_000_003  # a prime: two batches of one run have different seeds


def _states() -> tuple:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def private_randomness(*numbers: int) -> Iterator[None]:
    """Seed every global generator of the CPU by ``numbers`` inside this context, and restore its
    state afterwards.
    """
    seed = 0
    for number in numbers:
        seed = (seed * DIGITS + number) % 2**32
    before = _states()
    try:
        _seed(seed)
        yield
    finally:
        _set_states(before)


@contextmanager
def same_afterwards(device: torch.device) -> Iterator[None]:
    """Restore the state of every global generator, and of the device's, after this context."""
    before = _states()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        _set_states(before)
        if own is not None:
            torch.cuda.set_rng_state(own, device)


class PrivateStream:
    """The values of an iterator that draws from its own generators, which replace the global ones
    meanwhile.

    make: creates the iterator; what it draws counts too.
    seed: of the generators at the beginning.
    """

    def __init__(self, make: Callable[[], Iterator], seed: int):
        before = _states()
        try:
            _seed(seed % 2**32)
            self._values = make()
            self._own = _states()
        finally:
            _set_states(before)
        self._seen: list = []

    def look(self, count: int) -> list:
        """Return the next ``count`` values, fewer at the end; ``take`` returns them again."""
        self._seen = self.take(count)
        return list(self._seen)

    def take(self, count: int) -> list:
        """Return the next ``count`` values, fewer at the end."""
        before = _states()
        taken = self._seen[:count]
        self._seen = self._seen[count:]
        try:
            _set_states(self._own)
            taken += [
                value for _, value in zip(range(count - len(taken)), self._values, strict=False)
            ]
            self._own = _states()
            return taken
        finally:
            _set_states(before)
