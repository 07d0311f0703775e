"""Replace files of a directory that others use too, all at once: a kill at any moment leaves all old ones or all new.

    DIR/.being-written/new/      the new files, at the paths that they will have in DIR
                       old/      hard links to the files that they replace or that are removed
                       shown     -> old; that it becomes -> new is one rename, and decides

    1. new/ is written.          DIR is untouched.
    2. DIR/FILE becomes a link   -> .being-written/shown/FILE, one file after the other. Each still shows the old file,
                                 or none where there was none.
    3. shown -> new              DIR shows the new files, and no removed one.
    4. The links become files.   One after the other, by renames.

Whatever a kill leaves is completed or undone by `settle`, with which the next save begins. Nothing else in DIR is
touched: it may be a mount point, a link, or the current directory of some shell. Where a file system has no links,
files are renamed one after the other. All functions are local to one rank.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_merak.durable import (
    make_directory,
    move,
    rename,
    sync_directory,
    sync_file,
    sync_folders,
)
from megatron_merak.errors import CheckpointError

# of DIR: the directory in which a save is complete before it takes its place
PLACE = ".being-written"
_NEW = "new"
_OLD = "old"
_SHOWN = "shown"
_LINKS = "links"
# without links: what says where tensors are is gone first, since it would find others in the new files
_INDICES = (".index.json", ".metadata")
_LATE = (".safetensors", *_INDICES)  # renamed last, the last of all
_NO_LINKS = (
    errno.EPERM,
    errno.EACCES,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EXDEV,
)
_say = logging.getLogger(__name__).warning


class _NoLinks(OSError):
    """A file system without links, or one that forbids them."""


def begin(directory: Path) -> Path:
    """Settle ``directory``, created if it does not exist; return an empty directory in it for the
    new files.
    """
    make_directory(directory)
    settle(directory)
    fresh = directory / PLACE / _NEW
    fresh.mkdir(parents=True)
    return fresh


def publish(directory: Path, removed: Collection[str] = ()) -> None:
    """Put the new files in their places; all of them are on the disk then.

    removed: names of files in ``directory`` that disappear at the same moment.
    """
    new = directory / PLACE / _NEW
    names = _files(new)
    for name in names:
        sync_file(new / name)
        target = directory / name
        if target.is_dir():
            remedy = "Move that directory away, or save to another one"
            raise CheckpointError(
                "output directory", directory, f"{name} in it is a directory", remedy
            )
        make_directory(target.parent)
    gone = [
        name for name in sorted(removed) if name not in names and os.path.lexists(directory / name)
    ]
    try:
        _keep_old(directory, [*names, *gone])
    except _NoLinks as error:
        text = "%s: files are replaced one after the other, since links cannot be made there (%s)"
        _say(text + "; until that is done, a kill leaves neither model", directory, error.strerror)
        _one_by_one(directory, names, gone)
        return
    _show(directory, [*names, *gone])
    settle(directory)


@contextmanager
def replacing(directory: Path, removed: Callable[[Path], Collection[str]]) -> Iterator[Path]:
    """Yield the directory for the new files, which take their places if the body ends without an
    error. After one ``directory`` is as it was.

    removed: returns the files in ``directory`` that disappear at the same moment.
    """
    was_missing = not directory.exists()
    try:
        yield begin(directory)
        publish(directory, removed(directory))
    except BaseException:
        abandon(directory)
        with suppress(OSError):
            if was_missing:
                directory.rmdir()
        raise


def settle(directory: Path) -> None:
    """Complete or undo what a kill interrupted; ``directory`` shows the same files before and
    after.
    """
    place = directory / PLACE
    if not place.is_dir() or place.is_symlink():
        return
    if os.path.islink(place / _SHOWN):
        names = sorted({*_files(place / _OLD), *_files(place / _NEW)})
        for name in names:
            target = directory / name
            shown = place / _SHOWN / name
            if not _is_link(directory, name):
                continue
            if os.path.lexists(shown):
                move(shown, target)
            else:
                target.unlink()
        _sync_parents(directory, names)
    shutil.rmtree(place)


def abandon(directory: Path) -> None:
    """Settle ``directory`` after an error; if that fails too, the next save does it."""
    with suppress(OSError):
        settle(directory)


def is_absent(path: Path) -> bool:
    """Whether a link is one of a save that was killed, and shows no file."""
    if not os.path.islink(path) or os.path.exists(path):
        return False
    return PLACE in Path(os.readlink(path)).parts


def _keep_old(directory: Path, names: Collection[str]) -> None:
    """Make what shows the old files. ``directory`` itself is untouched. Raises _NoLinks if links
    cannot be made.
    """
    place = directory / PLACE
    (place / _OLD).mkdir()
    (place / _LINKS).mkdir()
    try:
        for name in names:
            source = directory / name
            kept = place / _OLD / name
            kept.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():
                os.symlink(os.path.realpath(source), kept)
            elif source.exists():
                os.link(source, kept)
        os.symlink(_OLD, place / _SHOWN)
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise _NoLinks(*error.args) from error
        raise
    sync_folders(place)
    sync_directory(directory)


def _show(directory: Path, names: Collection[str]) -> None:
    """Let links show the old files, then the new ones."""
    place = directory / PLACE
    for name in names:
        link = place / _LINKS / "link"
        os.symlink(_link_text(name), link)
        move(link, directory / name)
    _sync_parents(directory, names)
    decision = place / _LINKS / _SHOWN
    os.symlink(_NEW, decision)
    rename(decision, place / _SHOWN)


def _one_by_one(directory: Path, names: Collection[str], gone: Collection[str]) -> None:
    """Replace files without links: what decides is gone first, and is there last."""
    for name in (*gone, *names):
        if name.endswith(_INDICES):
            (directory / name).unlink(missing_ok=True)
    _sync_parents(directory, names)
    for name in gone:
        (directory / name).unlink(missing_ok=True)
    for late in sorted(set(map(_late, names))):
        moved = [name for name in names if _late(name) == late]
        for name in moved:
            move(directory / PLACE / _NEW / name, directory / name)
        _sync_parents(directory, moved)
    shutil.rmtree(directory / PLACE)


def _late(name: str) -> int:
    return max((number for number, end in enumerate(_LATE, 1) if name.endswith(end)), default=0)


def _files(directory: Path) -> list[str]:
    """Return the paths of all files below, relative to ``directory``."""
    found = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sorted(path.relative_to(directory).as_posix() for path in found)


def _link_text(name: str) -> str:
    """Return what the link in place of a file says, relative to where it is."""
    return "../" * name.count("/") + f"{PLACE}/{_SHOWN}/{name}"


def _is_link(directory: Path, name: str) -> bool:
    path = directory / name
    return path.is_symlink() and os.readlink(path) == _link_text(name)


def _sync_parents(directory: Path, names: Collection[str]) -> None:
    for folder in sorted({(directory / name).parent for name in names} | {directory}):
        if folder.is_dir():
            sync_directory(folder)
