"""In which order something writes: its calls that touch the disk, recorded, and what must hold of them.

A recorder sees each call by which names change or are synced, and what was written since the call
before. `broken` says which rules of ``durable`` the order of these steps breaks:

    what gets a name is on the disk                 a file its bytes, a directory all that is below it
    a mark of completeness comes last               what it speaks for is on the disk by then
    what a directory is called once it is complete  is the last that happens to it
    the old goes once the new is on the disk        its mark first
    at the end                                      all bytes and all new names are on the disk

A sync that is left out is one step fewer: where no rule breaks then, it was not needed.
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
_INDEX = ".index.json"  # a mark where a directory is not replaced at once
# how the names of what makes something complete end, ...
MARKS = (MANIFEST, TRACKER, ".metadata", "shown", "progress.json", ".idx", _INDEX)
# ... of those without which it counts as none ...
_SEALS = (MANIFEST, "progress.json", ".metadata", ".idx", _INDEX)
_PLACE = ".being-written"
_DECISIONS = tuple(mark for mark in MARKS if mark != _INDEX)
# ... of what no reader takes for complete ...
_ASIDE = (".tmp", ".partial", ".new", ".old", ".unfinished", _PLACE)
# ... and of what may be lost: logs, and locks of processes that are gone
_LOST = (".jsonl", ".lock", "/lock")
_TWO_PATHS = ("rename", "replace", "link", "symlink")
_REMOVALS = ("unlink", "remove", "rmdir")
_CALLS = (*_TWO_PATHS, *_REMOVALS, "mkdir", "fsync")

Names = dict[str, int]  # inodes


@dataclass(frozen=True)
class Step:
    """One call, or what was written without one that is seen.

    call:    "write", or the name of a function of `os`.
    paths:   relative to the root: of a rename, from where and to where.
    number:  the inode of what is synced or removed, or gets a name.
    written: inodes of files whose bytes changed.
    names:   by inode of a directory, the names that changed; None for one that is gone.
    below:   inodes of what gets a name, and of all below it.
    beside:  inodes of all that a mark speaks for.
    above:   inodes of the directories above, the nearest first.
    is_link: whether it removes a link, which holds nothing.
    sealed:  inodes of the directories above that have a manifest.
    """

    call: str
    paths: tuple[str, ...] = ()
    number: int = 0
    written: frozenset[int] = frozenset()
    names: dict[int, dict[str, int | None]] = field(default_factory=dict)
    below: frozenset[int] = frozenset()
    beside: frozenset[int] = frozenset()
    above: tuple[int, ...] = ()
    is_link: bool = False
    sealed: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"{self.call} {' -> '.join(self.paths)}"

    @property
    def name(self) -> str:
        return os.path.basename(self.paths[-1])

    @property
    def is_mark(self) -> bool:
        return bool(self.beside)

    @property
    def is_shown(self) -> bool:
        """Whether a rename is one of those among which a link decides, of no importance by itself."""
        return "/links/link" in self.paths[0] or "/shown/" in self.paths[0]

    @property
    def removes(self) -> bool:
        """Whether something that is not aside goes, or is about to."""
        if self.call in ("rename", "replace"):
            is_mark = self.paths[0].endswith(_SEALS) and not self.name.endswith(_SEALS)
            return is_mark or self.name.endswith(_ASIDE) and not self.paths[0].endswith(_ASIDE)
        return self.call in _REMOVALS and not self.name.endswith(_ASIDE) and not self.is_link


class Recorder:
    """Records what a writer does below ``root``, a directory."""

    def __init__(self, root: Path):
        self.root = root
        self.steps: list[Step] = []
        self._held: dict[int, int] = {}  # open, so that no other file gets the number of an inode
        self._is_looking = False
        self._names, self._files = self._scan()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in _CALLS:
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name)))
            yield
        self._look("write")

    def close(self) -> None:
        for file in self._held.values():
            os.close(file)

    def _wrapped(self, name: str) -> Callable:
        call = getattr(os, name)

        def record_and_call(*arguments, **options):
            if self._is_looking:
                return call(*arguments, **options)
            self._look("write")
            count = 2 if name in _TWO_PATHS else 1
            folders = [options.get(key) for key in ("src_dir_fd", "dst_dir_fd")]
            if count == 1:
                folders = [options.get("dir_fd")]
            paths = [
                _path(each, folder) for each, folder in zip(arguments[:count], folders, strict=True)
            ]
            is_link = name in _REMOVALS and paths[0].is_symlink()
            number, below, beside = self._before(name, paths)
            result = call(*arguments, **options)
            self._look(name, paths, number, below, beside=beside, is_link=is_link)
            return result

        return record_and_call

    def _before(
        self, name: str, paths: Sequence[Path]
    ) -> tuple[int, frozenset[int], frozenset[int]]:
        """Return of a step the number, and what is below and beside."""
        if name in ("mkdir", "link", "symlink"):
            return 0, frozenset(), frozenset()
        number = os.lstat(paths[0]).st_ino
        if name not in ("rename", "replace"):
            return number, frozenset(), frozenset()
        beside: frozenset[int] = frozenset()
        if paths[1].name.endswith(MARKS):
            home = paths[1].parent
            beside = _below(home)
            if home.name.endswith(_ASIDE):
                beside |= _below(home.parent)
        return number, _below(paths[0]), beside

    def _look(
        self,
        call: str,
        paths: Sequence[Path] = (),
        number: int = 0,
        below: frozenset[int] = frozenset(),
        beside: frozenset[int] = frozenset(),
        is_link: bool = False,
    ) -> None:
        """Record a step: the call, and all that has changed since the one before."""
        self._is_looking = True
        try:
            names, files = self._scan()
        finally:
            self._is_looking = False
        changed: dict[int, dict[str, int | None]] = {}
        for folder in names.keys() | self._names.keys():
            old = self._names.get(folder, {})
            new = names.get(folder, {})
            each = {
                name: new.get(name)
                for name in old.keys() | new.keys()
                if old.get(name) != new.get(name)
            }
            if each:
                changed[folder] = each
        written = frozenset(each for each, state in files.items() if self._files.get(each) != state)
        self._names, self._files = names, files
        if call == "write" and not (changed or written):
            return
        told = tuple(os.path.relpath(path, self.root) for path in paths)
        above = tuple(_above(paths[-1], self.root)) if paths else ()
        sealed = frozenset(each for each in above if MANIFEST in names.get(each, ()))
        self.steps.append(
            Step(
                call,
                told,
                number,
                written=written,
                names=changed,
                below=below,
                beside=beside,
                above=above,
                is_link=is_link,
                sealed=sealed,
            )
        )

    def _scan(self) -> tuple[dict[int, Names], dict[int, tuple[int, int]]]:
        """Return the names in every directory, and size and time of every file."""
        names: dict[int, Names] = {}
        files: dict[int, tuple[int, int]] = {}
        for folder, folders, others in os.walk(self.root):
            own = names.setdefault(os.stat(folder).st_ino, {})
            for name in (*folders, *others):
                path = Path(folder, name)
                if f"/{name}".endswith(_LOST):
                    continue
                status = os.lstat(path)
                own[name] = status.st_ino
                if stat.S_ISREG(status.st_mode):
                    files[status.st_ino] = (status.st_size, status.st_mtime_ns)
                if status.st_ino not in self._held:
                    self._held[status.st_ino] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        return names, files


def _path(argument: int | str | os.PathLike, folder: int | None) -> Path:
    if isinstance(argument, int):
        return Path(os.readlink(f"/proc/self/fd/{argument}"))
    if folder is not None:
        return Path(os.readlink(f"/proc/self/fd/{folder}"), argument)
    return Path(os.path.abspath(argument))


def _below(path: Path) -> frozenset[int]:
    """Return the inodes of what is at a path, and below it."""
    found = {os.lstat(path).st_ino}
    if path.is_dir() and not path.is_symlink():
        for each in path.iterdir():
            if not f"/{each.name}".endswith(_ASIDE + _LOST):
                found |= _below(each)
    return frozenset(found)


def _above(path: Path, root: Path) -> Iterator[int]:
    for each in path.parents:
        if each.is_dir():
            yield os.stat(each).st_ino
        if each == root:
            return


class _Order:
    """What is not on the disk yet, step by step.

    dirty:   files with bytes that are not.
    pending: by directory, its names that are not.
    """

    def __init__(self) -> None:
        self.dirty: set[int] = set()
        self.pending: dict[int, dict[str, int | None]] = {}
        self.faults: list[str] = []
        self._last: dict[int, Step] = {}  # by directory: the last change below it
        self._shown: set[int] = set()
        self._unsealed: set[int] = set()  # directories whose mark is gone from the disk

    def new_names(self, among: Collection[int] | None = None, but: int = 0) -> list[str]:
        """Return new names that are not on the disk, of things that are not aside.

        among: inodes of directories; None: of all.
        but:   the inode of one that does not count.
        """
        return [
            name
            for folder, names in self.pending.items()
            if among is None or folder in among
            for name, node in names.items()
            if node not in (None, but) and not name.endswith(_ASIDE)
        ]

    def follow(self, step: Step, has_old: bool) -> None:
        if step.call == "fsync":
            self.dirty.discard(step.number)
            if self._lost_seals([step.number]):
                self._unsealed.add(step.number)
            self.pending.pop(step.number, None)
            return
        if step.call in (*_REMOVALS, "rename", "replace") and not step.name.endswith(_ASIDE):
            self._rely(step)
        if step.call in ("rename", "replace"):
            self._named(step)
        if step.removes:
            self._removed(step, has_old)
        self.dirty |= step.written
        for folder, names in step.names.items():
            pending = self.pending.setdefault(folder, {})
            pending.update(names)
            # a mark that was aside is no mark that is gone
            if step.is_mark and len(step.paths) > 1:
                pending.pop(os.path.basename(step.paths[0]), None)
        for folder in {*step.above, *step.names}:
            self._last[folder] = step

    def _rely(self, step: Step) -> None:
        """What has a mark is on the disk before anything else gets a name or goes."""
        for names in self.pending.values():
            for name, node in names.items():
                if node in (None, step.number) or node in self._shown:
                    continue
                if name.endswith(_DECISIONS):
                    self.faults.append(f"{name} is not on the disk yet: {step}")

    def _named(self, step: Step) -> None:
        speaks = not step.is_shown and (not step.name.endswith(_INDEX) or "/new/" in step.paths[0])
        if step.is_shown:
            self._shown.add(step.number)
            if any(_PLACE in names for names in self.pending.values()):
                self.faults.append(f"what the link leads through is not on the disk yet: {step}")
        needed = step.below | step.beside if speaks else step.below
        if self.dirty & needed:
            self.faults.append(f"bytes are not on the disk yet: {step}")
        if names := self.new_names(needed, but=step.number):
            self.faults.append(f"{', '.join(names)} in it are not on the disk yet: {step}")
        if not step.is_mark and self._lost_seals(step.above[:1]):
            self.faults.append(f"a mark of the old may still be there: {step}")
        last = self._last.get(step.number)
        if last is not None and step.paths[0].endswith(".new") and not last.is_mark:
            self.faults.append(f"its mark is not the last of what happened to it: {step}")

    def _removed(self, step: Step, has_old: bool) -> None:
        if has_old and (self.dirty or self.new_names()):
            self.faults.append(f"the new is not on the disk yet: {step}")
        is_open = step.name.endswith(_SEALS) or self._unsealed & {*step.above}
        if not is_open and (step.sealed or self._lost_seals(step.above)):
            self.faults.append(f"its mark may still be there: {step}")
        named = {node for names in self.pending.values() for node in names.values()}
        if named & {*step.above}:
            self.faults.append(f"its directory may still have the name of before: {step}")

    def _lost_seals(self, folders: Collection[int]) -> list[str]:
        """Return marks in directories that are gone, but not from the disk."""
        return [
            name
            for folder in folders
            for name, node in self.pending.get(folder, {}).items()
            if node is None and name.endswith(_SEALS)
        ]

    def end(self) -> None:
        if self.dirty:
            self.faults.append("at the end bytes are not on the disk")
        names = [name for names in self.pending.values() for name, node in names.items() if node]
        if names:
            self.faults.append(f"at the end names are not on the disk: {', '.join(names)}")


def broken(steps: Sequence[Step], has_old: bool = True) -> list[str]:
    """Return what is wrong with an order of steps, in words.

    has_old: whether the old has to be there until the new is.
    """
    order = _Order()
    for step in steps:
        order.follow(step, has_old)
    order.end()
    return order.faults


def syncs_that_matter(steps: Sequence[Step]) -> list[int]:
    """Return the places of the syncs that write something out."""
    order = _Order()
    found = []
    for place, step in enumerate(steps):
        names = order.pending.get(step.number, ())
        matters = [name for name in names if name == _PLACE or not name.endswith(_ASIDE)]
        if step.call == "fsync" and (matters or step.number in order.dirty):
            found.append(place)
        order.follow(step, has_old=False)
    return found
