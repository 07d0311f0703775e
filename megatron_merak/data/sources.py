"""Where the parts of a run's data come from: the words of a flag, or of a file that one names.

--data-args-path FILE             the words of --data-path, apart by blanks or line ends
--per-split-data-args-path FILE   JSON with the words for "train", "valid" and "test", each a
                                  list, a text of words, or null
"""

from pathlib import Path
from typing import Any, NamedTuple

from ..config import DataConfig
from ..config.settings import nearest
from ..errors import DataError
from ..strict_json import parse
from .gpt_index import SPLITS

_IN_ONE = "--data-args-path"
_BY_PART = "--per-split-data-args-path"
_LARGEST = 1 << 26  # bytes of a list of data sets; a device may have no end
_WORDS = "Write it like ['0.3', 'PREFIX1', '0.7', 'PREFIX2'], or null"


class DataWords(NamedTuple):
    """The data of one part.

    flag:  what names it, for errors.
    words: in the form of --data-path; none: there is no such data.
    """

    flag: str
    words: tuple[str, ...]


def source_of(data: DataConfig, part: int) -> DataWords:
    """Return where the part `SPLITS[part]` comes from. Raises `DataError` for a file that cannot be
    read.
    """
    name = SPLITS[part]
    if data.data_args_path is not None:
        words = tuple(_text(_IN_ONE, data.data_args_path).split())
        if not words:
            remedy = "Write into it what --data-path would get"
            raise DataError(_IN_ONE, data.data_args_path, "it names no dataset", remedy)
        return DataWords(f"{_IN_ONE} ({data.data_args_path})", words)
    if data.per_split_data_args_path is not None:
        path = data.per_split_data_args_path
        return DataWords(f"{_BY_PART} ({path}, {name})", _by_part(path)[name])
    own = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if any(own):
        return DataWords(f"--{name}-data-path", own[part])
    return DataWords("--data-path", data.data_path)


def _by_part(path: str) -> dict[str, tuple[str, ...]]:
    """Return the words for each part; what is left out has none."""
    try:
        parts = parse(_text(_BY_PART, path))
    except ValueError as error:
        reason = f"it is not JSON ({error})"
        raise DataError(_BY_PART, path, reason, f"Give it the keys {', '.join(SPLITS)}") from error
    if not isinstance(parts, dict):
        reason = "it is not an object"
        raise DataError(_BY_PART, path, reason, f"Give it the keys {', '.join(SPLITS)}")
    for key in parts:
        if key not in SPLITS:
            close = nearest(key, SPLITS)
            remedy = f"The nearest is {close}" if close else f"Use {', '.join(SPLITS)}"
            raise DataError(f"{_BY_PART} ({path})", key, "is no part of the data", remedy)
    return {name: _words(path, name, parts.get(name)) for name in SPLITS}


def _words(path: str, name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    words = value.split() if isinstance(value, str) else value
    listed = isinstance(words, list) and all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in words
    )
    if not listed or not words or "" in words:
        reason = "names no dataset" if words == [] else "is no list of weights and prefixes"
        raise DataError(f"{_BY_PART} ({path})", name, reason, _WORDS)
    return tuple(str(word) for word in words)


def _text(flag: str, path: str) -> str:
    try:
        with open(Path(path), "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise DataError(flag, path, reason, "Name a text file of weights and prefixes") from error
