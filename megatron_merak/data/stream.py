"""Samples of raw text that is tokenized while it is read.

    documents of the files > windows, shuffled > lanes > tokens > samples

Sample s comes from lane s mod L: its tokens follow those of sample s - L. A rank whose samples are of
some lanes tokenizes the documents of these only, so that ranks divide the work and the samples are
the same for any number of them.
"""

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from ..errors import DataError
from .blend import blending_indices
from .documents import Raw, parse_document
from .gpt_dataset import sample_of
from .source_part import GPTDatasetConfig
from .stream_lane import Lane
from .stream_order import RawSource, WindowReader, WindowStart
from .stream_position import LaneStart, Position, beginning
from .tokenizer import Tokenizer

_TOLD = 5  # documents left out that are told of


class RankRows(NamedTuple):
    """The samples of each step that a rank has: see ``loader.microbatch_samples``."""

    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def lanes(self, lanes: int, first: int) -> list[int]:
        """Return the lanes of its samples, of so many, whatever the sizes of batches.

        first: a sample with which a step begins.
        """
        step = math.gcd(lanes, self.micro_batch_size * self.dp_size)
        own = {
            (first + self.dp_rank * self.micro_batch_size + at) % step
            for at in range(self.micro_batch_size)
        }
        return [lane for lane in range(lanes) if lane % step in own]


@dataclass(frozen=True)
class Stream:
    """What a run reads as a stream.

    sources:   of documents.
    weights:   in which they are blended; one for each.
    identity:  see ``data.identity``.
    lanes:     of a run that begins.
    tokenizer: of the run.
    samples:   what samples are like.
    skip_bad:  whether documents that cannot be read are left out.
    """

    sources: Sequence[RawSource]
    weights: Sequence[float]
    identity: Mapping
    lanes: int
    tokenizer: Tokenizer
    samples: GPTDatasetConfig
    skip_bad: bool

    def beginning(self, begin: int = 0) -> Position:
        """See `stream_position.beginning`."""
        return beginning(begin, self.lanes, len(self.sources))

    def open(
        self, rows: RankRows, position: Position, consumed: int | None = None
    ) -> "StreamSamples":
        """Return the samples of a rank from a position on, or from where the run has consumed so many
        samples. Raises DataError.
        """
        samples = StreamSamples(self, rows, position, consumed)
        samples.catch_up()
        return samples

    def tokens(self, raw: Raw) -> np.ndarray:
        """Return the token ids of a document and its end, int64[n]; none of an empty one. Raises
        DataError.
        """
        source = self.sources[0]
        flag = source.flags.files
        try:
            (text,) = parse_document(raw, (source.key,), source.flags)
            ids = self.tokenizer.tokenize(text)
        except (ValueError, DataError) as error:
            reason = str(error).rstrip(".")
            remedy = "Correct it, or add --stream-skip-bad to leave out such documents"
            raise DataError(flag, raw.place, reason, remedy) from error
        if not ids:
            return np.empty(0, np.int64)
        tokens = np.array([*ids, self.tokenizer.eod], dtype=np.int64)
        if not 0 <= tokens.min() <= tokens.max() < self.samples.vocab_size:
            reason = (
                f"its token ids are from {tokens.min()} to {tokens.max()}, the vocabulary ends at "
                f"{self.samples.vocab_size - 1}"
            )
            raise DataError(flag, raw.place, reason, "Use the tokenizer of the model")
        return tokens


class StreamSamples:
    """Data set of the samples of a rank, without end; those of a lane are asked for in order.

    rows:     of the rank.
    position: from which on it reads; all lanes of it.
    consumed: samples of the run before the first that is asked for; None: as many as at ``position``.

    An item is that of a ``GPTDataset``. One thread reads items at a time; another one may ask how far
    the rank is, see `position`.

    ``left_out``: lines on documents that were left out.

    Raises DataError for a file or a document that cannot be read.
    """

    def __init__(
        self, stream: Stream, rows: RankRows, position: Position, consumed: int | None = None
    ):
        self.left_out: deque[str] = deque()
        self._stream = stream
        self._position = position
        self._bad = 0
        self._closed = False
        self._first = position.samples if consumed is None else consumed - position.begin
        self._own = rows.lanes(position.lanes, self._first)
        self._blend = np.zeros(0, np.int16)
        # samples that each lane gave, of those since the streams began
        self._given = {lane: self._before(lane, position.samples) for lane in self._own}
        self._lanes = {}
        for lane in self._own:
            self._lanes[lane] = [self._lane(place) for place in position.starts[lane]]
        self._readers = [
            WindowReader(source, window)
            for source, window in zip(stream.sources, position.windows, strict=True)
        ]
        self._guard = Lock()
        # for `position`: windows by their turn, and where lanes stood after so many samples
        self._windows: list[dict[int, WindowStart]] = [
            {window.turn: window} for window in position.windows
        ]
        self._stood = {
            lane: deque([(self._given[lane], [*position.starts[lane]])]) for lane in self._own
        }

    def _lane(self, start: LaneStart) -> Lane:
        return Lane(start, self._stream.samples.sequence_length + 1, self._tokens)

    def catch_up(self) -> None:
        """Pass over what lies between the position and the first sample. Raises DataError."""
        for lane in self._own:
            while self._given[lane] < self._before(lane, self._first):
                self._take(lane)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return a sample; ``index`` counts all samples of the run."""
        turn, lane = divmod(index - self._position.begin, self._position.lanes)
        assert self._given[lane] <= turn, "samples of a lane come in order"
        while self._given[lane] < turn:  # another rank had it
            self._take(lane)
        return sample_of(torch.from_numpy(self._take(lane)), self._stream.samples)

    def _take(self, lane: int) -> np.ndarray:
        source = self._source_of(self._given[lane] + lane)
        own = self._lanes[lane][source]
        while not own.fill():
            self._read(source)
        tokens = own.take()
        with self._guard:
            self._given[lane] += 1
            self._stood[lane].append(
                (self._given[lane], [each.start for each in self._lanes[lane]])
            )
        return tokens

    def _source_of(self, place: int) -> int:
        """Return the source of a sample. A lane begins at another place of the blend than its
        neighbours, so that a step has samples of all sources, and so has each lane.
        """
        weights = self._stream.weights
        if len(weights) == 1:
            return 0
        if place >= len(self._blend):
            self._blend, _ = blending_indices(weights, 2 * place + 1024)
        return int(self._blend[place])

    def _read(self, source: int) -> None:
        """Give the lanes of the rank what the next window has for them."""
        if self._closed:
            raise InterruptedError("the stream is closed")
        reader = self._readers[source]
        turn = reader.next.turn
        counts: dict[int, int] = {}
        for lane, raw in reader.read():
            index = counts.get(lane, 0)
            counts[lane] = index + 1
            if lane in self._lanes:
                self._lanes[lane][source].add(turn, index, raw)
        with self._guard:
            self._windows[source][reader.next.turn] = reader.next

    def _tokens(self, raw: Raw) -> np.ndarray:
        try:
            return self._stream.tokens(raw)
        except DataError as error:
            if not self._stream.skip_bad:
                raise
            self._bad += 1
            if self._bad <= _TOLD:
                more = "" if self._bad < _TOLD else "; further ones are not told"
                self.left_out.append(f"left out {error.value}: {error.reason}{more}")
            return np.empty(0, np.int64)

    def _before(self, lane: int, samples: int) -> int:
        """Return how many of so many samples are of a lane."""
        rounds, rest = divmod(samples, self._position.lanes)
        return rounds + (lane < rest)

    def position(self, consumed: int) -> Position:
        """Return how far the rank is when the run has consumed so many samples: with the lanes whose
        last samples the rank itself had.
        """
        self.forget(consumed)
        position = self._position
        samples = consumed - position.begin
        with self._guard:
            starts = {
                lane: stood[0][1]
                for lane, stood in self._stood.items()
                if stood[0][0] == self._before(lane, samples)
            }
            windows = [known[min(known)] for known in self._windows]
        return Position(position.begin, samples, position.lanes, windows=windows, starts=starts)

    def forget(self, consumed: int) -> None:
        """Give up the positions before the run has consumed so many samples."""
        samples = consumed - self._position.begin
        with self._guard:
            for lane, stood in self._stood.items():
                wanted = self._before(lane, samples)
                while len(stood) > 1 and stood[1][0] <= wanted:
                    stood.popleft()
            for source, known in enumerate(self._windows):
                first = min(stood[0][1][source].turn for stood in self._stood.values())
                for turn in [turn for turn in known if turn < first and turn + 1 in known]:
                    del known[turn]

    def close(self) -> None:
        """Let what reads end soon."""
        self._closed = True
