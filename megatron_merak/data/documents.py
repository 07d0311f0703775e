"""Raw documents from files, each with its position."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError
from .files import regular_file_size

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)

_NAMED = 5  # keys of a document in one message


class Raw(NamedTuple):
    """One document in a file: a line of JSON, or (`line` None) a text file."""

    source: str
    line: int | None
    data: bytes

    @property
    def place(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


def input_files(path: Path) -> list[Path]:
    """Return `path` itself, or every file of a known kind below a directory, sorted by name. Raises
    `DataError`.
    """
    if not path.is_dir():
        regular_file_size(path, "--input", "--input")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) is not None)
    if not files:
        known = ", ".join(JSON_SUFFIXES + TEXT_SUFFIXES)
        raise DataError(
            "--input",
            path,
            f"no file below it ends in {known}, with or without .gz",
            "Give other files",
        )
    return files


def _kind(path: Path) -> str | None:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in JSON_SUFFIXES + TEXT_SUFFIXES else None


def read_documents(path: Path) -> Iterator[Raw]:
    """Yield the documents of one file: a .txt file is one document, others have one JSON object per
    line.

    .gz is unpacked and blank lines are skipped. Raises `DataError` naming the line after which a
    file cannot be read.
    """
    line = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            if _kind(path) in TEXT_SUFFIXES:
                yield Raw(str(path), None, file.read())
                return
            for line, data in enumerate(file, start=1):
                if data.strip():
                    yield Raw(str(path), line, data)
    except (OSError, EOFError) as error:
        reason = f"reading failed after line {line} ({error})"
        raise DataError("--input", path, reason, "Copy or unpack the file again") from error


def parse_document(raw: Raw, keys: Sequence[str]) -> list[str]:
    """Return the texts of `raw` under `keys`; a text file is the text of every key. Raises
    ValueError with the reason.
    """
    try:
        text = raw.data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    if raw.line is None:
        return [text] * len(keys)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    texts = []
    for key in keys:
        value = document.get(key)
        if not isinstance(value, str):
            there = ", ".join(repr(name) for name in list(document)[:_NAMED]) or "none"
            missing = f"key {key!r} of --json-keys is missing, there is {there}"
            raise ValueError(missing if value is None else f"the value of {key!r} is no string")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"the value of {key!r} holds half a surrogate pair")
        texts.append(value)
    return texts
