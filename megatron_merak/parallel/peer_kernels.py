"""The C functions of csrc/cuda/launch.h that work on memory of several GPUs, called without torch."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import _native

PATIENCE = 600.0  # seconds that a kernel waits for a peer unless told, as a process group does


class Kernels(NamedTuple):
    """Each but ``bytes`` starts a kernel on a stream and returns a CUDA error, 0 for success."""

    all_reduce: Callable[..., int]
    bytes: Callable[[int], int]
    await_counter: Callable[[int, int, float, int], int]
    raise_counter: Callable[[int, int, int], int]


def load_kernels() -> Kernels | None:
    """The launchers in the compiled library, None where it was not built or is not wanted."""
    path = _native.library("_ops_cuda") if _native.wanted() and torch.version.cuda is not None else None
    if path is None or _native.unfit(path):
        return None
    library = ctypes.CDLL(str(path))
    pointer, number, wide, seconds = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    signatures = {
        "all_reduce": [pointer, number, number, wide, pointer, pointer, wide, number, number, seconds, pointer],
        "await_counter": [pointer, wide, seconds, pointer],
        "raise_counter": [pointer, wide, pointer],
        "all_reduce_bytes": [wide],
    }
    found = {}
    for name, arguments in signatures.items():
        found[name] = getattr(library, f"merak_{name}")
        found[name].argtypes, found[name].restype = arguments, wide if name == "all_reduce_bytes" else number
    return Kernels(found["all_reduce"], found["all_reduce_bytes"], found["await_counter"], found["raise_counter"])


def check(name: str, status: int) -> None:
    """Raises RuntimeError for a kernel that did not start."""
    if status != 0:
        raise RuntimeError(f"merak_{name} did not start: CUDA error {status}")
