"""Counts the bytes of all tensors of a rank, as an allocator does, operation by operation."""

from contextlib import ExitStack
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_merak.parallel import pieces
from megatron_merak.parallel.pieces import Pieces
from tests.rehearsal.memory import Memory

_KINDS = (torch.Tensor, torch.nn.Parameter)  # no fakes


class Living(TorchDispatchMode):
    """Use as a context manager around all that a rank does; ``memory`` has the bytes now and at most.

    Every storage of a tensor on the CPU counts once, from its first operation to the end of its
    last tensor. Of a flat tensor in pieces those count that are allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self._apart: set[int] = set()  # storages that are counted by pieces
        self._patches = ExitStack()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.memory.take(
            [
                tensor
                for tensor in tree_leaves(results)
                if type(tensor) in _KINDS
                and tensor.device.type == "cpu"
                and tensor.untyped_storage()._cdata not in self._apart
            ]
        )
        return results

    def __enter__(self):
        allocate, release, pages = Pieces.allocate, Pieces.release, pieces._Pages
        frombuffer = torch.frombuffer

        def allocated(flat: Pieces, number: int) -> None:
            if not flat.allocated(number):
                self._change(flat.piece(number).nbytes)
            allocate(flat, number)

        def released(flat: Pieces, number: int) -> None:
            if flat.allocated(number):
                self._change(-flat.piece(number).nbytes)
            release(flat, number)

        def of_pages(*args, **kwargs):
            with mock.patch.object(torch, "frombuffer", mapped):
                flat = pages(*args, **kwargs)
            self._change(sum(piece.nbytes for piece in flat.pieces))
            return flat

        def mapped(*args, **kwargs):
            flat = frombuffer(*args, **kwargs)
            self._apart.add(flat.untyped_storage()._cdata)
            return flat

        for where, name, changed in (
            (Pieces, "allocate", allocated),
            (Pieces, "release", released),
            (pieces, "_Pages", of_pages),
        ):
            self._patches.enter_context(mock.patch.object(where, name, changed))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def _change(self, size: int) -> None:
        self.memory.now += size
        self.memory.peak = max(self.memory.peak, self.memory.now)
