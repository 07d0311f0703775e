"""Whether a prefix that a flag gives names an indexed dataset, before it is opened: the files are
there, and the head of the index is one.

What is often given in place of a prefix is answered with the prefix: one of the two files, the name
that merak-preprocess was given, a text that nothing has tokenized, an address.
"""

from pathlib import Path

from ..errors import DataError
from .files import regular_file_size
from .indexed_dataset import check_header, data_path, index_path

_SUFFIXES = (".bin", ".idx")
_TOKENIZE = "Tokenize it with merak-preprocess, and give what that wrote without .bin"


def check_dataset(prefix: str, flag: str) -> None:
    """Raise `DataError` unless the files of a dataset are there. flag: what gave the prefix."""
    if not index_path(prefix).exists() and not data_path(prefix).exists():
        _check_name(prefix, flag)
    size = regular_file_size(index_path(prefix), "index file", flag)
    regular_file_size(data_path(prefix), "data file", flag)
    check_header(index_path(prefix), size)


def _check_name(prefix: str, flag: str) -> None:
    """Raise `DataError` for a name that is near that of a dataset."""
    if "://" in prefix:
        reason = "it is an address, and data is read from the file system"
        raise DataError(
            flag, prefix, reason, "Copy its .bin and .idx to a disk, and give that path"
        )
    path = Path(prefix)
    stem = prefix
    while stem.endswith(_SUFFIXES):
        stem = stem[: -len(_SUFFIXES[0])]
    if stem != prefix and index_path(stem).exists():
        reason = "a dataset is named without the .bin and .idx of its two files"
        raise DataError(flag, prefix, reason, f"Give {stem}")
    if path.is_file():
        raise DataError(flag, prefix, f"it is a file, and there is no {prefix}.idx", _TOKENIZE)
    try:
        beside = sorted(path.parent.iterdir())
        inside = sorted(path.iterdir()) if path.is_dir() else []
    except (OSError, ValueError):
        return  # what cannot be listed is told of the index file
    near = [each for each in beside if each.suffix == ".idx" and each.name.startswith(path.name)]
    near += [each for each in inside if each.suffix == ".idx"]
    if near:
        found = near[0].with_suffix("")
        what = "a directory" if path.is_dir() else "no dataset"
        raise DataError(flag, prefix, f"it is {what}, and {found} is a dataset", f"Give {found}")
