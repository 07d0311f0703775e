"""What the flags are called that name raw documents."""

from typing import NamedTuple


class InputFlags(NamedTuple):
    """The user's names in errors.

    files: of files and directories.
    keys:  of keys or columns.
    split: of a split of saved DatasetDicts.
    """

    files: str
    keys: str
    split: str


PREPROCESS = InputFlags("--input", "--json-keys", "--input-split")
STREAM = InputFlags("--stream-path", "--stream-json-key", "--stream-split")
VALID_STREAM = STREAM._replace(files="--valid-stream-path")
