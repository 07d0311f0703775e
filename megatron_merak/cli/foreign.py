"""Checkpoints of other programs, where a command takes this library's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError

_REMEDY = "Convert it with merak-convert first, which also finds what is damaged"


def foreign(directory: Path, what: str) -> CheckpointError | None:
    """Return the error that says which other program's checkpoint a directory has; None for none.

    what: the argument that names it.
    """
    # here, since it takes a second
    from ..formats.dcp import is_dcp
    from ..formats.megatron_directory import is_megatron

    if is_megatron(directory):
        return CheckpointError(what, directory, "it is Megatron-LM's", _REMEDY)
    if is_dcp(directory):
        return CheckpointError(what, directory, "it is torch.distributed.checkpoint's", _REMEDY)
    return None


@contextmanager
def own_checkpoint(directory: Path, what: str) -> Iterator[None]:
    """Say whose checkpoint it is where the body finds none of this library."""
    try:
        yield
    except CheckpointError as error:
        raise foreign(directory, what) or error from None
