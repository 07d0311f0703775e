"""From the flags of a run to its streams."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import RunConfig
from . import tokenizer as tokenizers
from .blend import normalized, parse_blend
from .documents import input_files
from .input_flags import STREAM, VALID_STREAM, InputFlags
from .source_part import GPTDatasetConfig
from .stream import Stream
from .stream_order import RawSource
from .tokenizer import Tokenizer, details_of

_HEAD = 1 << 12  # bytes of a file that are compared
_READ = 64  # files whose beginning is compared


def stream_of(
    config: RunConfig, tokenizer: Tokenizer, samples: GPTDatasetConfig, replicas: int
) -> Stream | None:
    """Return what --stream-path names; None: nothing. Raises DataError.

    samples:  what samples are like.
    replicas: of the model.
    """
    lanes = config.streams.stream_lanes or config.batches_over(replicas).largest
    window = config.streams.stream_shuffle_window
    values = config.streams.stream_path
    return _stream(config, values, STREAM, tokenizer, samples=samples, lanes=lanes, window=window)


def valid_stream_of(
    config: RunConfig, tokenizer: Tokenizer, samples: GPTDatasetConfig, replicas: int
) -> Stream | None:
    """Return what --valid-stream-path names, in the order of the files; None: nothing. Raises
    DataError.
    """
    lanes = config.batches_over(replicas).largest
    values = config.streams.valid_stream_path
    return _stream(config, values, VALID_STREAM, tokenizer, samples=samples, lanes=lanes, window=1)


def check_streams(config: RunConfig) -> None:
    """Check that the files of a run's streams are there. Raises DataError."""
    streams = config.streams
    given = ((STREAM, streams.stream_path), (VALID_STREAM, streams.valid_stream_path))
    for flags, values in given:
        for path in parse_blend(flags.files, values)[0]:
            input_files(Path(path), streams.stream_split, flags)


def _stream(
    config: RunConfig,
    values: Sequence[str],
    flags: InputFlags,
    tokenizer: Tokenizer,
    samples: GPTDatasetConfig,
    lanes: int,
    window: int,
) -> Stream | None:
    if not values:
        return None
    streams = config.streams
    names, weights = parse_blend(flags.files, values)
    # without weights all are read as one
    groups = [names] if weights is None else [[name] for name in names]
    sources = []
    known = []
    for group in groups:
        paths = [Path(name) for name in group]
        files = [(path, input_files(path, streams.stream_split, flags)) for path in paths]
        sources.append(
            RawSource(
                tuple(file for _, below in files for file in below),
                streams.stream_json_key,
                config.train.seed,
                window=window,
                flags=flags,
            )
        )
        known.append(
            {
                "prefix": " ".join(group),
                "fingerprint": _fingerprint(files),
                "sequences": [0, len(sources[-1].files)],
            }
        )
    shares = [1.0] if weights is None else normalized(weights)
    identity = {
        "sources": known,
        "samples": {
            "weights": None if weights is None else shares,
            "sequence length": samples.sequence_length,
            "seed": samples.random_seed,
            "end-of-document id left out of the loss": samples.masked_eod,
            "tokenizer": _tokenizer(config, tokenizer),
            "key of texts": streams.stream_json_key,
            "documents shuffled together": window,
            "documents left out that cannot be read": streams.stream_skip_bad,
        },
        "order": "",
    }
    return Stream(
        sources,
        shares,
        identity,
        lanes,
        tokenizer=tokenizer,
        samples=samples,
        skip_bad=streams.stream_skip_bad,
    )


def _fingerprint(groups: Sequence[tuple[Path, Sequence[Path]]]) -> str:
    """Return a digest of the names and sizes of files, and of how some begin, wherever they are."""
    digest = hashlib.sha256()
    files = [(file, path) for path, below in groups for file in below]
    step = -(-len(files) // _READ)
    for number, (file, path) in enumerate(files):
        name = file.relative_to(path) if file != path else file.name
        digest.update(f"{name} {file.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        if number % step == 0:
            with open(file, "rb") as content:
                digest.update(content.read(_HEAD))
    return digest.hexdigest()[:32]


def _tokenizer(config: RunConfig, tokenizer: Tokenizer) -> str:
    """Return a digest of what text becomes."""
    data = config.data
    details = details_of(data)
    facts: list[Any] = [data.tokenizer, tokenizer.vocab_size, tokenizer.eod]
    if data.tokenizer == "TikTokenizer":
        facts += [details.tiktoken_pattern, details.tiktoken_special_tokens]
    digest = hashlib.sha256(repr(facts).encode())
    for path in tokenizers.tokenizer_paths(data.tokenizer, data.tokenizer_model, details):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
