"""Load the compiled operations when ``ops`` is first imported, and report why if they cannot be."""

import ctypes
import warnings
from pathlib import Path

import torch

from .. import _native
from . import apex
from .register import MERAK


def load() -> dict[str, str]:
    """Return provider -> "" if it serves its device, else the reason. Warns for a CPU library that
    is enabled.

    apex's kernels are used if our own for CUDA are absent.
    """
    problems = {"_ops_cpu": _problem("_ops_cpu"), "_ops_cuda": _problem("_ops_cuda")}
    problems["apex"] = _take_apex(problems["_ops_cuda"])
    missing = problems["_ops_cpu"]
    if missing and _native.enabled():
        if _native.required():
            raise ImportError(f"MERAK_EXT=1: {missing}. {_native.REMEDY}.")
        warnings.warn(
            f"megatron_merak runs without its compiled kernels: {missing}. {_native.REMEDY}.",
            stacklevel=2,
        )
    return problems


def _take_apex(problem: str) -> str:
    if not _native.enabled():
        return "MERAK_EXT=0"
    if not problem:
        return "our own CUDA kernels are loaded"
    norms = apex.find()
    if norms is None:
        return f"NVIDIA's apex, with its module {apex.MODULE}, is not installed"
    apex.provide(MERAK, norms)
    return ""


def _problem(name: str) -> str:
    if not _native.enabled():
        return "MERAK_EXT=0"
    path = _native.library(name)
    if path is None:
        return _native.absent(name)
    if name == "_ops_cuda" and torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if problem := _native.unfit(path):
        return problem
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return _cause(path) or str(error)
    return ""


def _cause(path: Path) -> str:
    """Return the loader's message, which ``load_library`` hides."""
    try:
        ctypes.CDLL(str(path))
    except OSError as cause:
        return str(cause)
    return ""
