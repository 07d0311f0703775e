"""Dictionaries whose changes can be undone: an attempt that fails leaves nothing of itself."""

from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ABSENT: Any = object()


class UndoLog:
    """The changes of some tables, in the order in which they were made."""

    def __init__(self) -> None:
        self._changes: list[tuple[Table[Any, Any], Any, Any]] = []  # table, key, value before

    def mark(self) -> int:
        """Return this moment, for `undo`."""
        return len(self._changes)

    def undo(self, moment: int) -> None:
        """Make all tables what they were at a moment."""
        while len(self._changes) > moment:
            table, key, before = self._changes.pop()
            if before is _ABSENT:
                dict.__delitem__(table, key)
            else:
                dict.__setitem__(table, key, before)

    def note(self, table: "Table[K, V]", key: K) -> None:
        """Record what a table has under a key that is about to change."""
        self._changes.append((table, key, table.get(key, _ABSENT)))


class Table(dict[K, V]):
    """A dictionary with a history. It changes by assignment and deletion alone."""

    def __init__(self, history: UndoLog):
        super().__init__()
        self._history = history

    def __setitem__(self, key: K, value: V) -> None:
        self._history.note(self, key)
        super().__setitem__(key, value)

    def __delitem__(self, key: K) -> None:
        self._history.note(self, key)
        super().__delitem__(key)
