"""The order in which the documents of a stream come, and the lanes that they go to.

Everything follows from the seed and the files, whoever reads: an epoch reads every file once, in an
order of its own, and shuffles the documents of each window. A document then goes to the lane that
was given the fewest bytes so far, so that lanes come to the end of the data together.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DataError
from .documents import BEGINNING, Raw, Reached, read_documents
from .input_flags import InputFlags


class WindowStart(NamedTuple):
    """Where a window begins.

    turn:   windows before it, of all epochs.
    epoch:  epochs before it.
    window: windows of its epoch before it.
    place:  of its first document; ``place.file`` counts files in the epoch's order.
    loads:  bytes that each lane was given before, less those of the least.
    """

    turn: int
    epoch: int
    window: int
    place: Reached
    loads: tuple[int, ...]


@dataclass(frozen=True)
class RawSource:
    """Files that are read as one.

    key:    of their texts.
    seed:   of the order.
    window: documents that are shuffled together; 1: nothing is shuffled.
    flags:  for errors.
    """

    files: tuple[Path, ...]
    key: str
    seed: int
    window: int
    flags: InputFlags

    def order(self, epoch: int) -> Sequence[int]:
        """Return the files in the order of an epoch."""
        if self.window == 1:
            return range(len(self.files))
        # its numbers are the same in all versions of numpy
        return np.random.RandomState([self.seed, epoch]).permutation(len(self.files)).tolist()

    def shuffled(self, documents: list[Raw], epoch: int, window: int) -> list[Raw]:
        """Return the documents of a window in their order."""
        if self.window == 1:
            return documents
        draw = np.random.RandomState([self.seed, epoch, window])
        return [documents[at] for at in draw.permutation(len(documents))]


class WindowReader:
    """Reads a source window by window, without end.

    start: of the first window that is read.

    ``next``: where the next window begins.

    Raises DataError for a file that is damaged, and for a source without documents.
    """

    def __init__(self, source: RawSource, start: WindowStart):
        self.next = start
        self._source = source
        self._documents = self._of_epoch(start.epoch, start.place)

    def read(self) -> list[tuple[int, Raw]]:
        """Return the documents of the next window, each with its lane, in their order."""
        documents: list[Raw] = []
        while not documents:
            now = self.next
            documents = list(islice(self._documents, self._source.window))
            is_short = len(documents) < self._source.window
            if is_short:
                self._end_epoch(len(documents))
        heap = [(load, lane) for lane, load in enumerate(now.loads)]
        heapq.heapify(heap)
        given = []
        for raw in self._source.shuffled(documents, now.epoch, now.window):
            load, lane = heap[0]
            # one more for the token that ends it
            heapq.heapreplace(heap, (load + len(raw.data) + 1, lane))
            given.append((lane, raw))
        least = heap[0][0]
        loads = tuple(load - least for load, _ in sorted(heap, key=itemgetter(1)))
        if is_short:
            self.next = self.next._replace(turn=now.turn + 1, loads=loads)
        else:
            place = documents[-1].after
            self.next = WindowStart(now.turn + 1, now.epoch, now.window + 1, place, loads=loads)
        return given

    def _end_epoch(self, documents: int) -> None:
        """Begin the next epoch behind the last, short window."""
        now = self.next
        if now.place == BEGINNING and not documents:
            files = self._source.files
            reason = f"it is the first of {len(files)} that have no documents"
            raise DataError(self._source.flags.files, files[0], reason, "Give other files")
        self.next = WindowStart(now.turn, now.epoch + 1, 0, BEGINNING, loads=now.loads)
        self._documents = self._of_epoch(self.next.epoch, BEGINNING)

    def _of_epoch(self, epoch: int, start: Reached) -> Iterator[Raw]:
        source = self._source
        files = [source.files[at] for at in source.order(epoch)]
        for number, file in enumerate(files[start.file :], start=start.file):
            place = start if number == start.file else Reached(number)
            yield from read_documents(file, (source.key,), place, source.flags)
