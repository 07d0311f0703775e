"""A lane of a source: documents one behind the other, cut into samples."""

from collections import deque
from collections.abc import Callable

import numpy as np

from ..errors import DataError
from .documents import Raw
from .stream_position import LaneStart

_EMPTY = 1 << 17  # documents in a row that may have no tokens


class Lane:
    """The tokens of the documents that went to a lane, from a place on.

    start:    of the next sample.
    length:   tokens of a sample; the last one is the first of the next, too.
    tokenize: returns the token ids of a document with the one that ends it, int64[n].
    """

    def __init__(self, start: LaneStart, length: int, tokenize: Callable[[Raw], np.ndarray]):
        self._begin = start
        self._length = length
        self._tokenize = tokenize
        self._waiting: deque[tuple[int, int, Raw]] = deque()
        self._pieces: deque[tuple[LaneStart, np.ndarray]] = deque()
        self._held = 0  # tokens of the pieces
        self._empty = 0  # documents in a row without tokens

    @property
    def start(self) -> LaneStart:
        """Where the next sample begins."""
        return self._pieces[0][0] if self._pieces else self._begin

    def add(self, turn: int, index: int, raw: Raw) -> None:
        """Take a document; those before the place where the lane begins are passed over."""
        if (turn, index) >= self._begin[:2]:
            self._waiting.append((turn, index, raw))

    def fill(self) -> bool:
        """Tokenize until there is a sample; return whether there is one."""
        while self._held < self._length and self._waiting:
            turn, index, raw = self._waiting.popleft()
            tokens = self._tokenize(raw)
            token = self._begin.token if (turn, index) == self._begin[:2] else 0
            self._empty = 0 if len(tokens) else self._empty + 1
            if self._empty == _EMPTY:
                reason = f"it is the last of {_EMPTY} documents in a row that have no tokens"
                raise DataError("stream", raw.place, reason, "Give other files")
            if len(tokens) > token:
                self._pieces.append((LaneStart(turn, index, token), tokens[token:]))
                self._held += len(tokens) - token
        return self._held >= self._length

    def take(self) -> np.ndarray:
        """Return the next sample, int64[length], which is there."""
        parts = []
        needed = self._length
        for _, tokens in self._pieces:
            parts.append(tokens[:needed])
            needed -= len(parts[-1])
            if not needed:
                break
        self._pass(self._length - 1)
        return np.concatenate(parts)

    def _pass(self, count: int) -> None:
        self._held -= count
        while len(self._pieces[0][1]) <= count:
            count -= len(self._pieces.popleft()[1])
        start, tokens = self._pieces[0]
        self._pieces[0] = (start._replace(token=start.token + count), tokens[count:])
