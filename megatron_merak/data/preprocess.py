"""Tokenize documents into indexed datasets, in any number of processes."""

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from ..counting import counted
from ..errors import DataError, MerakError
from .documents import Raw, input_files, parse_document, read_documents
from .indexed_dataset import IndexedDatasetWriter, token_dtype
from .tokenizer import DEFAULTS, NUMBERS, Tokenizer, TokenizerDetails, build_tokenizer

CHUNK_BYTES = 1 << 20
CHUNK_DOCUMENTS = 1024


@dataclass(frozen=True)
class EncoderConfig:
    """How a raw document becomes token ids: the tokenizer's flags, the JSON keys, and whether eod
    follows.
    """

    tokenizer_type: str | None
    tokenizer_model: str | None
    vocab_size: int | None
    json_keys: tuple[str, ...]
    append_eod: bool
    details: TokenizerDetails = DEFAULTS

    def build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(
            self.tokenizer_type, self.tokenizer_model, self.vocab_size, self.details
        )


@dataclass
class Encoded:
    """A chunk of documents: per key the document lengths int64[n] and the joined ids; `bad` =
    (place, reason).
    """

    lengths: list[np.ndarray]
    tokens: list[np.ndarray]
    bad: list[tuple[str, str]]


def encode_chunk(
    tokenizer: Tokenizer, config: EncoderConfig, chunk: Sequence[Raw], batched: bool
) -> Encoded:
    """Tokenize `chunk`; `batched` lets the tokenizer use threads of its own."""
    texts: list[list[str]] = [[] for _ in config.json_keys]
    bad = []
    for raw in chunk:
        try:
            parsed = parse_document(raw, config.json_keys)
            if config.tokenizer_type == NUMBERS:
                for text in parsed:
                    tokenizer.tokenize(text)
        except (ValueError, DataError) as error:
            bad.append((raw.place, str(error).rstrip(".")))
            continue
        for column, text in zip(texts, parsed, strict=True):
            column.append(text)
    dtype = token_dtype(tokenizer.vocab_size)
    tail = [tokenizer.eod] if config.append_eod else []
    encoded = Encoded([], [], bad)
    for column in texts:
        ids = (
            tokenizer.tokenize_batch(column)
            if batched
            else [tokenizer.tokenize(text) for text in column]
        )
        rows = [np.array(row + tail, dtype=dtype) for row in ids]
        encoded.lengths.append(np.array([len(row) for row in rows], dtype=np.int64))
        encoded.tokens.append(np.concatenate(rows) if rows else np.empty(0, dtype))
    return encoded


def chunks(documents: Iterable[Raw]) -> Iterator[list[Raw]]:
    """Group documents into chunks of about `CHUNK_BYTES`."""
    chunk = []
    size = 0
    for raw in documents:
        chunk.append(raw)
        size += len(raw.data)
        if size >= CHUNK_BYTES or len(chunk) == CHUNK_DOCUMENTS:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def encode(
    documents: Iterable[Raw], config: EncoderConfig, workers: int
) -> Iterator[tuple[int, Encoded]]:
    """Yield (raw bytes, encoded chunk) in the order of `documents`. One worker runs in this
    process.
    """
    if workers == 1:
        tokenizer = config.build_tokenizer()
        for chunk in chunks(documents):
            yield _size(chunk), encode_chunk(tokenizer, config, chunk, batched=True)
        return
    with _processes(config, workers) as idle:
        # One chunk under way per worker: a pipe then never has to hold data in both directions.
        busy: deque[tuple[Connection, int]] = deque()
        for chunk in chunks(documents):
            if not idle:
                yield _receive(busy, idle)
            connection = idle.popleft()
            connection.send(chunk)
            busy.append((connection, _size(chunk)))
        while busy:
            yield _receive(busy, idle)


def _size(chunk: Sequence[Raw]) -> int:
    return sum(len(raw.data) for raw in chunk)


def _receive(busy: deque[tuple[Connection, int]], idle: deque[Connection]) -> tuple[int, Encoded]:
    connection, size = busy.popleft()
    try:
        result = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise DataError(
            "--workers",
            "process",
            "it died, possibly because it ran out of memory",
            "Use fewer workers",
        ) from error
    if isinstance(result, BaseException):
        raise result
    idle.append(connection)
    return size, result


@contextmanager
def _processes(config: EncoderConfig, workers: int) -> Iterator[deque[Connection]]:
    context = multiprocessing.get_context("spawn")
    connections: deque[Connection] = deque()
    processes = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, config), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield deque(connections)
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()


def _serve(connection: Connection, config: EncoderConfig) -> None:
    """Run a worker: encode chunks until the other end closes."""
    tokenizer = None
    while True:
        try:
            chunk = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            tokenizer = tokenizer or config.build_tokenizer()
            connection.send(encode_chunk(tokenizer, config, chunk, batched=False))
        except MerakError as error:
            connection.send(error)


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    config: EncoderConfig,
    workers: int = 1,
    skip_bad: int = 0,
) -> dict[str, int]:
    """`preprocess_documents` of every document below `inputs`. Raises `DataError` where there is
    none.
    """
    files = [file for path in inputs for file in input_files(path)]
    documents = (raw for file in files for raw in read_documents(file))
    return preprocess_documents(documents, output_prefix, config, workers, skip_bad=skip_bad)


def preprocess_documents(
    documents: Iterable[Raw],
    output_prefix: str,
    config: EncoderConfig,
    workers: int = 1,
    skip_bad: int = 0,
) -> dict[str, int]:
    """Write `{output_prefix}_{key}_document.{bin,idx}` for every JSON key; one sequence per
    document.

    Returns the counts `documents`, `tokens` and `skipped`; progress goes to stderr. Raises
    `DataError` naming file and line of a document that cannot be read, once more than `skip_bad`
    were skipped; no output appears then.
    """
    dtype = token_dtype(config.build_tokenizer().vocab_size)
    counts = {"documents": 0, "tokens": 0, "skipped": 0}
    progress = PreprocessProgress("preprocess")
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(f"{output_prefix}_{key}_document", dtype))
            for key in config.json_keys
        ]
        for size, encoded in encode(documents, config, workers):
            counts["skipped"] += len(encoded.bad)
            if counts["skipped"] > skip_bad:
                place, reason = encoded.bad[skip_bad - counts["skipped"]]
                raise DataError(
                    "document", place, reason, "Repair it, or allow some with --skip-bad N"
                )
            for writer, lengths, tokens in zip(
                writers, encoded.lengths, encoded.tokens, strict=True
            ):
                writer.add_documents(tokens, lengths)
                counts["tokens"] += len(tokens)
            counts["documents"] += len(encoded.lengths[0])
            progress.update(size, counts["documents"])
        if counts["documents"] == 0:
            raise DataError(
                "--input", "of 0 documents", "there is nothing to write", "Give other files"
            )
        progress.done()
    return counts


class PreprocessProgress:
    """One line on stderr, rewritten at most twice a second; on anything but a terminal, only the
    last state.
    """

    def __init__(self, name: str):
        self.name = name
        self.size = self.documents = 0
        self._start = self._shown = time.monotonic()

    def update(self, size: int, documents: int) -> None:
        self.size += size
        self.documents = documents
        if sys.stderr.isatty() and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            print(f"\r{self._line()}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        print(
            f"\r{self._line()}" if sys.stderr.isatty() else self._line(),
            file=sys.stderr,
            flush=True,
        )

    def _line(self) -> str:
        megabytes = self.size / 1e6
        rate = megabytes / max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self.name}: {counted(self.documents, 'document')}, {megabytes:.1f} MB, "
            f"{rate:.1f} MB/s"
        )
