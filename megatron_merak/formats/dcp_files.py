"""A store of torch.distributed.checkpoint: its tensors in chunks, read and written one at a time.

    DIR/.metadata          a pickle: names, shapes, chunks, and where each of them is stored
        __RANK_N.distcp    records, each what torch.save wrote of one chunk or of one object

Nothing here is trusted. The pickle is read with stand-ins for the few classes that it needs, which
run nothing, and records are unpickled as torch reads weights, once their bytes have the sums that
were written with them. All that `.metadata` says of shapes and files is checked before the first
record is read. Functions are local to one process.
"""

import io
import math
import os
import pickle
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch

from ..checkpoint.files import disk_errors
from ..checkpoint.foreign import METADATA
from ..checkpoint.shard import Intervals, local_shape
from ..durable import aside_of, check_free, make_directory, replaced, sync_directory
from ..errors import CheckpointError, DamagedError, MerakError
from .dcp_chunks import DcpTensor, StoredChunk, pieces, untiled
from .dcp_pickle import RESTORE, classes_of_values, read_metadata, why

__all__ = ["METADATA", "SUFFIX", "DcpFiles", "DcpTensor", "StoredChunk", "write_dcp"]

SUFFIX = ".distcp"
FILE_BYTES = 5 << 30  # of one file, unless a chunk is larger

_REMEDY = "Check the output directory, its permissions and its free space"
_ZIP = b"PK\x03\x04"
_RECORD = 1 << 14  # bytes of a record beside those of its tensor, and of a tensor in .metadata
_AT_ONCE = 1 << 20  # bytes that are compared with their sum at once
_WHENCE = (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END)


@dataclass(frozen=True)
class _Stored:
    """Where a chunk or an object is stored."""

    file: str
    offset: int
    length: int


class DcpFiles:
    """One store.

    directory:    that has the `.metadata`.
    allow_pickle: whether its pickles may be read, with what they may name restricted.

    Attributes: ``tensors`` by name, and ``objects``, the names of all else.

    Raises `CheckpointError` for a directory that is no store or whose pickle may not be read, and
    `DamagedError` for a `.metadata` that cannot be parsed, contradicts itself, has chunks that do
    not tile a tensor, or leads to files that are missing or too short.
    """

    def __init__(self, directory: Path, allow_pickle: bool):
        self.directory = Path(directory)
        path = self.directory / METADATA
        self._check_there(path)
        if not allow_pickle:
            reason = "its .metadata is a pickle, and unpickling can run code"
            remedy = (
                "Allow it with --allow-pickle (only the names that "
                "torch.distributed.checkpoint uses are then unpickled)"
            )
            raise CheckpointError("store", os.fspath(directory), reason, remedy)
        metadata = read_metadata(path)
        self._path = path
        self._records = self._storage(getattr(metadata, "storage_data", None))
        entries = getattr(metadata, "state_dict_metadata", None)
        if not isinstance(entries, dict):
            raise self._bad("it lists no tensors")
        tensors = {}
        objects = []
        for name, entry in entries.items():
            kind = type(entry).__name__
            if not _is_text(name):
                raise self._bad(f"it has an entry of the name {name!r:.60}")
            if kind == "TensorStorageMetadata":
                tensors[name] = self._tensor(name, entry)
            elif kind == "BytesStorageMetadata":
                self._record(name, None)
                objects.append(name)
            else:
                raise self._bad(f"its entry {name} is a {kind}")
        self._check_files()
        self.tensors: Mapping[str, DcpTensor] = tensors
        self.objects = frozenset(objects)

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        """Return the index ranges ``intervals`` along ``dim`` of a tensor, concatenated; by default
        the full tensor.

        Only chunks that overlap them are read, one at a time. Raises `DamagedError` for a record
        that is not what `.metadata` says.
        """
        tensor = self.tensors[name]
        chunks = [chunk for chunk in tensor.chunks if math.prod(chunk.shape)]
        if dim is None and len(chunks) == 1:
            return self._chunk(name, tensor.dtype, chunks[0])
        values = torch.empty(local_shape(tensor.shape, dim, intervals), dtype=tensor.dtype)
        for chunk in chunks:
            shared = list(pieces(chunk, dim, intervals))
            if shared:
                stored = self._chunk(name, tensor.dtype, chunk)
                for put, take in shared:
                    values[put] = stored[take]
        return values

    def object(self, name: str, allowed: Sequence[Any] = ()) -> Any:
        """Return an object: numbers, text, tensors and containers of them.

        allowed: further classes, or (class, name in the pickle), as of
                 ``torch.serialization.safe_globals``.

        Raises `CheckpointError` for one that needs any other class.
        """
        record = self._record(name, None)
        with torch.serialization.safe_globals([*classes_of_values(), *allowed]):
            return self._load(record, f"object {name}")

    def place(self, name: str) -> tuple:
        """Return a key to sort names by, so that reading in that order goes through each file
        once.
        """
        records = [self._record(name, c) for c in self.tensors[name].chunks if math.prod(c.shape)]
        return min(
            ((record.file, record.offset, name) for record in records), default=("", 0, name)
        )

    def close(self) -> None:
        """Do nothing: files are open while a record is read."""

    def _check_there(self, path: Path) -> None:
        if not self.directory.is_dir():
            remedy = "Give the directory of a store, with its .metadata"
            raise CheckpointError("store", os.fspath(path.parent), "it is not a directory", remedy)
        if not os.path.lexists(path):
            reason = "it has no .metadata, which is written last"
            if os.path.lexists(self.directory / f"__0{METADATA}"):
                reason = (
                    "each rank wrote a .metadata of its own (no_dist, or use_collectives=False)"
                )
            remedy = "Give the directory of a store that is complete"
            raise CheckpointError("store", os.fspath(path.parent), reason, remedy)

    def _bad(self, reason: str) -> DamagedError:
        return DamagedError("file", os.fspath(self._path), reason, RESTORE)

    def _storage(self, stored: Any) -> dict[tuple[str, tuple[int, ...] | None], _Stored]:
        """Return the record of each (name, offsets); the offsets of an object are None."""
        if not isinstance(stored, dict):
            raise self._bad("it does not say where anything is stored")
        records = {}
        for index, info in stored.items():
            name = getattr(index, "fqn", None)
            offsets = getattr(index, "offset", None)
            file = getattr(info, "relative_path", None)
            numbers: Any = (getattr(info, "offset", None), getattr(info, "length", None))
            if not _is_text(name) or not (offsets is None or _natural(offsets)):
                raise self._bad(f"it stores {name!r:.60} at {offsets!r:.60}")
            if not _natural(numbers):
                raise self._bad(f"the record of {name} is at {numbers!r:.60}")
            if not isinstance(file, str) or not _is_plain(file):
                reason = f"it leads to {file!r:.100} for {name}, which is no file of this directory"
                raise self._bad(reason)
            if getattr(info, "transform_descriptors", None):
                reason = f"the record of {name} was transformed by an extension"
                remedy = "Save it again without extensions"
                raise CheckpointError("store", os.fspath(self.directory), reason, remedy)
            records[name, offsets] = _Stored(file, *numbers)
        return records

    def _tensor(self, name: str, entry: Any) -> DcpTensor:
        shape: Any = getattr(entry, "size", None)
        dtype = getattr(getattr(entry, "properties", None), "dtype", None)
        if not _natural(shape) or not isinstance(dtype, torch.dtype):
            raise self._bad(f"tensor {name} has shape {shape!r:.60} and dtype {dtype!r:.60}")
        chunks: dict[StoredChunk, None] = {}
        listed = getattr(entry, "chunks", None)
        for each in listed if isinstance(listed, list) else [None]:
            chunk = StoredChunk(getattr(each, "offsets", ()), getattr(each, "sizes", ()))
            if each is None or not _natural(chunk.offsets) or not _natural(chunk.shape):
                raise self._bad(f"tensor {name} has a chunk at {chunk!r:.100}")
            chunks[chunk] = None
        tensor = DcpTensor(shape, dtype, tuple(chunks))
        if reason := untiled(tensor):
            raise self._bad(
                f"the chunks of tensor {name} of shape {shape} do not tile it: {reason}"
            )
        for chunk in tensor.chunks:
            nbytes = math.prod(chunk.shape) * dtype.itemsize
            if nbytes and self._record(name, chunk).length < nbytes:
                length = self._record(name, chunk).length
                reason = f"a chunk of tensor {name} has {nbytes} bytes, and its record {length}"
                raise self._bad(reason)
        return tensor

    def _record(self, name: str, chunk: StoredChunk | None) -> _Stored:
        offsets = None if chunk is None else chunk.offsets
        record = self._records.get((name, offsets))
        if record is None and offsets is not None and not any(offsets):
            record = self._records.get((name, None))
        if record is None:
            at = "" if offsets is None else f" at {offsets}"
            raise self._bad(f"it does not say where {name}{at} is stored")
        return record

    def _check_files(self) -> None:
        """Raise `DamagedError` unless every record lies within a regular file of the directory."""
        home = self.directory.resolve()
        sizes = {}
        for file in sorted({record.file for record in self._records.values()}):
            path = self.directory / file
            try:
                status = os.stat(path)
                real = path.resolve(strict=True)
            except OSError as error:
                reason = f"{error.strerror or error}, and .metadata needs it"
                raise DamagedError("file", os.fspath(path), reason, RESTORE) from error
            if not stat.S_ISREG(status.st_mode) or not real.is_relative_to(home):
                reason = "it is no regular file of the store"
                raise DamagedError("file", os.fspath(path), reason, RESTORE)
            sizes[file] = status.st_size
        for (name, _), record in self._records.items():
            if record.offset + record.length > sizes[record.file]:
                end = record.offset + record.length
                reason = (
                    f"it has {sizes[record.file]} bytes, and the record of {name} ends at {end}"
                )
                path = self.directory / record.file
                raise DamagedError("file", os.fspath(path), reason, RESTORE)

    def _chunk(self, name: str, dtype: torch.dtype, chunk: StoredChunk) -> torch.Tensor:
        record = self._record(name, chunk)
        value = self._load(record, f"tensor {name}")
        if type(value) is not torch.Tensor or value.layout != torch.strided:
            found = f"a {type(value).__name__}"
        elif value.dtype != dtype or tuple(value.shape) != chunk.shape:
            found = f"{value.dtype} of shape {tuple(value.shape)}"
        else:
            return value
        reason = (
            f"the record of {name} at {chunk.offsets} holds {found} where .metadata says "
            f"{dtype} of shape {chunk.shape}"
        )
        raise DamagedError("file", os.fspath(self.directory / record.file), reason, RESTORE)

    def _load(self, record: _Stored, what: str) -> Any:
        path = self.directory / record.file
        try:
            with open(path, "rb") as file:
                part: Any = _Slice(file, record.offset, record.length)
                if part.read(len(_ZIP)) != _ZIP:
                    reason = f"the record of {what} is not what torch.save writes"
                    raise DamagedError("file", os.fspath(path), reason, RESTORE)
                _check_sums(part)
                part.seek(0)
                return torch.load(part, map_location="cpu", weights_only=True)
        except (MerakError, MemoryError):
            raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise DamagedError("file", os.fspath(path), reason, RESTORE) from error
        except pickle.UnpicklingError as error:
            reason = f"the record of {what} needs more than values ({why(error)})"
            raise CheckpointError("file", os.fspath(path), reason, RESTORE) from error
        except Exception as error:
            reason = f"the record of {what} cannot be read ({why(error)})"
            raise DamagedError("file", os.fspath(path), reason, RESTORE) from error


def write_dcp(
    directory: Path,
    tensors: Mapping[str, DcpTensor],
    values: Callable[[str, StoredChunk], torch.Tensor],
    objects: Mapping[str, Any],
    file_bytes: int = FILE_BYTES,
    aliases: Mapping[str, str] | None = None,
    paths: Mapping[str, Sequence[str | int]] | None = None,
) -> None:
    """Write a store that ``torch.distributed.checkpoint.load`` opens, with any number of ranks.

    directory:  made if it is missing. What another store had there under the same names is
                replaced, its `.metadata` first of all; it is complete once the new one is there.
    tensors:    by name, in the order in which their chunks are asked for.
    values:     returns a chunk, contiguous or not; one is in memory at a time.
    objects:    by name: numbers, text and containers of them.
    file_bytes: after which the next file begins.
    aliases:    further names of tensors and objects, which are stored once.
    paths:      by name, the keys of nested dictionaries that it is made of, for tools that restore
                these from the store alone; joined by dots they are the name.

    If it fails, the files that it wrote are removed. Raises `CheckpointError`, also for chunks that
    do not tile a tensor or are not as ``tensors`` says.
    """
    for name, tensor in tensors.items():
        if reason := untiled(tensor):
            raise CheckpointError("tensor", name, reason, "Give chunks that tile it")
    nbytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors.values())
    nbytes += _RECORD * sum(len(each.chunks) for each in tensors.values())
    with disk_errors(directory, _REMEDY, nbytes):
        make_directory(directory)
        check_free(directory, nbytes, "output directory", "Free some space, or save elsewhere")
        (directory / METADATA).unlink(missing_ok=True)
        sync_directory(directory)
        files = _Files(directory, file_bytes)
        try:
            for name, each in objects.items():
                files.add(name, None, each)
            for name, tensor in tensors.items():
                for chunk in tensor.chunks:
                    files.add(name, chunk.offsets, _checked(name, tensor, chunk, values))
            files.close()
            _write_metadata(directory, tensors, files.records, aliases or {}, paths)
        except BaseException:
            files.remove()
            raise


class _Files:
    """The files of a store that is being written."""

    def __init__(self, directory: Path, limit: int):
        self.records: dict[tuple[str, tuple[int, ...] | None], _Stored] = {}
        self._directory = directory
        self._limit = limit
        self._names: list[str] = []
        self._open: Any = None
        self._file: IO[bytes] | None = None

    def add(self, name: str, offsets: tuple[int, ...] | None, value: Any) -> None:
        """Append what torch.save writes of a value."""
        if self._file is not None and self._file.tell() >= self._limit:
            self.close()
        if self._file is None:
            self._names.append(f"__0_{len(self._names)}{SUFFIX}")
            self._open = replaced(self._directory / self._names[-1])
            self._file = self._open.__enter__()
        start = self._file.tell()
        tail: Any = _Tail(self._file)
        torch.save(value, tail)
        length = self._file.tell() - start
        self.records[name, offsets] = _Stored(self._names[-1], start, length)

    def close(self) -> None:
        """Give the file that is open its name, once it is on the disk."""
        if self._file is not None:
            self._file = None
            self._open.__exit__(None, None, None)

    def remove(self) -> None:
        """Remove every file."""
        if self._file is not None:
            self._file.close()
        for name in self._names:
            path = self._directory / name
            for each in (aside_of(path), path):
                with suppress(OSError):
                    each.unlink()


class _Tail(io.RawIOBase):
    """A file for torch.save, which would else close it."""

    def __init__(self, file: IO[bytes]):
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


class _Slice(io.RawIOBase):
    """A range of a file that cannot be left."""

    def __init__(self, file: IO[bytes], offset: int, length: int):
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = (0, self._at, self._length)[_WHENCE.index(whence)]
        self._at = min(max(0, base + offset), self._length)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._length - self._at
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._offset + self._at)
        with memoryview(buffer).cast("B") as every, every[: self._length - self._at] as view:
            count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count


def _check_sums(part: Any) -> None:
    """Raise an error for a record with a byte that is not what was written; torch compares none."""
    with zipfile.ZipFile(part) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} in it is compressed")
            if not info.CRC:  # written with set_crc32_options(False)
                continue
            with archive.open(info) as entry:
                while entry.read(_AT_ONCE):
                    pass


def _checked(
    name: str,
    tensor: DcpTensor,
    chunk: StoredChunk,
    values: Callable[[str, StoredChunk], torch.Tensor],
) -> torch.Tensor:
    """Return a chunk without the memory around it, which torch.save would write too."""
    value = values(name, chunk).detach().cpu()
    if value.dtype != tensor.dtype or tuple(value.shape) != chunk.shape:
        reason = (
            f"its chunk at {chunk.offsets} is {value.dtype} of shape {tuple(value.shape)}, not "
            f"{tensor.dtype} of shape {chunk.shape}"
        )
        raise CheckpointError("tensor", name, reason, "Give the weights of this model")
    value = value.contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _write_metadata(
    directory: Path,
    tensors: Mapping[str, DcpTensor],
    records: Mapping[tuple[str, tuple[int, ...] | None], _Stored],
    aliases: Mapping[str, str],
    paths: Mapping[str, Sequence[str | int]] | None,
) -> None:
    from torch.distributed.checkpoint import metadata as of_torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        names.setdefault(name, []).append(alias)
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for each in (name, *names.get(name, ())):
            entries[each] = of_torch.TensorStorageMetadata(
                of_torch.TensorProperties(dtype=tensor.dtype),
                torch.Size(tensor.shape),
                [
                    of_torch.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.shape))
                    for c in tensor.chunks
                ],
            )
    storage = {}
    numbers: Counter[str] = Counter()
    for (name, offsets), record in records.items():
        info = _StorageInfo(record.file, record.offset, record.length)
        number = None if offsets is None else numbers[name]
        numbers[name] += 1
        for each in (name, *names.get(name, ())):
            entries.setdefault(each, of_torch.BytesStorageMetadata())
            storage[of_torch.MetadataIndex(each, offsets, number)] = info
    planned = None if paths is None else {name: tuple(path) for name, path in paths.items()}
    metadata = of_torch.Metadata(entries, planned, storage)
    with replaced(directory / METADATA) as file:
        pickle.dump(metadata, file, protocol=4)


def _natural(values: Any) -> bool:
    return isinstance(values, tuple) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.isprintable()


def _is_plain(file: str) -> bool:
    return file not in ("", ".", "..") and not {*file} & {"/", "\\"} and file.isprintable()
