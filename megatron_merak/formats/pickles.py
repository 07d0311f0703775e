"""Files of torch that are pickles, read without running what they name.

A pickle names functions and classes, and reading it calls them. Here a few are let through, which only make tensors and
plain records; classes of programs whose settings are stored beside weights become `Inert`; everything else is refused
by its name.
"""

import argparse
import codecs
import collections
import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PosixPath, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError, DamagedError, MerakError
from .dcp_pickle import GETATTR, why

REMEDY = "Copy the checkpoint again, or save it once more"

_NAMED = "--allow-pickle reads tensors and plain settings only. Save the checkpoint without it"
# of these, settings have classes and enumerations, and states of random generators have arrays
_INERT = ("megatron.", "transformer_engine", "numpy", "apex.", "torchtitan.", "datetime")
_TORCH = (
    "Size FloatStorage DoubleStorage HalfStorage BFloat16Storage LongStorage IntStorage ShortStorage "
    "CharStorage ByteStorage BoolStorage"
).split()
_BUILTINS = (set, frozenset, complex, bytearray, range, slice)


class Inert:
    """Stands for an object of a class that is not called."""

    def __init__(self, *arguments: object, **named: object):
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _of_torch() -> Iterator[tuple[tuple[str, str], Any]]:
    for name in _TORCH:
        yield ("torch", name), getattr(torch, name)
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            yield ("torch", name), value
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_tensor"):
        yield ("torch._utils", name), getattr(torch._utils, name)
    for name in ("UntypedStorage", "TypedStorage"):
        yield ("torch.storage", name), getattr(torch.storage, name)
    yield ("torch", "device"), torch.device


_ALLOWED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **dict(_of_torch()),
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): collections.defaultdict,
        ("_io", "BytesIO"): io.BytesIO,
        # what bytes are made of in an old protocol
        ("_codecs", "encode"): codecs.encode,
        ("argparse", "Namespace"): argparse.Namespace,
        ("pathlib", "PosixPath"): PosixPath,
        ("pathlib", "PurePosixPath"): PurePosixPath,
        ("pathlib._local", "PosixPath"): PosixPath,
        **{("builtins", each.__name__): each for each in _BUILTINS},
    }
)


class PlainUnpickler(pickle.Unpickler):
    """Reads a pickle of tensors and plain settings. Raises `pickle.UnpicklingError` for other
    names."""

    def find_class(self, module: str, name: str, /) -> Any:
        # how pickles of torch.save, which have an old protocol, call it
        module = "builtins" if module == "__builtin__" else module
        found = _ALLOWED.get((module, name))
        if found is not None:
            return found
        if (module, name) == GETATTR:
            return _member
        if module.startswith(_INERT):
            return Inert
        raise _RefusedError(f"it names {module}.{name}, which is not called")


class _RefusedError(pickle.UnpicklingError):
    """A name in a pickle that is not let through."""


def _member(kind: Any, name: Any) -> Inert:
    """Stand in for a member of an enumeration, of classes that are not called; see ``GETATTR``."""
    if kind is not Inert:
        raise _RefusedError(f"it names {'.'.join(GETATTR)}, which is not called")
    return Inert(name)


# what torch.load takes for a module
_MODULE = SimpleNamespace(
    __name__="pickle",
    Unpickler=PlainUnpickler,
    load=lambda file, **_: PlainUnpickler(file).load(),
)


def read_torch(file: BinaryIO | Path) -> Any:
    """Return what ``torch.save`` wrote, on the CPU. Raises `pickle.UnpicklingError`, and others
    for damage."""
    return torch.load(
        file,
        map_location="cpu",
        pickle_module=_MODULE,
        weights_only=False,
    )


@contextmanager
def unpickling(path: Path, inside: str = "") -> Iterator[None]:
    """Turn what goes wrong while the body reads pickles of a file into a `CheckpointError` of one
    line.

    inside: names the part of the file.
    """
    where = f"{path}{inside and f', {inside}'}"
    try:
        yield
    except MerakError:
        raise
    except _RefusedError as error:
        raise CheckpointError("pickle", where, str(error), _NAMED) from error
    except FileNotFoundError as error:
        raise DamagedError("checkpoint file", where, "it is missing", REMEDY) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("checkpoint file", where, reason, REMEDY) from error
    # a damaged pickle raises anything at all
    except Exception as error:
        reason = f"it cannot be read ({why(error)})"
        raise DamagedError("checkpoint file", where, reason, REMEDY) from error
