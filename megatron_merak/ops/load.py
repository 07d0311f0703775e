"""Loads the compiled operations, once, when ``ops`` is first imported; says why when it cannot."""

import ctypes
import warnings
from pathlib import Path

import torch

from .. import _native
from . import apex
from .register import MERAK


def load() -> dict[str, str]:
    """Provider -> "" when it serves its device, else why it does not. Warns for a CPU library that is wanted.

    apex's kernels are taken where our own for CUDA are not there.
    """
    problems = {"_ops_cpu": _problem("_ops_cpu"), "_ops_cuda": _problem("_ops_cuda")}
    problems["apex"] = _take_apex(problems["_ops_cuda"])
    missing = problems["_ops_cpu"]
    if missing and _native.wanted():
        if _native.required():
            raise ImportError(f"MERAK_EXT=1: {missing}. {_native.REMEDY}.")
        warnings.warn(f"megatron_merak runs without its compiled kernels: {missing}. {_native.REMEDY}.", stacklevel=2)
    return problems


def _take_apex(problem: str) -> str:
    if not _native.wanted():
        return "MERAK_EXT=0"
    if not problem:
        return "our own CUDA kernels are loaded"
    norms = apex.find()
    if norms is None:
        return f"NVIDIA's apex, with its module {apex.MODULE}, is not installed"
    apex.provide(MERAK, norms)
    return ""


def _problem(name: str) -> str:
    if not _native.wanted():
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
    """What the loader says; ``load_library`` hides it."""
    try:
        ctypes.CDLL(str(path))
    except OSError as cause:
        return str(cause)
    return ""
