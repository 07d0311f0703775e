"""Directories of Megatron-LM's checkpoints: which one is chosen, and how one is replaced.

DIR/latest_checkpointed_iteration.txt      the number of an iteration, or "release"
DIR/iter_0000100/, DIR/release/            one checkpoint: with metadata.json in the distributed
                                           format, with mp_rank_*/ in the older one
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoint import in_place
from ..checkpoint.files import disk_errors
from ..checkpoint.foreign import FORMAT, RANK_FILE, RANKS, RELEASE
from ..durable import replaced
from ..errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"

_REMEDY = "Check the output directory, its permissions and its free space"


def has_rank_files(path: Path) -> bool:
    """Whether the directory of one checkpoint is in the older format."""
    return not (path / FORMAT).is_file() and any(path.glob(f"{RANKS}/{RANK_FILE}"))


def chosen_megatron(directory: Path, iteration: int | None) -> Path:
    """Return the directory of one checkpoint: ``directory`` itself, that of ``iteration``, or the
    one that the tracker names.

    Raises CheckpointError if there is none.
    """
    if _is_checkpoint(directory):
        return directory
    name = _tracked(directory) if iteration is None else f"iter_{iteration:07d}"
    path = directory / name
    if not _is_checkpoint(path):
        every = [each for place in ("iter_*", RELEASE) for each in directory.glob(place)]
        others = sorted(each.name for each in every if not each.suffix and _is_checkpoint(each))
        reason = f"{name} is not complete; {', '.join(others) or 'none'} is"
        raise CheckpointError("checkpoint directory", directory, reason, "Choose by --ckpt-step")
    return path


@contextmanager
def replaced_checkpoint(directory: Path, iteration: int) -> Iterator[tuple[Path, Path]]:
    """Yield where the body writes a checkpoint, and where it is once the body ends, when the tracker
    names it. One of the same name there is replaced at once.

    iteration: 0 for weights without a run.

    Raises CheckpointError for what the disk refuses.
    """
    path = directory / (f"iter_{iteration:07d}" if iteration else RELEASE)
    with disk_errors(path, _REMEDY):
        with in_place.replacing(path, _files_below) as fresh:
            yield fresh, path
        _remove_empty(path)
        with replaced(directory / TRACKER) as file:
            file.write((str(iteration) if iteration else RELEASE).encode())


def _files_below(path: Path) -> list[str]:
    """Return the files of a checkpoint that is there, relative to its directory."""
    names = (each.relative_to(path) for each in path.rglob("*") if not each.is_dir())
    return [name.as_posix() for name in names if name.parts[0] != in_place.PLACE]


def _remove_empty(path: Path) -> None:
    """Remove the directories of ranks that the new checkpoint does not have."""
    for folder in path.iterdir():
        with suppress(OSError):
            folder.rmdir()


def _is_checkpoint(path: Path) -> bool:
    return (path / FORMAT).is_file() or has_rank_files(path)


def _tracked(directory: Path) -> str:
    """Return the name of the checkpoint that the tracker names. Raises CheckpointError."""
    path = directory / TRACKER
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = f"it does not say which checkpoint is the newest ({error})"
        raise CheckpointError("file", path, reason, "Choose one by --ckpt-step") from error
    if text != RELEASE and not text.isdecimal():
        reason = f"it says {text!r:.40}, which is no iteration"
        raise CheckpointError("file", path, reason, "Choose one by --ckpt-step")
    return text if text == RELEASE else f"iter_{int(text):07d}"
