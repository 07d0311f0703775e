"""Tokenize documents into indexed datasets, in any number of processes."""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, LaunchError, MerakError
from .chat import ChatEncoder
from .documents import (
    Raw,
    Reached,
    in_order,
    input_files,
    parse_conversation,
    parse_document,
)
from .indexed_dataset import token_dtype
from .preprocess_progress import Ahead, PreprocessProgress
from .tokenizer import (
    DEFAULTS,
    NUMBERS,
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerDetails,
    build_tokenizer,
    tokenizer_paths,
)
from .unfinished import Unfinished

CHUNK_BYTES = 1 << 20
CHUNK_DOCUMENTS = 1024
SEAL_SECONDS = 10.0


@dataclass(frozen=True)
class EncoderConfig:
    """How a raw document becomes token ids: the tokenizer's flags, the JSON keys, and whether eod
    follows.

    chat:          whether documents are conversations; then there is one key.
    chat_template: in place of the tokenizer's; None: that.
    """

    tokenizer_type: str | None
    tokenizer_model: str | None
    vocab_size: int | None
    json_keys: tuple[str, ...]
    append_eod: bool
    details: TokenizerDetails = DEFAULTS
    chat: bool = False
    chat_template: str | None = None

    def build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(
            self.tokenizer_type, self.tokenizer_model, self.vocab_size, self.details
        )

    def build_encoder(self, tokenizer: Tokenizer) -> ChatEncoder:
        """Return what encodes conversations. Raises DataError where the tokenizer cannot."""
        path = self.tokenizer_model
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            remedy = "Name a directory of transformers whose tokenizer_config.json has one"
            kind = self.tokenizer_type
            reason = "it has no chat template"
            if kind != "HuggingFaceTokenizer":
                remedy = f"Use HuggingFaceTokenizer. {remedy}"
                raise DataError("--tokenizer-type", kind, reason, remedy)
            raise DataError("--tokenizer-model", path, reason, remedy)
        return ChatEncoder(tokenizer.of_transformers, self.chat_template, path)

    def dtype(self, tokenizer: Tokenizer) -> np.dtype:
        """Return the type of what is written."""
        return np.dtype("<i4") if self.chat else token_dtype(tokenizer.vocab_size)


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
    if config.chat:
        return _encode_conversations(tokenizer, config, chunk)
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
    dtype = config.dtype(tokenizer)
    tail = [tokenizer.eod] if config.append_eod else []
    encoded = Encoded([], [], bad)
    for column in texts:
        ids = (
            tokenizer.tokenize_batch(column)
            if batched
            else [tokenizer.tokenize(text) for text in column]
        )
        # as Megatron-LM's tool has it, what is empty is not even an end of a document
        rows = [np.array(row + tail if row else row, dtype=dtype) for row in ids]
        encoded.lengths.append(np.array([len(row) for row in rows], dtype=np.int64))
        encoded.tokens.append(np.concatenate(rows) if rows else np.empty(0, dtype))
    return encoded


def _encode_conversations(
    tokenizer: Tokenizer, config: EncoderConfig, chunk: Sequence[Raw]
) -> Encoded:
    encoder = config.build_encoder(tokenizer)
    (key,) = config.json_keys
    rows = []
    bad = []
    for raw in chunk:
        try:
            messages, tools = parse_conversation(raw, key)
            rows.append(encoder.encode(messages, tools).stored())
        except ValueError as error:
            bad.append((raw.place, str(error).rstrip(".")))
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    joined = np.concatenate(rows) if rows else np.empty(0, np.int32)
    return Encoded([lengths], [joined], bad)


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


class Read(NamedTuple):
    """Of a chunk: its bytes of text, and how far the files are read with it."""

    size: int
    place: Reached


def encode(
    documents: Iterable[Raw], config: EncoderConfig, workers: int
) -> Iterator[tuple[Read, Encoded]]:
    """Yield what was read and the encoded chunk, in the order of `documents`. One worker runs in
    this process.
    """
    if workers == 1:
        tokenizer = config.build_tokenizer()
        for chunk in chunks(documents):
            yield _read(chunk), encode_chunk(tokenizer, config, chunk, batched=True)
        return
    with _processes(config, workers) as idle:
        # One chunk under way per worker: a pipe then never has to hold data in both directions.
        busy: deque[tuple[Connection, Read]] = deque()
        for chunk in chunks(documents):
            if not idle:
                yield _receive(busy, idle)
            connection = idle.popleft()
            connection.send(chunk)
            busy.append((connection, _read(chunk)))
        while busy:
            yield _receive(busy, idle)


def _read(chunk: Sequence[Raw]) -> Read:
    return Read(sum(len(raw.data) for raw in chunk), chunk[-1].after)


def _receive(busy: deque[tuple[Connection, Read]], idle: deque[Connection]) -> tuple[Read, Encoded]:
    connection, read = busy.popleft()
    try:
        result = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise LaunchError(
            "--workers",
            "process",
            "it died, possibly because it ran out of memory",
            "Start the command again with fewer workers: it goes on from here",
        ) from error
    if isinstance(result, BaseException):
        raise result
    idle.append(connection)
    return read, result


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that writes
    tokenizer = None
    while True:
        try:
            chunk = connection.recv()
        except (EOFError, ConnectionError):
            return
        result: Encoded | MerakError
        try:
            tokenizer = tokenizer or config.build_tokenizer()
            result = encode_chunk(tokenizer, config, chunk, batched=False)
        except MerakError as error:
            result = error
        try:
            connection.send(result)
        except ConnectionError:  # the other end was stopped meanwhile
            return


def preprocess(
    inputs: Sequence[Path],
    output_prefix: str,
    config: EncoderConfig,
    workers: int = 1,
    skip_bad: int = 0,
    split: str | None = None,
    overwrite: bool = False,
    seal_every: float = SEAL_SECONDS,
    partitions: int = 1,
) -> dict[str, int]:
    """Write `{output_prefix}_{key}_document.{bin,idx}` for every JSON key, one sequence per
    document, of every document below `inputs`.

    Goes on from what an earlier call with the same arguments sealed before it was killed. Returns
    the counts `documents`, `tokens` and `skipped`; progress goes to stderr. Raises `DataError`
    naming file and line of a document that cannot be read, once more than `skip_bad` were skipped;
    nothing is left of the output then.

    split:      of saved DatasetDicts.
    overwrite:  begin anew.
    seal_every: seconds after which what is written is sealed.
    partitions: whose order documents have, see `in_order`.
    """
    files = [file for path in inputs for file in input_files(path, split)]
    job = job_of(files, config, partitions)
    run = Run(output_prefix, config, job, skip_bad=skip_bad, seal_every=seal_every)
    with run.opened(overwrite):
        done = run.work.progress
        read = done.documents + done.skipped
        documents = in_order(files, config.json_keys, partitions, start=done.place, read=read)
        return run.finish(documents, workers, Ahead(files * partitions))


def preprocess_documents(
    documents: Iterable[Raw],
    output_prefix: str,
    config: EncoderConfig,
    workers: int = 1,
    skip_bad: int = 0,
) -> dict[str, int]:
    """Do what `preprocess` does with documents from elsewhere; it begins anew each time."""
    run = Run(output_prefix, config, None, skip_bad=skip_bad)
    with run.opened(overwrite=True):
        return run.finish(documents, workers, Ahead([]))


def job_of(files: Sequence[Path], config: EncoderConfig, partitions: int = 1) -> dict[str, Any]:
    """Return all that decides what is written."""
    settings = asdict(config)
    paths = tokenizer_paths(config.tokenizer_type, config.tokenizer_model, config.details)
    details = settings.pop("details")
    inputs = {}
    for file in files:
        status = os.stat(file)
        inputs[os.path.abspath(file)] = [status.st_size, status.st_mtime_ns]
    return {
        "flags": settings | details,
        "tokenizer": {path.name: sha256(path.read_bytes()).hexdigest() for path in paths},
        "inputs": inputs,
        "order of inputs": list(inputs),
        "partitions": partitions,
    }


class Run:
    """One run: documents in, data sets out."""

    def __init__(
        self,
        prefix: str,
        config: EncoderConfig,
        job: dict[str, Any] | None,
        skip_bad: int,
        seal_every: float = SEAL_SECONDS,
    ):
        self.config = config
        self.skip_bad = skip_bad
        self.seal_every = seal_every
        tokenizer = config.build_tokenizer()
        if config.chat:
            config.build_encoder(tokenizer)
        dtype = config.dtype(tokenizer)
        prefixes = [f"{prefix}_{key}_document" for key in config.json_keys]
        self.work = Unfinished(prefix, prefixes, dtype, job)

    @contextmanager
    def opened(self, overwrite: bool) -> Iterator[None]:
        """Hold the files of the run; inputs that cannot be used leave nothing of them."""
        try:
            self.work.open(overwrite)
            try:
                yield
            except DataError:
                self.work.discard()
                raise
        finally:
            self.work.close()

    def finish(self, documents: Iterable[Raw], workers: int, ahead: "Ahead") -> dict[str, int]:
        """Write the rest, and publish it."""
        progress = self.work.progress
        shown = PreprocessProgress("preprocess", progress, ahead)
        if not progress.is_written:
            if progress.documents:
                shown.resumed()
            self._write(documents, workers, shown)
            if progress.documents == 0:
                raise DataError(
                    "--input", "of 0 documents", "there is nothing to write", "Give other files"
                )
            shown.done()
        self.work.publish()
        return {
            "documents": progress.documents,
            "tokens": progress.tokens,
            "skipped": progress.skipped,
        }

    def _write(self, documents: Iterable[Raw], workers: int, shown: "PreprocessProgress") -> None:
        progress = self.work.progress
        sealed = time.monotonic()
        for read, encoded in encode(documents, self.config, workers):
            progress.skipped += len(encoded.bad)
            if progress.skipped > self.skip_bad:
                place, reason = encoded.bad[self.skip_bad - progress.skipped]
                raise DataError(
                    "document", place, reason, "Repair it, or allow some with --skip-bad N"
                )
            for at, (tokens, lengths) in enumerate(
                zip(encoded.tokens, encoded.lengths, strict=True)
            ):
                self.work.add(at, tokens, lengths)
                progress.tokens += len(tokens)
            progress.documents += len(encoded.lengths[0])
            progress.read += read.size
            progress.place = read.place
            if time.monotonic() - sealed >= self.seal_every:
                self.work.seal()
                sealed = time.monotonic()
            shown.update()
