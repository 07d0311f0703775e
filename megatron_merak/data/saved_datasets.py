"""Directories that `save_to_disk` of the datasets library wrote: which files have their rows."""

import json
from pathlib import Path
from typing import Any

from ..errors import DataError
from .input_flags import InputFlags

_DICT = "dataset_dict.json"
_STATE = "state.json"
_SAVE_AGAIN = "Save it again with save_to_disk"


def saved_dataset(directory: Path, split: str | None, flags: InputFlags) -> Path | None:
    """Return the directory of a saved data set, or of the split of a DatasetDict; None for any
    other. Raises `DataError`.

    split: one of a DatasetDict; None: it has one only.
    flags: for errors.
    """
    if (directory / _DICT).is_file():
        splits = _json(directory / _DICT, flags).get("splits")
        if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
            raise DataError(flags.files, directory / _DICT, "it names no splits", _SAVE_AGAIN)
        if split is None and len(splits) == 1:
            return directory / splits[0]
        remedy = f"Give {flags.split} one of {', '.join(splits)}"
        if split is None:
            raise DataError(flags.files, directory, f"it has {len(splits)} splits", remedy)
        if split not in splits:
            raise DataError(flags.split, split, f"{directory} does not have it", remedy)
        return directory / split
    return directory if (directory / _STATE).is_file() else None


def saved_files(directory: Path, flags: InputFlags) -> list[Path]:
    """Return the files of a saved data set, in the order of their rows. Raises `DataError`.

    flags: for errors.
    """
    state = _json(directory / _STATE, flags)
    names = [entry.get("filename") for entry in state.get("_data_files") or []]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(flags.files, directory / _STATE, "it names no files", _SAVE_AGAIN)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        reason = "its rows are picked by indices, as old versions of datasets wrote them"
        raise DataError(flags.files, directory, reason, _SAVE_AGAIN)
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise DataError(
                flags.files, file, f"{_STATE} names it, and it is not there", _SAVE_AGAIN
            )
    return files


def _json(path: Path, flags: InputFlags) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(flags.files, path, f"it cannot be read ({error})", _SAVE_AGAIN) from error
    if not isinstance(content, dict):
        raise DataError(flags.files, path, "it is no JSON object", _SAVE_AGAIN)
    return content
