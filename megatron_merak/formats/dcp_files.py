"""Stores of torch.distributed.checkpoint: read in parts, without its planners, and written in a stream.

    .metadata        a pickle: shape, dtype and chunks of each tensor, and the file and place of each chunk; last
    __R_N.distcp     the N-th file of rank R: a record of torch.save for each chunk or object

Files of a store that another program wrote are pickles: they are read by `pickles`, and only where that is allowed.
"""

import io
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..checkpoint.files import DTYPE_CODES, complete_or_absent, disk_errors
from ..checkpoint.shard import Intervals, local_shape, overlaps
from ..durable import make_directory
from ..errors import CheckpointError, DamagedError
from .pickles import REMEDY, FileSlice, read_pickle, read_torch, unpickling

METADATA = ".metadata"
SAVE_REMEDY = "Check the output directory, its permissions and its free space"

_FILE_BYTES = 5 << 30
_ZIP = b"PK"  # what a record of torch.save begins with


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor: where it begins, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class DcpTensor:
    """Shape and dtype of a tensor, and the boxes that tile it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], dtype: torch.dtype) -> "DcpTensor":
        """Return a tensor in one box."""
        shape = tuple(shape)
        return cls(shape, dtype, (StoredChunk((0,) * len(shape), shape),))


@dataclass(frozen=True)
class _Record:
    file: str
    start: int
    length: int


class DcpFiles:
    """One store, to be read.

    tensors: by name.
    objects: the names of what is no tensor.

    Raises CheckpointError for a directory that is none, one whose files are pickles without
    ``allow_pickle``, and a pickle that names what is not let through; DamagedError for records that
    are not in its files and chunks that do not tile their tensor.
    """

    def __init__(self, directory: Path, allow_pickle: bool):
        self.directory = directory
        self._open: tuple[str, BinaryIO] | None = None
        path = directory / METADATA
        if not path.is_file():
            raise CheckpointError(
                "checkpoint directory",
                directory,
                f"it has no {METADATA}, which a store of torch.distributed.checkpoint has",
                "Name the directory that its .distcp files are in",
            )
        if not allow_pickle:
            raise CheckpointError(
                "checkpoint directory",
                directory,
                "its files are pickles, and unpickling can run code",
                "Allow it with --allow-pickle (only tensors and plain settings are then unpickled)",
            )
        with unpickling(path), open(path, "rb") as file:
            metadata = read_pickle(file)
            described = dict(metadata.state_dict_metadata)
            places = dict(metadata.storage_data)
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: set[str] = set()
        self._records: dict[tuple[str, tuple[int, ...] | None], _Record] = {}
        with unpickling(path):
            for index, place in places.items():
                offsets = None if index.offset is None else tuple(index.offset)
                self._records[index.fqn, offsets] = self._record(index.fqn, place)
            for name, entry in described.items():
                if isinstance(entry, TensorStorageMetadata):
                    self.tensors[name] = self._tensor(name, entry)
                else:
                    self.objects.add(name)
                    if (name, None) not in self._records:
                        raise self._damaged(name, "it is in no file")

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        """Return a tensor, or its part at ``intervals`` along ``dim``; of its chunks, those are read
        that it overlaps, one at a time.
        """
        tensor = self.tensors[name]
        result = torch.empty(local_shape(tensor.shape, dim, intervals), dtype=tensor.dtype)
        for chunk in tensor.chunks:
            pairs = list(_shared(chunk, tensor.shape, dim, intervals))
            if not pairs:
                continue
            values = self._chunk(name, chunk, tensor.dtype)
            for take, put in pairs:
                result[put] = values[take]
        return result

    def object(self, name: str) -> Any:
        """Return what is no tensor; bytes where it is no record of torch.save."""
        record = self._records[name, None]
        with unpickling(self.directory / record.file, name):
            with self._slice(record) as part:
                data = part.read()
            return read_torch(io.BytesIO(data)) if data.startswith(_ZIP) else data

    def place(self, name: str) -> tuple:
        """Return a key to sort names by, so that reading in that order opens each file once."""
        tensor = self.tensors[name]
        first = self._records[name, tensor.chunks[0].offsets] if tensor.chunks else None
        return ("", 0, name) if first is None else (first.file, first.start, name)

    def close(self) -> None:
        """Close the open file; reading opens it again."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _record(self, name: str, place: Any) -> _Record:
        record = _Record(place.relative_path, place.offset, place.length)
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                "checkpoint directory",
                self.directory,
                f"{name} is stored by {place.transform_descriptors}, which is not read here",
                "Save it once more without extensions",
            )
        if os.path.basename(record.file) != record.file or record.file in ("", ".", ".."):
            raise self._damaged(name, f"its file {record.file!r} is outside of the directory")
        path = self.directory / record.file
        if not path.is_file():
            raise DamagedError(
                "checkpoint file", path, f"{name} is in it, but it is missing", REMEDY
            )
        size = path.stat().st_size
        if min(record.start, record.length) < 0 or record.start + record.length > size:
            reason = f"{name} would end at byte {record.start + record.length:,} of {size:,}"
            raise DamagedError("checkpoint file", path, reason, REMEDY)
        return record

    def _tensor(self, name: str, entry: TensorStorageMetadata) -> DcpTensor:
        chunks = tuple(
            StoredChunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks
        )
        tensor = DcpTensor(tuple(entry.size), entry.properties.dtype, chunks)
        if tensor.dtype not in DTYPE_CODES:
            raise CheckpointError(
                "tensor", name, f"its dtype {tensor.dtype} is not read here", "Save another one"
            )
        if problem := not_tiled(tensor):
            raise self._damaged(name, problem)
        for chunk in chunks:
            if (name, chunk.offsets) not in self._records and 0 not in chunk.shape:
                raise self._damaged(name, f"its part at {chunk.offsets} is in no file")
        return tensor

    def _chunk(self, name: str, chunk: StoredChunk, dtype: torch.dtype) -> torch.Tensor:
        record = self._records[name, chunk.offsets]
        path = self.directory / record.file
        with unpickling(path, name), self._slice(record) as part:
            values = read_torch(part)
            if not isinstance(values, torch.Tensor):
                raise self._damaged(name, f"its record is a {type(values).__name__}")
            if (tuple(values.shape), values.dtype) != (chunk.shape, dtype):
                raise self._damaged(
                    name,
                    f"its part at {chunk.offsets} has shape {tuple(values.shape)} and "
                    f"{values.dtype} where {chunk.shape} and {dtype} were said",
                )
            return values.detach()

    def _slice(self, record: _Record) -> io.BufferedReader:
        if self._open is None or self._open[0] != record.file:
            self.close()
            self._open = (record.file, open(self.directory / record.file, "rb"))
        return io.BufferedReader(FileSlice(self._open[1], record.start, record.length))

    def _damaged(self, name: str, reason: str) -> DamagedError:
        return DamagedError("tensor", f"{name} of {self.directory}", reason, REMEDY)


def not_tiled(tensor: DcpTensor) -> str:
    """Return why the chunks of a tensor do not cover each of its elements once; "" if they do."""
    for chunk in tensor.chunks:
        inside = len(chunk.offsets) == len(chunk.shape) == len(tensor.shape) and all(
            0 <= at and 0 <= size and at + size <= extent
            for at, size, extent in zip(chunk.offsets, chunk.shape, tensor.shape, strict=True)
        )
        if not inside:
            return f"its part at {chunk.offsets} of {chunk.shape} is not inside of {tensor.shape}"
    covered = sum(math.prod(chunk.shape) for chunk in tensor.chunks)
    if covered != math.prod(tensor.shape):
        return f"its parts have {covered:,} of {math.prod(tensor.shape):,} elements"
    boxes = [chunk for chunk in tensor.chunks if math.prod(chunk.shape)]
    if not _disjoint(boxes, 0):
        return "two of its parts overlap"
    return ""


def _disjoint(boxes: Sequence[StoredChunk], dim: int) -> bool:
    """Whether boxes that are not empty have no element in common, along ``dim`` and those after."""
    if len(boxes) < 2:
        return True
    if dim == len(boxes[0].shape):
        return False
    starts: dict[int, list[StoredChunk]] = {}
    for box in boxes:
        starts.setdefault(box.offsets[dim], []).append(box)
    open_boxes: list[StoredChunk] = []
    for start in sorted(starts):
        open_boxes = [box for box in open_boxes if box.offsets[dim] + box.shape[dim] > start]
        open_boxes += starts[start]
        if not _disjoint(open_boxes, dim + 1):
            return False
    return True


def _shared(
    chunk: StoredChunk, shape: tuple[int, ...], dim: int | None, intervals: Intervals
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield (slices of a chunk, slices of the result) of the elements that both have."""
    whole = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
    every = tuple(slice(0, size) for size in chunk.shape)
    if dim is None:
        yield every, whole
        return
    span = ((chunk.offsets[dim], chunk.offsets[dim] + chunk.shape[dim]),)
    for take, put in overlaps(shape, (dim, span), (dim, intervals)):
        yield (
            every[:dim] + (take[dim],) + every[dim + 1 :],
            whole[:dim] + (put[dim],) + whole[dim + 1 :],
        )


def write_dcp(
    directory: Path,
    tensors: Mapping[str, DcpTensor],
    values: Callable[[str, StoredChunk], torch.Tensor],
    objects: Mapping[str, Any],
    paths: Mapping[str, tuple] | None = None,
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write a store; it is one once `METADATA` is there, which comes last.

    directory:  made if it does not exist.
    tensors:    by name; they are written in this order.
    values:     called with a tensor's name and a chunk of it: its elements.
    objects:    what is no tensor, by name: anything that ``torch.save`` takes, or bytes as they are.
    paths:      the keys of the nested dictionary that a flat name stands for, by name.
    file_bytes: the most bytes of a file, but for the last record in it.

    Raises CheckpointError.
    """
    with disk_errors(directory, SAVE_REMEDY):
        make_directory(directory)
        places: dict[MetadataIndex, _StorageInfo] = {}
        with _Records(directory, file_bytes) as records:
            for name, tensor in tensors.items():
                assert not not_tiled(tensor), (name, not_tiled(tensor))
                for number, chunk in enumerate(tensor.chunks):
                    part = values(name, chunk).detach()
                    assert tuple(part.shape) == chunk.shape, (name, part.shape, chunk.shape)
                    # of a view, torch.save writes all that it is a view of
                    part = part.contiguous()
                    if part.untyped_storage().nbytes() != part.nbytes:
                        part = part.clone()
                    index = MetadataIndex(name, torch.Size(chunk.offsets), number)
                    places[index] = records.add(part)
            for name, content in objects.items():
                places[MetadataIndex(name)] = records.add(content)
        metadata = Metadata(
            state_dict_metadata={name: _described(tensor) for name, tensor in tensors.items()}
            | {name: BytesStorageMetadata() for name in objects},
            planner_data=None if paths is None else dict(paths),
            storage_data=places,
        )
        with complete_or_absent(directory / METADATA) as file:
            pickle.dump(metadata, file)


def _described(tensor: DcpTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape))
        for chunk in tensor.chunks
    ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=torch.Size(tensor.shape),
        chunks=chunks,
    )


class _Records:
    """Files of records, each of them on the disk once the next one is begun."""

    def __init__(self, directory: Path, file_bytes: int):
        self._directory = directory
        self._file_bytes = file_bytes
        self._count = 0
        self._file: BinaryIO | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "_Records":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, content: Any) -> _StorageInfo:
        """Append a record, and return where it is."""
        if self._file is None or self._file.tell() >= self._file_bytes:
            self._stack.close()
            self._name = f"__0_{self._count}.distcp"
            self._count += 1
            path = self._directory / self._name
            self._file = self._stack.enter_context(complete_or_absent(path))
        start = self._file.tell()
        if isinstance(content, bytes):
            self._file.write(content)
        else:
            # the records of torch.save are zip archives, whose places count from their own begin
            record = io.BytesIO()
            torch.save(content, record)
            self._file.write(record.getbuffer())
        return _StorageInfo(self._name, start, self._file.tell() - start)
