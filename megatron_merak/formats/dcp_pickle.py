"""What is unpickled of a store of torch.distributed.checkpoint, without running anything that it names.

`.metadata` is read with stand-ins for the few classes that it needs; records are unpickled by torch as
weights are, with a few more classes of values.
"""

import io
import os
import pickle
import re
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from ..errors import CheckpointError, DamagedError, MerakError

RESTORE = "Copy the store again, or save it again with torch.distributed.checkpoint"

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # in what torch says of a class that it does not unpickle

# What a .metadata may name. Of these, only an instance's attributes are kept.
_TORCH = "torch.distributed.checkpoint."
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_STAND_INS = frozenset(
    [
        *((_TORCH + "metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((_TORCH + "metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
        (_TORCH + "metadata", "TensorStorageMetadata"),
        (_TORCH + "metadata", "BytesStorageMetadata"),
        (_TORCH + "metadata", "ChunkStorageMetadata"),
        (_TORCH + "filesystem", "_StorageInfo"),
        (_TORCH + "filesystem", "_StoragePrefix"),
        # plans that megatron-core keeps, to use them again
        *((_TORCH + "planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType")),
        (_TORCH + "planner", "TensorWriteData"),
        *((_MCORE, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        # of stores before torch 2.3
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("torch", "device"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
    ]
)
_REAL: Mapping[tuple[str, str], type] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}


class _Inert:
    """An object of a pickle: what it was made of and its attributes, and nothing that runs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass


class _InertProperties(_Inert):
    """TensorProperties, whose state is a tuple."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) and state else None


class _Restricted(pickle.Unpickler):
    """Reads a `.metadata` without running anything that it names."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file)
        self._made: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        key = (module, name)
        if key in _REAL:
            return _REAL[key]
        if key == GETATTR:
            return _member
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if key not in _STAND_INS:
            raise _ForeignNameError(f"{module}.{name}")
        if key not in self._made:
            base = _InertProperties if name == "TensorProperties" else _Inert
            self._made[key] = type(name, (base,), {})
        return self._made[key]

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("it refers to something outside of it")


class _ForeignNameError(Exception):
    """A name that no `.metadata` of a store needs."""


# Early releases of Python 3.11 (3.11.2 among them) pickle a member of an enumeration as an attribute of
# its class, by this name; others call the class with the member's value.
GETATTR = ("builtins", "getattr")


def _member(kind: Any, name: Any) -> _Inert:
    """Stand in for a member of an enumeration, of classes that are stand-ins themselves."""
    if not (isinstance(kind, type) and issubclass(kind, _Inert)):
        raise _ForeignNameError(".".join(GETATTR))
    return kind(name)


def read_metadata(path: Path) -> Any:
    """Return the object in a `.metadata`, and all that it consists of, as attributes of stand-ins.

    Raises CheckpointError for a name that no store needs, and DamagedError for what is no pickle.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DamagedError("file", os.fspath(path), "it is not a regular file", RESTORE)
        with open(path, "rb") as file:
            return _Restricted(file).load()
    except MerakError:
        raise
    except _ForeignNameError as error:
        reason = (
            f"it names {str(error)!r:.100}, which no store of torch.distributed.checkpoint needs"
        )
        remedy = "Do not open it unless you know why; save the store again"
        raise CheckpointError("file", os.fspath(path), reason, remedy) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("file", os.fspath(path), reason, RESTORE) from error
    except Exception as error:
        reason = f"it cannot be parsed ({why(error)})"
        raise DamagedError("file", os.fspath(path), reason, RESTORE) from error


def classes_of_values() -> list[Any]:
    """Return what objects of a store may name beside what torch allows in weights: numbers of
    NumPy, and bytes in memory.
    """
    scalar: Any = numpy.float64(0).__reduce__()[0]
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    kinds = {type(numpy.dtype(code)): None for code in "?bhilqBHILQefd"}
    return [io.BytesIO, numpy.dtype, *kinds, *((scalar, name) for name in names)]


def why(error: Exception) -> str:
    """Return in a few words what a library says is wrong."""
    text = str(error).strip() or type(error).__name__
    if found := _GLOBAL.search(text):
        return found[1]
    return text.splitlines()[0].partition(". This is an internal")[0][:200]
