"""Megatron's indexed dataset: token ids back to back in PREFIX.bin, where they start and end in
PREFIX.idx.

Layout of the index, little-endian, with S sequences and D = documents + 1 document indices:

    offset         type      content
    0              9 bytes   b"MMIDIDX" and two zero bytes
    9              uint64    version, 1
    17             uint8     dtype code of the token ids (`DTYPES`)
    18, 26         uint64    S, D
    34             int32[S]  sequence lengths in tokens
    34 + 4S        int64[S]  byte offset of each sequence in PREFIX.bin
    34 + 12S       int64[D]  index of each document's first sequence: first 0, last S
    34 + 12S + 8D  int8[S]   sequence modes, in multimodal datasets only
"""

import hashlib
import mmap as memory_map
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ..durable import make_directory, rename, replaced, sync, sync_directory
from ..errors import DataError
from .files import atomic_writer, regular_file_size, temporary_name

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES: Mapping[int, np.dtype] = MappingProxyType(
    {
        code: np.dtype(name)
        for code, name in enumerate(
            ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1
        )
    }
)
REBUILD = "Build the dataset again with tools/preprocess_data.py"
# Entries checked at a time: bounds the memory that opening an index of any length takes.
CHUNK = 1 << 20
_ENDS = 1 << 16  # bytes of the first and of the last tokens in a fingerprint


def index_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def data_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron's writer picks: uint16 below 65500 token ids, int32 from there."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedDataset:
    """Read access to PREFIX.bin and PREFIX.idx.

    `sequence_lengths` int32[S], `sequence_pointers` int64[S], `document_indices` int64[D] and
    `sequence_modes` (int8[S] or None) are read-only views of the mapped index. `mmap=False` reads
    token ids with `pread` instead of mapping PREFIX.bin; both are safe to use from several threads.

    Raises `DataError` when either file is missing, the header is not understood, a table does not
    fit the size of the index, or an entry points outside PREFIX.bin. Nothing is allocated from a
    number that was not checked.
    """

    def __init__(self, prefix: str | Path, mmap: bool = True):
        self.prefix = str(prefix)
        path = index_path(prefix)
        size = regular_file_size(path, "index file")
        self._bin_size = regular_file_size(data_path(prefix), "data file")
        self._index = _map(path, size)
        self.dtype, sequences, documents, has_modes = _parse_header(
            path, self._index[: HEADER.size], size
        )
        self._set_tables(sequences, documents, has_modes)
        self._check_tables(path)
        self._tokens = _map(data_path(prefix), self._bin_size) if mmap else None
        self._file = None if mmap else open(data_path(prefix), "rb", buffering=0)

    def _set_tables(self, sequences: int, documents: int, has_modes: bool) -> None:
        offset = HEADER.size
        tables = []
        for dtype, count in (
            ("<i4", sequences),
            ("<i8", sequences),
            ("<i8", documents),
            ("i1", sequences * has_modes),
        ):
            tables.append(
                np.frombuffer(self._index, dtype, count, offset) if count else np.empty(0, dtype)
            )
            offset += tables[-1].nbytes
        self.sequence_lengths, self.sequence_pointers, self.document_indices, modes = tables
        self.sequence_modes = modes if has_modes else None

    def _check_tables(self, path: Path) -> None:
        item = self.dtype.itemsize
        for start in range(0, len(self), CHUNK):
            lengths = self.sequence_lengths[start : start + CHUNK].astype(np.int64)
            pointers = self.sequence_pointers[start : start + CHUNK]
            # Compared without adding up, since a hostile pointer may overflow int64.
            bad = (
                (lengths < 0)
                | (pointers < 0)
                | (pointers % item != 0)
                | (pointers > self._bin_size - lengths * item)
            )
            if bad.any():
                i = int(bad.argmax())
                reason = (
                    f"sequence {start + i} has {lengths[i]} tokens of {item} bytes at byte "
                    f"{pointers[i]}, which does "
                    f"not lie in the {self._bin_size} bytes of {data_path(self.prefix).name}"
                )
                raise DataError("index file", path, reason, REBUILD)
        documents = self.document_indices
        if (
            documents[0] != 0
            or documents[-1] != len(self)
            or (documents[1:] < documents[:-1]).any()
        ):
            reason = f"document indices do not ascend from 0 to the {len(self)} sequences"
            raise DataError("index file", path, reason, REBUILD)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of sequence `index`; `length` None means up to
        its end.
        """
        total = int(self.sequence_lengths[index])
        length = total - offset if length is None else length
        if not 0 <= offset <= offset + length <= total:
            raise IndexError(f"tokens [{offset}, {offset + length}) of a sequence of {total}")
        return self._read(int(self.sequence_pointers[index]) + offset * self.dtype.itemsize, length)

    def __getitem__(self, key: int | slice) -> np.ndarray | list[np.ndarray]:
        """One sequence, or the list of the sequences of a contiguous slice."""
        if not isinstance(key, slice):
            return self.get(key)
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"slices of an indexed dataset must be contiguous, not of step {step}")
        return [self.get(i) for i in range(start, stop)]

    def _read(self, pointer: int, count: int) -> np.ndarray:
        if count == 0:
            return np.empty(0, self.dtype)
        if self._tokens is not None:
            return np.frombuffer(self._tokens, self.dtype, count, pointer)
        assert self._file is not None, "either mapped or open"
        data = os.pread(self._file.fileno(), count * self.dtype.itemsize, pointer)
        if len(data) != count * self.dtype.itemsize:
            raise DataError(
                "data file", data_path(self.prefix), "it shrank while it was being read", REBUILD
            )
        return np.frombuffer(data, self.dtype)

    def fingerprint(self) -> str:
        """Digest of both file sizes, of the first and last MiB of the index and of the first and
        last 64 KiB of the
        tokens: tells that a dataset was exchanged."""
        digest = hashlib.sha256(struct.pack("<QQ", len(self._index), self._bin_size))
        digest.update(self._index[: 1 << 20])
        digest.update(self._index[-(1 << 20) :])
        ends = _ENDS // self.dtype.itemsize
        tokens = min(self._bin_size // self.dtype.itemsize, ends)
        for pointer in (0, self._bin_size // self.dtype.itemsize - tokens):
            digest.update(self._read(pointer * self.dtype.itemsize, tokens).tobytes())
        return digest.hexdigest()[:32]

    def __reduce__(self) -> tuple:
        """Pickled, as for the worker processes of a loader, it is opened again where it arrives."""
        return type(self), (self.prefix, self._tokens is not None)


def check_header(path: Path, size: int) -> None:
    """Raise `DataError` unless an index of `size` bytes begins as one, and has the size that it
    says.
    """
    with open(path, "rb") as file:
        _parse_header(path, file.read(HEADER.size), size)


def _map(path: Path, size: int) -> memory_map.mmap | bytes:
    if size == 0:
        return b""
    with open(path, "rb") as file:
        return memory_map.mmap(file.fileno(), size, access=memory_map.ACCESS_READ)


def _parse_header(path: Path, header: bytes, size: int) -> tuple[np.dtype, int, int, bool]:
    """Return (token dtype, S, D, has modes) of an index of `size` bytes."""
    if len(header) < HEADER.size:
        raise DataError(
            "index file",
            path,
            f"{size} bytes are fewer than the {HEADER.size} bytes of a header",
            REBUILD,
        )
    magic, version, code, sequences, documents = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(
            "index file",
            path,
            f"it starts with {magic!r} instead of {MAGIC!r}",
            "Give --data-path the prefix of a .bin and .idx pair written by "
            "tools/preprocess_data.py",
        )
    if version != VERSION:
        raise DataError(
            "index file", path, f"its version is {version}; only {VERSION} is supported", REBUILD
        )
    if code not in DTYPES or DTYPES[code].kind == "f":
        raise DataError("index file", path, f"dtype code {code} is not an integer type", REBUILD)
    expected = HEADER.size + 12 * sequences + 8 * documents
    if documents < 1 or size not in (expected, expected + sequences):
        reason = (
            f"it has {size} bytes, while {sequences} sequences and {documents} document indices "
            f"take {expected} "
            f"(or {expected + sequences} with modes)"
        )
        raise DataError("index file", path, reason, REBUILD)
    return DTYPES[code], sequences, documents, sequences > 0 and size == expected + sequences


def write_index(
    prefix: str | Path,
    dtype: np.dtype,
    lengths: np.ndarray,
    document_indices: np.ndarray,
    aside: Path | None = None,
) -> None:
    """Write PREFIX.idx of sequences that lie back to back in PREFIX.bin.

    lengths: int64, in tokens of ``dtype``.
    aside:   the file's name until it is whole; None: one beside it.
    """
    codes = {known: code for code, known in DTYPES.items()}
    longest = int(lengths.max(initial=0))
    if longest > np.iinfo(np.int32).max:
        reason = f"sequence {lengths.argmax()} has {longest} tokens, an index holds 2147483647"
        raise DataError("dataset", prefix, reason, "Cut its document into several")
    ends = np.cumsum(lengths) * dtype.itemsize
    path = index_path(prefix)
    with atomic_writer(path) if aside is None else replaced(path, aside) as file:
        file.write(HEADER.pack(MAGIC, VERSION, codes[dtype], len(lengths), len(document_indices)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths * dtype.itemsize).astype("<i8").tobytes())
        file.write(document_indices.astype("<i8").tobytes())


class IndexedDatasetWriter:
    """Write PREFIX.bin and PREFIX.idx; use it as a context manager.

    Both files are written under temporary names and appear when the block ends without an error,
    the index last, so that an index never describes a data file of another run.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type | str):
        self.prefix = prefix
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in DTYPES.values() and self.dtype.kind != "f", (
            f"{dtype} is no integer type of the format"
        )
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._temporary = temporary_name(data_path(prefix))
        make_directory(self._temporary.parent)
        self._file = open(self._temporary, "wb")

    def add_document(
        self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None
    ) -> None:
        """Append one document; `lengths` cuts it into sequences (default: one sequence holds it
        all).
        """
        self._append(tokens, [len(tokens)] if lengths is None else lengths)
        self._document_indices.append(len(self._lengths))

    def _append(
        self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray
    ) -> None:
        ids = np.asarray(tokens, dtype=np.int64 if len(tokens) == 0 else None)
        limits = np.iinfo(self.dtype)
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            reason = (
                f"token ids from {ids.min()} to {ids.max()}, at document "
                f"{self.documents}, do not fit"
            )
            raise DataError(
                "dtype",
                self.dtype.name,
                reason,
                "Pass a dtype for the complete vocabulary to the writer",
            )
        counts = [int(length) for length in lengths]
        assert sum(counts) == ids.size, (
            f"sequence lengths {counts} do not add up to {ids.size} tokens"
        )
        self._file.write(ids.astype(self.dtype).tobytes())
        self._lengths.extend(counts)

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append every document of another dataset of the same dtype, in its order."""
        if other.dtype != self.dtype:
            reason = f"its token ids are {other.dtype.name}, those of the output {self.dtype.name}"
            raise DataError("dataset", other.prefix, reason, "Merge datasets of one dtype")
        shift = len(self._lengths)
        for start in range(0, len(other), 1024):
            self._file.write(
                b"".join(sequence.tobytes() for sequence in other[start : start + 1024])
            )
        self._lengths.extend(other.sequence_lengths.tolist())
        self._document_indices.extend((other.document_indices[1:] + shift).tolist())

    @property
    def documents(self) -> int:
        return len(self._document_indices) - 1

    def finalize(self) -> None:
        """Publish both files."""
        sync(self._file)
        self._file.close()
        index_path(self.prefix).unlink(missing_ok=True)
        sync_directory(self._temporary.parent)  # no old index comes back beside the new tokens
        rename(self._temporary, data_path(self.prefix))
        lengths = np.array(self._lengths, dtype="<i8")
        write_index(self.prefix, self.dtype, lengths, np.array(self._document_indices))

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.finalize()
        else:
            self._file.close()
            self._temporary.unlink(missing_ok=True)
