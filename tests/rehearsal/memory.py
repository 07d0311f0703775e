"""Bytes of the tensors on a GPU that only pretends, now and at most; it may be full."""

import weakref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

BLOCK = 512  # bytes that torch's allocator rounds to


class Memory:
    """Counts every storage once, from its first tensor to the end of its last.

    limit: bytes of the device; None: it is never full.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.now = 0
        self.peak = 0
        self._living: dict[int, weakref.ref] = {}

    def take(self, results: object) -> None:
        """Count the storages of new tensors. Raises torch.OutOfMemoryError as a GPU does."""
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self._take(tensor.untyped_storage())

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        known = self._living.get(key)
        if known is not None and known() is not None:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        if self.limit is not None and self.now + size > self.limit:
            free = (self.limit - self.now) / 2**30
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total capacity of "
                f"{self.limit / 2**30:.2f} GiB of which {free:.2f} GiB is free."
            )

        def give_back(ended: weakref.ref) -> None:
            self.now -= size
            if self._living.get(key) is ended:
                del self._living[key]

        self._living[key] = weakref.ref(storage, give_back)
        self.now += size
        self.peak = max(self.peak, self.now)
