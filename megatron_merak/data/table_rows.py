"""Rows of tables on the disk, .parquet and .arrow, one batch of them in memory at a time."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from ..extras import installed_by, is_installed
from .input_flags import InputFlags

TABLE_SUFFIXES = (".parquet", ".arrow")
_NAMED = 8  # columns in one message
_BATCH = 1024  # rows of a parquet file that are decoded at a time
# of pyarrow, the bytes of the file up to their end, and the rows before them
Batches = Iterator[tuple[Any, int, int]]


class Row(NamedTuple):
    """number: from 1 on. data: its columns as a JSON object. end: see `documents.Reached`."""

    number: int
    data: bytes
    end: int


def table_rows(
    path: Path, columns: Sequence[str], skipped: int, flags: InputFlags
) -> Iterator[Row]:
    """Yield the rows of a table after the first ``skipped``, with these columns. Raises
    `DataError`.

    flags: for errors.
    """
    if not is_installed("pyarrow"):
        remedy = f"Install it: {installed_by('inputs')}"
        raise DataError(flags.files, path, "pyarrow is not installed", remedy)
    import pyarrow

    number = 0
    try:
        is_parquet = path.suffix == ".parquet"
        batches = _parquet(path, columns, skipped, flags) if is_parquet else _arrow(path)
        for batch, end, number in batches:
            _check_columns(path, columns, batch.schema.names, flags)
            first = min(max(skipped - number, 0), batch.num_rows)
            number += first
            for row in batch.slice(first).select(list(columns)).to_pylist():
                number += 1
                data = json.dumps(row, ensure_ascii=False, default=_other)
                yield Row(number, data.encode("utf-8", "surrogatepass"), end)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = f"reading failed after row {number} ({error})"
        raise DataError(flags.files, path, reason, "Copy or write the file again") from error


def _other(_value: object) -> None:
    """Stand for a value that is no text, number, list or table of them."""


def _check_columns(
    path: Path, columns: Sequence[str], there: Sequence[str], flags: InputFlags
) -> None:
    for column in columns:
        if column not in there:
            names = ", ".join(map(repr, there[:_NAMED]))
            reason = f"column {column!r} of {flags.keys} is missing, there is {names}"
            raise DataError(flags.files, path, reason, f"Give {flags.keys} the columns of texts")


def _parquet(path: Path, columns: Sequence[str], skipped: int, flags: InputFlags) -> Batches:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        _check_columns(path, columns, file.schema_arrow.names, flags)
        size = path.stat().st_size
        rows = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if rows + count <= skipped:
                rows += count
                continue
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=list(columns)):
                before = rows
                rows += batch.num_rows
                yield batch, size * rows // file.metadata.num_rows, before


def _arrow(path: Path) -> Batches:
    import pyarrow

    rows = 0
    # datasets writes streams, other programs files
    with pyarrow.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            file = pyarrow.ipc.open_file(source)
            count = file.num_record_batches
            for number in range(count):
                batch = file.get_batch(number)
                yield batch, source.size() * (number + 1) // count, rows
                rows += batch.num_rows
            return
        for batch in pyarrow.ipc.open_stream(source):
            yield batch, source.tell(), rows
            rows += batch.num_rows
