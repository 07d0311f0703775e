"""The C functions of csrc/cuda/launch.h that work on memory of several GPUs, called
through ctypes.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import _native

# default timeout in seconds of a kernel that waits for a peer, as that of process groups
PATIENCE = 600.0


class PeerKernels(NamedTuple):
    """All but ``bytes`` launch a kernel on a stream and return a CUDA error code, 0 for success."""

    all_reduce: Callable[..., int]
    bytes: Callable[[int], int]
    await_counter: Callable[[int, int, float, int], int]
    raise_counter: Callable[[int, int, int], int]


def load_kernels() -> PeerKernels | None:
    """Return the functions of the compiled library, None where it was not built or is disabled."""
    path = (
        _native.library("_ops_cuda")
        if _native.enabled() and torch.version.cuda is not None
        else None
    )
    if path is None or _native.unfit(path):
        return None
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    number = ctypes.c_int
    wide = ctypes.c_int64
    seconds = ctypes.c_double
    signatures = {
        "all_reduce": [
            pointer,
            number,
            number,
            wide,
            pointer,
            pointer,
            wide,
            number,
            number,
            seconds,
            pointer,
        ],
        "await_counter": [pointer, wide, seconds, pointer],
        "raise_counter": [pointer, wide, pointer],
        "all_reduce_bytes": [wide],
    }
    functions = {}
    for name, arguments in signatures.items():
        functions[name] = getattr(library, f"merak_{name}")
        functions[name].argtypes = arguments
        functions[name].restype = wide if name == "all_reduce_bytes" else number
    names = ("all_reduce", "all_reduce_bytes", "await_counter", "raise_counter")
    return PeerKernels(*(functions[name] for name in names))


def check(name: str, status: int) -> None:
    """Raise RuntimeError for a kernel that failed to launch."""
    if status != 0:
        raise RuntimeError(f"merak_{name} did not start: CUDA error {status}")
