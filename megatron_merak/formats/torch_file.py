"""What torch.save writes into a file, read and written a tensor at a time.

    FILE, a zip archive without compression
        ROOT/data.pkl         a pickle of the object, in which tensors refer to storages
        ROOT/data/0, 1, ...   the bytes of the storages
        ROOT/byteorder        "little"
        ROOT/version          "3"

torch.load has all of a file in memory, or maps it to be written to, which systems refuse for files that
are larger than their memory. Here a tensor is where its bytes are until it is read. What is unpickled is
what `PlainUnpickler` lets through, and the bytes of a storage have the sum that was written with them.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch

from ..checkpoint.files import as_bytes
from .pickles import Inert, PlainUnpickler, unpickling

_LOCAL = struct.Struct("<26xHH")  # a record's header: the lengths of its name and of extra bytes
_AT_ONCE = 1 << 20  # bytes that are compared with their sum at once
_PROTOCOL = 2  # of pickles that torch.save writes
_ROOT = "archive/"
_VERSION = b"3\n"  # of the format
_ALIGNED = 64  # bytes to a multiple of which storages are
_EXTRA = struct.Struct("<2sH")  # a header of extra bytes: what they are, and how many
_LARGE = 1 << 30  # bytes from which a record has 64-bit sizes, in a header of its own
_LARGE_HEADER = 20
_UTILS = "torch._utils"
_TENSORS = ("_rebuild_tensor_v2", "_rebuild_tensor")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
# classes of tensors that have attributes
_KINDS = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"))
_STORAGES = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "UntypedStorage": torch.uint8,
    }
)


class TorchFile:
    """One file.

    path: of the file.

    Raises `DamagedError` for what is none.
    """

    def __init__(self, path: Path):
        self.path = path
        self._sound: set[str] = set()  # records whose sums were compared
        with unpickling(path), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            pickled = next((name for name in names if name.endswith("/data.pkl")), None)
            if pickled is None:
                raise pickle.UnpicklingError("it is a zip archive, but not of torch.save")
            self._root = pickled.removesuffix("data.pkl")
            order = f"{self._root}byteorder"
            if order in names and archive.read(order) != b"little":
                raise pickle.UnpicklingError("its numbers are not little-endian")
            self._records = {info.filename: info for info in archive.infolist()}
            self._pickled = pickled

    def load(self) -> Any:
        """Return the object in it, with a `TensorOnDisk` for each tensor.

        Raises `CheckpointError` for names that are not let through, and `DamagedError` for damage.
        """
        with unpickling(self.path), zipfile.ZipFile(self.path) as archive:
            return _Unpickler(io.BytesIO(archive.read(self._pickled)), self).load()

    def record(self, key: str) -> zipfile.ZipInfo:
        """Return where the bytes of a storage are. Raises `pickle.UnpicklingError`."""
        name = f"{self._root}data/{key}"
        info = self._records.get(name)
        if info is None:
            raise pickle.UnpicklingError(f"it lacks {name}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"{name} in it is compressed")
        return info

    def read(self, key: str, start: int, size: int) -> bytearray:
        """Return bytes of a storage. Raises `DamagedError`."""
        info = self.record(key)
        data = bytearray(size)
        with unpickling(self.path, info.filename), open(self.path, "rb") as file:
            if info.filename not in self._sound:
                _check_sum(file, info)
                self._sound.add(info.filename)
            file.seek(info.header_offset)
            header = file.read(_LOCAL.size)
            file.seek(info.header_offset + _LOCAL.size + sum(_LOCAL.unpack(header)) + start)
            if file.readinto(data) != size:
                raise pickle.UnpicklingError("it is too short")
        return data


@dataclass(frozen=True)
class TensorOnDisk:
    """A tensor in a file; ``offset`` and ``stride`` count elements of a storage, as torch has them."""

    file: TorchFile
    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Return its values. Raises `DamagedError`."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        width = self.dtype.itemsize
        data = self.file.read(self.key, self.offset * width, _span(self.shape, self.stride) * width)
        flat = torch.frombuffer(data, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are one after the other."""
        return self.stride == _strides(self.shape)


@dataclass(frozen=True)
class _Storage:
    """A storage in a file."""

    key: str
    dtype: torch.dtype
    count: int


class _Unpickler(PlainUnpickler):
    """Makes a `TensorOnDisk` of each tensor."""

    def __init__(self, data: IO[bytes], file: TorchFile):
        super().__init__(data)
        self._file = file

    def find_class(self, module: str, name: str, /) -> Any:
        if module == _UTILS and name in _TENSORS:
            return self._tensor
        if module == _UTILS and name in _PARAMETERS:
            return _first
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _made
        if (module, name) in _KINDS:
            return Inert
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        return super().find_class(module, name)

    def persistent_load(self, pid: Any, /) -> _Storage:
        word, dtype, key, _, count = pid
        known = word == "storage" and isinstance(dtype, torch.dtype) and isinstance(key, str)
        if not known or not _natural((count,)):
            raise pickle.UnpicklingError("it refers to something outside of it")
        if self._file.record(key).file_size < count * dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {key} in it is too short")
        return _Storage(key, dtype, count)

    def _tensor(
        self, storage: _Storage, offset: int, shape: Any, stride: Any, *others: object
    ) -> TensorOnDisk:
        shape = tuple(shape)
        stride = tuple(stride)
        fits = isinstance(storage, _Storage) and len(shape) == len(stride)
        if not fits or not _natural((offset, *shape, *stride)):
            raise pickle.UnpicklingError("a tensor in it has no place")
        if 0 not in shape and offset + _span(shape, stride) > storage.count:
            raise pickle.UnpicklingError(f"a tensor in it ends after its storage {storage.key}")
        return TensorOnDisk(
            self._file, storage.key, storage.dtype, offset, shape=shape, stride=stride
        )


@dataclass(frozen=True)
class LateTensor:
    """A tensor of an object that is to be written, whose values are asked for when it is its turn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_torch(file: IO[bytes], value: Any, values: Callable[[str], torch.Tensor]) -> None:
    """Write what torch.load reads as ``value``, with a tensor in place of each `LateTensor`.

    values: returns that of a name; one is in memory at a time.
    """
    pickled = io.BytesIO()
    pickler = _LatePickler(pickled)
    pickler.dump(value)
    with zipfile.ZipFile(file, "w") as archive:
        _write_record(file, archive, "data.pkl", pickled.getbuffer())
        _write_record(file, archive, "byteorder", memoryview(b"little"))
        _write_record(file, archive, "version", memoryview(_VERSION))
        for number, late in enumerate(pickler.late):
            tensor = values(late.name)
            if tensor.dtype != late.dtype or tuple(tensor.shape) != late.shape:
                raise AssertionError(f"{late} was announced, and is {tensor.dtype}, {tensor.shape}")
            _write_record(file, archive, f"data/{number}", as_bytes(tensor))


def _write_record(file: IO[bytes], archive: zipfile.ZipFile, name: str, data: memoryview) -> None:
    """Write a record whose bytes begin where a tensor's may when the file is mapped."""
    info = zipfile.ZipInfo(f"{_ROOT}{name}")
    info.file_size = data.nbytes
    large = data.nbytes >= _LARGE
    # how the sizes of a large one are written
    before = _LOCAL.size + len(info.filename) + (_LARGE_HEADER if large else 0) + _EXTRA.size
    padding = -(file.tell() + before) % _ALIGNED
    info.extra = _EXTRA.pack(b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as entry:
        entry.write(data)


class _LatePickler(pickle.Pickler):
    """Numbers each `LateTensor`, in the order in which they are written."""

    def __init__(self, file: IO[bytes]):
        super().__init__(file, _PROTOCOL)
        self.late: list[LateTensor] = []

    def reducer_override(self, value: Any, /) -> Any:
        if not isinstance(value, LateTensor):
            return NotImplemented
        storage = _Storage(str(len(self.late)), value.dtype, math.prod(value.shape))
        self.late.append(value)
        hooks: OrderedDict[str, object] = OrderedDict()
        parts = (storage, 0, value.shape, _strides(value.shape), False, hooks)
        return torch._utils._rebuild_tensor_v2, parts

    def persistent_id(self, value: Any, /) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = next(name for name, dtype in _STORAGES.items() if dtype == value.dtype)
        return "storage", getattr(torch, kind), value.key, "cpu", value.count


def _first(value: Any, *others: object) -> Any:
    return value


def _made(make: Callable[..., Any], kind: object, arguments: Any, state: object) -> Any:
    """A tensor with attributes, without them."""
    return make(*arguments)


def _check_sum(file: IO[bytes], info: zipfile.ZipInfo) -> None:
    """Raise an error unless the bytes of a record are what was written."""
    if not info.CRC:  # written with set_crc32_options(False)
        return
    with zipfile.ZipFile(file) as archive, archive.open(info) as entry:
        while entry.read(_AT_ONCE):
            pass


def _natural(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements of a storage lie between the first and the last of a tensor."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
