"""Raw documents from files, each with its position."""

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import DataError
from ..extras import installed_by, is_installed
from .files import regular_file_size
from .input_flags import PREPROCESS, InputFlags
from .saved_datasets import saved_dataset, saved_files
from .table_rows import TABLE_SUFFIXES, table_rows
from .tar_shards import TAR_SUFFIXES, is_tar, shard_members
from .zstd_file import ZstdFile

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)
PACKED_SUFFIXES = (".gz", ".zst")

_NAMED = 5  # keys of a document in one message


class Reached(NamedTuple):
    """How far the files of a run are read.

    file: number of files that are done with.
    line: lines or rows of the next one that are done with.
    end:  bytes of it on the disk that those took; of a packed file or a table, about.
    """

    file: int = 0
    line: int = 0
    end: int = 0


BEGINNING = Reached()


Unpacked = IO[bytes] | io.BufferedIOBase


class Raw(NamedTuple):
    """One document in a file: a line, or (`line` None) all of the file `source`.

    after:   how far the files are read with it.
    is_json: whether it is a JSON object, else text; lines are.
    """

    source: str
    line: int | None
    data: bytes
    after: Reached = BEGINNING
    is_json: bool = False

    @property
    def is_object(self) -> bool:
        return self.is_json or self.line is not None

    @property
    def place(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


def input_files(path: Path, split: str | None = None, flags: InputFlags = PREPROCESS) -> list[Path]:
    """Return `path` itself, or every file of a known kind below a directory, sorted by name. Raises
    `DataError`.

    split: of saved DatasetDicts, the one whose files are taken.
    flags: for errors.
    """
    if not path.is_dir():
        regular_file_size(path, flags.files, flags.files)
        return [path]
    files = list(_below(path, split, flags))
    if not files:
        known = ", ".join(JSON_SUFFIXES + TEXT_SUFFIXES)
        tables = ", ".join(TABLE_SUFFIXES + TAR_SUFFIXES)
        raise DataError(
            flags.files,
            path,
            f"no file below it ends in {known}, with or without {' or '.join(PACKED_SUFFIXES)}, or "
            f"in {tables}",
            "Give other files",
        )
    return files


def _below(directory: Path, split: str | None, flags: InputFlags) -> Iterator[Path]:
    if (saved := saved_dataset(directory, split, flags)) is not None:
        yield from saved_files(saved, flags)
        return
    for entry in sorted(directory.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            yield from _below(entry, split, flags)
        elif entry.is_file() and _kind(entry) is not None:
            yield entry


def _kind(path: Path) -> str | None:
    suffix = path.with_suffix("").suffix if path.suffix in PACKED_SUFFIXES else path.suffix
    packed = suffix in JSON_SUFFIXES + TEXT_SUFFIXES
    return suffix if packed or path.suffix in TABLE_SUFFIXES or is_tar(path) else None


def read_documents(
    path: Path,
    keys: Sequence[str] = ("text",),
    start: Reached = BEGINNING,
    flags: InputFlags = PREPROCESS,
) -> Iterator[Raw]:
    """Yield the documents of one file: a .txt file is one document, tables have one in a row, shards
    one per sample, and others one JSON object per line.

    .gz and .zst are unpacked and blank lines are skipped. Raises `DataError` naming the line after
    which a file cannot be read.

    keys:  columns of a table that are read.
    start: how far the files are read already; this is the one that is next.
    flags: for errors.
    """
    if path.suffix in TABLE_SUFFIXES:
        for row in table_rows(path, keys, start.line, flags):
            yield Raw(str(path), row.number, row.data, Reached(start.file, row.number, row.end))
        return
    line = start.line
    try:
        with ExitStack() as stack:
            disk = stack.enter_context(open(path, "rb"))
            file = _unpacked(stack, disk, path, flags)
            if is_tar(path):
                yield from _samples(path, file, start, file is disk, flags)
                return
            if _kind(path) in TEXT_SUFFIXES:
                yield Raw(str(path), None, file.read(), Reached(start.file + 1))
                return
            if file is disk:
                yield from _lines(path, disk, start, flags)
                return
            for number, data in enumerate(file, start=1):
                line = number
                if number > start.line and data.strip():
                    yield Raw(str(path), number, data, Reached(start.file, number, disk.tell()))
    except (OSError, EOFError) as error:
        raise _broken_off(path, f"line {line}", error, flags) from error


def in_order(
    files: Sequence[Path],
    keys: Sequence[str] = ("text",),
    partitions: int = 1,
    start: Reached = BEGINNING,
    read: int = 0,
) -> Iterator[Raw]:
    """Yield the documents of files in the order in which they are written.

    With N partitions that is the order of Megatron-LM's tool, which deals lines out to N files and
    joins what these become: documents 0, N, 2N and so on, then 1, N + 1 and so on. The files are
    read once for each partition; places count them on from one reading to the next.

    start: where the files are read already, without partitions.
    read:  how many documents are read already, with several.
    """
    if partitions > 1:
        yield from islice(_dealt_out(files, keys, partitions), read, None)
        return
    for number, file in enumerate(files[start.file :], start=start.file):
        yield from read_documents(file, keys, start if number == start.file else Reached(number))


def _dealt_out(files: Sequence[Path], keys: Sequence[str], partitions: int) -> Iterator[Raw]:
    for partition in range(partitions):
        seen = 0
        for number, file in enumerate(files, start=partition * len(files)):
            for raw in read_documents(file, keys, Reached(number)):
                if seen % partitions == partition:
                    yield raw
                seen += 1


def _lines(path: Path, file: IO[bytes], start: Reached, flags: InputFlags) -> Iterator[Raw]:
    """Yield the lines of a file that is not packed, from where it was left."""
    line = start.line
    end = start.end
    try:
        file.seek(end)
        for data in file:
            line += 1
            end += len(data)
            if data.strip():
                yield Raw(str(path), line, data, Reached(start.file, line, end))
    except OSError as error:
        raise _broken_off(path, f"line {line}", error, flags) from error


def _samples(
    path: Path, file: Unpacked, start: Reached, seekable: bool, flags: InputFlags
) -> Iterator[Raw]:
    """Yield the samples of a shard, from where it was left."""
    number = start.line
    try:
        for member in shard_members(file, start.line, start.end if seekable else 0):
            number = member.number
            after = Reached(start.file, number, member.end if seekable else 0)
            yield Raw(f"{path}:{member.name}", None, member.data, after, member.is_json)
    except (OSError, EOFError) as error:
        raise _broken_off(path, f"sample {number}", error, flags) from error


def _broken_off(path: Path, last: str, error: Exception, flags: InputFlags) -> DataError:
    reason = f"reading failed after {last} ({error})"
    return DataError(flags.files, path, reason, "Copy or unpack the file again")


def _unpacked(stack: ExitStack, disk: IO[bytes], path: Path, flags: InputFlags) -> Unpacked:
    if path.suffix == ".gz":
        return stack.enter_context(gzip.GzipFile(fileobj=disk))
    if path.suffix != ".zst":
        return disk
    if not is_installed("zstandard"):
        remedy = f"Install it: {installed_by('inputs')}; or unpack the file"
        raise DataError(flags.files, path, "zstandard is not installed", remedy)
    return stack.enter_context(io.BufferedReader(ZstdFile(disk), 1 << 20))


def parse_document(raw: Raw, keys: Sequence[str], flags: InputFlags = PREPROCESS) -> list[str]:
    """Return the texts of `raw` under `keys`; a text file is the text of every key. Raises
    ValueError with the reason, which has names of ``flags``.
    """
    text = _text(raw)
    if not raw.is_object:
        return [text] * len(keys)
    document = _object(text)
    texts = []
    for key in keys:
        value = document.get(key)
        if key not in document:
            raise ValueError(_missing(document, key, flags))
        if not isinstance(value, str):
            raise ValueError(f"the value of {key!r} is no string")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"the value of {key!r} holds half a surrogate pair")
        texts.append(value)
    return texts


def parse_conversation(raw: Raw, key: str) -> tuple[Any, Any]:
    """Return what `raw` has under `key`, messages, and the tools that it names, None where it names
    none. Raises ValueError with the reason.
    """
    if not raw.is_object:
        raise ValueError("a text file is no conversation")
    document = _object(_text(raw))
    if key not in document:
        raise ValueError(_missing(document, key, PREPROCESS))
    return document[key], document.get("tools")


def _text(raw: Raw) -> str:
    try:
        return raw.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def _missing(document: dict[str, Any], key: str, flags: InputFlags) -> str:
    there = ", ".join(repr(name) for name in list(document)[:_NAMED]) or "none"
    return f"key {key!r} of {flags.keys} is missing, there is {there}"
