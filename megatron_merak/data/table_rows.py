"""Rows of tables on the disk, .parquet and .arrow, one batch of them in memory at a time."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..extras import installed_by, is_installed

TABLE_SUFFIXES = (".parquet", ".arrow")
_NAMED = 8  # columns in one message
_BATCH = 1024  # rows of a parquet file that are decoded at a time
Batches = Iterator[tuple[Any, int]]  # of pyarrow, and the bytes of the file up to their end


class Row(NamedTuple):
    """number: from 1 on. data: its columns as a JSON object. end: see `documents.Reached`."""

    number: int
    data: bytes
    end: int


def table_rows(path: Path, columns: Sequence[str], skipped: int) -> Iterator[Row]:
    """Yield the rows of a table after the first ``skipped``, with these columns. Raises
    `DataError`.
    """
    if not is_installed("pyarrow"):
        remedy = f"Install it: {installed_by('inputs')}"
        raise DataError("--input", path, "pyarrow is not installed", remedy)
    import pyarrow

    number = 0
    try:
        for batch, end in _parquet(path, columns) if path.suffix == ".parquet" else _arrow(path):
            _check_columns(path, columns, batch.schema.names)
            first = min(max(skipped - number, 0), batch.num_rows)
            number += first
            for row in batch.slice(first).select(list(columns)).to_pylist():
                number += 1
                data = json.dumps(row, ensure_ascii=False, default=_other)
                yield Row(number, data.encode("utf-8", "surrogatepass"), end)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = f"reading failed after row {number} ({error})"
        raise DataError("--input", path, reason, "Copy or write the file again") from error


def _other(_value: object) -> None:
    """Stand for a value that is no text, number, list or table of them."""


def _check_columns(path: Path, columns: Sequence[str], there: Sequence[str]) -> None:
    for column in columns:
        if column not in there:
            names = ", ".join(map(repr, there[:_NAMED]))
            reason = f"column {column!r} of --json-keys is missing, there is {names}"
            raise DataError("--input", path, reason, "Give --json-keys the columns of texts")


def _parquet(path: Path, columns: Sequence[str]) -> Batches:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        _check_columns(path, columns, file.schema_arrow.names)
        size = path.stat().st_size
        rows = 0
        for batch in file.iter_batches(_BATCH, columns=list(columns)):
            rows += batch.num_rows
            yield batch, size * rows // file.metadata.num_rows


def _arrow(path: Path) -> Batches:
    import pyarrow

    # datasets writes streams, other programs files
    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            file = pyarrow.ipc.open_file(source)
            for number in range(file.num_record_batches):
                yield (
                    file.get_batch(number),
                    source.size() * (number + 1) // file.num_record_batches,
                )
            return
        for batch in pyarrow.ipc.open_stream(source):
            yield batch, source.tell()
