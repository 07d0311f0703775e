"""What a power cut may leave of a directory, at every moment of what writes there.

A disk keeps the bytes of a file as they were at its last fsync, and the names in a directory as
they were at that of the directory. Of what was done later it may keep any part. Before each call
that changes a name or syncs, and at the end, these are looked at:

    nothing that came later    what relies on bytes or names that are not on the disk yet is lost
    one change of names alone  what relies on the order of two changes is lost
    all names, no later byte   what is renamed before it is written out is empty

So an fsync that is left out or comes late shows as a state that is neither the old nor the new.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

_TWO_PATHS = ("rename", "replace", "link", "symlink")
_CALLS = (*_TWO_PATHS, "unlink", "remove", "rmdir", "mkdir", "fsync")


@dataclass(frozen=True)
class Node:
    """What a name stands for.

    number: of the inode.
    kind:   whether it is a file, a directory or a link, as in a mode.
    link:   what a link says.
    """

    number: int
    kind: int
    link: str = ""


Names = dict[str, Node]
Change = dict[int, dict[str, Node | None]]  # by directory: names that are new, or (None) gone


class Disk:
    """The disk that ``root`` is on; all that is there is safe at first.

    root:  a directory.
    spare: an absent one, which shows what a cut leaves of ``root``.
    """

    def __init__(self, root: Path, spare: Path):
        self.root = root
        self.spare = spare
        self.calls: list[str] = []
        self._number = os.stat(root).st_ino
        self._held: dict[int, int] = {}  # files open, so that no other gets the number of an inode
        self._is_looking = False
        self._now = self._scan()
        self._safe = dict(self._now)
        files = [path for path in root.rglob("*") if path.is_file()]
        self._bytes = {os.stat(path).st_ino: path.read_bytes() for path in files}
        self._pending: list[Change] = []
        self._seen: set[tuple] = set()

    @contextmanager
    def watched(self, check: Callable[[], object]) -> Iterator[None]:
        """Call ``check`` with ``spare`` in each state that a cut during the body may leave."""
        self._seen.clear()
        with ExitStack() as stack:
            for name in _CALLS:
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, check)))
            yield
        self._look(check)

    def cut(self, check: Callable[[], object]) -> None:
        """Call ``check`` with ``spare`` in each state that a cut may leave now."""
        self._seen.clear()
        self._look(check)

    def close(self) -> None:
        for file in self._held.values():
            os.close(file)

    def _wrapped(self, name: str, check: Callable[[], object]) -> Callable:
        call = getattr(os, name)

        def look_and_call(*arguments, **options):
            if self._is_looking:
                return call(*arguments, **options)
            self._look(check)
            paths = map(self._told, arguments[: 1 + (name in _TWO_PATHS)])
            self.calls.append(f"{name} {' -> '.join(paths)}")
            result = call(*arguments, **options)
            if name == "fsync":
                self._synced(arguments[0])
            return result

        return look_and_call

    def _told(self, argument: int | str | os.PathLike) -> str:
        if isinstance(argument, int):
            argument = os.readlink(f"/proc/self/fd/{argument}")
        path = os.fspath(argument)
        return os.path.relpath(path, self.root) if os.path.isabs(path) else path

    def _synced(self, file: int) -> None:
        status = os.fstat(file)
        number = status.st_ino
        if stat.S_ISREG(status.st_mode):
            self._bytes[number] = Path(f"/proc/self/fd/{file}").read_bytes()
        else:
            self._safe[number] = self._now.get(number, {})
            for change in self._pending:
                change.pop(number, None)
            self._pending = [change for change in self._pending if change]

    def _look(self, check: Callable[[], object]) -> None:
        self._is_looking = True
        try:
            before = self._now
            self._now = self._scan()
            self._pending += _difference(before, self._now)
            self._show(self._safe, check)
            for last in range(len(self._pending)):
                self._show(_with(self._safe, _needed(self._pending[: last + 1])), check)
            self._show(self._now, check)
        finally:
            self._is_looking = False

    def _scan(self) -> dict[int, Names]:
        """Return the names in every directory."""
        found: dict[int, Names] = {}
        for folder, folders, files in os.walk(self.root):
            names = found.setdefault(os.stat(folder).st_ino, {})
            for name in (*folders, *files):
                path = Path(folder, name)
                status = os.lstat(path)
                kind = stat.S_IFMT(status.st_mode)
                link = os.readlink(path) if kind == stat.S_IFLNK else ""
                names[name] = Node(status.st_ino, kind, link)
                if status.st_ino not in self._held:
                    self._held[status.st_ino] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        return found

    def _show(self, names: Mapping[int, Names], check: Callable[[], object]) -> None:
        """Call ``check`` with ``spare`` as these names and the safe bytes; once for each state."""
        state = self._state(self._number, names)
        if state in self._seen:
            return
        self._seen.add(state)
        self._make(self.spare, self._number, names)
        try:
            check()
        except BaseException as error:
            calls = "\n  ".join(self.calls)
            there = sorted(str(path.relative_to(self.spare)) for path in self.spare.rglob("*"))
            error.add_note(f"A power cut behind these calls:\n  {calls}\nmay leave: {there}")
            raise
        finally:
            _remove(self.spare)

    def _state(self, number: int, names: Mapping[int, Names]) -> tuple:
        return tuple(
            (name, self._bytes.get(node.number, b""))
            if node.kind == stat.S_IFREG
            else (name, node.link, self._state(node.number, names))
            for name, node in sorted(names.get(number, {}).items())
        )

    def _make(self, place: Path, number: int, names: Mapping[int, Names]) -> None:
        place.mkdir()
        for name, node in names.get(number, {}).items():
            if node.kind == stat.S_IFLNK:
                (place / name).symlink_to(node.link)
            elif node.kind == stat.S_IFDIR:
                self._make(place / name, node.number, names)
            else:
                (place / name).write_bytes(self._bytes.get(node.number, b""))


def _difference(before: Mapping[int, Names], after: Mapping[int, Names]) -> list[Change]:
    """Return what has changed, by inode: a rename is one change, of two names."""
    changes: dict[int, Change] = {}
    for number in before.keys() | after.keys():
        old = before.get(number, {})
        new = after.get(number, {})
        for name in old.keys() | new.keys():
            if old.get(name) != new.get(name):
                inode = new[name].number if name in new else old[name].number
                changes.setdefault(inode, {}).setdefault(number, {})[name] = new.get(name)
    return [changes[inode] for inode in sorted(changes, key=after.__contains__, reverse=True)]


def _needed(changes: Sequence[Change]) -> list[Change]:
    """Return the last change, and those before it that it needs.

    These are of the same names, or have given its directories theirs.
    """
    needed: list[Change] = []
    names: set[tuple[int, str]] = set()
    for change in reversed(changes):
        own = {(number, name) for number, each in change.items() for name in each}
        nodes = {node.number for each in change.values() for node in each.values() if node}
        if not needed or own & names or nodes & {number for number, _ in names}:
            needed.insert(0, change)
            names |= own
    return needed


def _with(safe: Mapping[int, Names], changes: Sequence[Change]) -> dict[int, Names]:
    """Return the safe names with changes that are not."""
    shown = dict(safe)
    for change in changes:
        for number, names in change.items():
            changed = {**shown.get(number, {}), **names}
            shown[number] = {name: node for name, node in changed.items() if node is not None}
    return shown


def _remove(directory: Path) -> None:
    for entry in [*os.scandir(directory)]:
        if entry.is_dir(follow_symlinks=False):
            _remove(Path(entry))
        else:
            os.unlink(entry)
    os.rmdir(directory)
