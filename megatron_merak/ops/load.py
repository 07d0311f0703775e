"""Loads the compiled operations, once, when ``ops`` is first imported; says why when it cannot."""

import ctypes
import warnings
from pathlib import Path

import torch

from .. import _native


def load() -> dict[str, str]:
    """Library -> "" when it serves its device, else why it does not. Warns for a CPU library that is wanted."""
    problems = {"_ops_cpu": _problem("_ops_cpu"), "_ops_cuda": _problem("_ops_cuda")}
    missing = problems["_ops_cpu"]
    if missing and _native.wanted():
        if _native.required():
            raise ImportError(f"MERAK_EXT=1: {missing}. {_native.REMEDY}.")
        warnings.warn(f"megatron_merak runs without its compiled kernels: {missing}. {_native.REMEDY}.", stacklevel=2)
    return problems


def _problem(name: str) -> str:
    if not _native.wanted():
        return "MERAK_EXT=0"
    path = _native.library(name)
    if path is None:
        return f"megatron_merak/{name} is not built"
    if name == "_ops_cuda" and torch.version.cuda is None:
        return "this build of torch has no CUDA"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return _cause(path) or str(error)
    return ""


def _cause(path: Path) -> str:
    """What the loader says; ``load_library`` hides it."""
    try:
        ctypes.CDLL(str(path))
    except OSError as cause:
        return str(cause)
    return ""
