"""What a server does for the workers' ranks at one place: keeps a piece of their parameters and
replies to messages.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, LaunchError, MerakError, PlanError
from .layout import PieceLayout
from .piece import KINDS, ServedPiece, Update
from .round import Rounds
from .snapshot import read_snapshot, write_snapshot
from .wire import Connection, Message, MessageKind


@dataclass(frozen=True)
class Snapshots:
    """How a piece is written to disk.

    path:     of its file; None: none are written.
    job:      identifies the job.
    interval: updates between two snapshots.
    restores: whether this server replaces one that ended.
    say:      called with a line for a snapshot that cannot be written.
    """

    path: Path | None = None
    job: str = ""
    interval: int = 0
    restores: bool = False
    say: Callable[[str], object] = print


@dataclass
class Record:
    """What a server reports at its end.

    staleness: number of gradients by staleness, in updates.
    dropped:   gradients that were too stale.
    restored:  version of the snapshot that it began with.
    """

    staleness: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    restored: int | None = None


class Service:
    """One piece; one thread for each worker's rank at its place calls `serve`.

    workers:   how many there are.
    snapshots: how the piece is written to disk.
    pool:      writes it.
    patience:  seconds after which a waiting client is told that it waits.
    """

    def __init__(
        self, workers: int, snapshots: Snapshots, pool: ThreadPoolExecutor, patience: float = 60.0
    ):
        self.changed = threading.Condition()
        self.patience = patience
        self.live = set(range(workers))
        self.snapshots = snapshots
        self.pool = pool
        self.record = Record()
        self.piece: ServedPiece | None = None
        self.rounds: Rounds | None = None
        self.sequences: dict[int, int] = {}
        self.frozen: dict[int, ServedPiece] = {}
        self.done: set[int] = set()
        self.ready = self.complete = False
        self._written: Future | None = None
        self._answers: dict[MessageKind, Callable[[int, Connection, Message], None]] = {
            MessageKind.HELLO: self._hello,
            MessageKind.STORE: self._store,
            MessageKind.FETCH: self._fetch,
            MessageKind.READY: self._ready,
            MessageKind.PULL: self._pull,
            MessageKind.PUSH: self._push,
            MessageKind.FREEZE: self._freeze,
            MessageKind.THAW: self._thaw,
            MessageKind.DONE: self._done,
            MessageKind.FIRST: self._first,
        }

    def serve(self, worker: int, connection: Connection) -> None:
        """Reply to one worker's rank until it leaves. Raises ConnectionLost if it dies."""
        joined = None  # the round that it contributed to
        greeted = False
        while (message := connection.receive()).kind is not MessageKind.LEAVE:
            try:
                if message.kind is MessageKind.HEARTBEAT:
                    continue
                if greeted and message.kind is MessageKind.CONTRIBUTE:
                    joined = self._contribute(worker, connection, message)
                elif greeted and message.kind is MessageKind.APPLY:
                    self._apply(joined, connection, message)
                elif message.kind not in self._answers or not (
                    greeted or message.kind is MessageKind.HELLO
                ):
                    reason = "a worker says HELLO first, and does not send what servers do"
                    raise PlanError(
                        "message",
                        message.kind.name,
                        reason,
                        "Start workers and servers of one version",
                    )
                else:
                    self._answers[message.kind](worker, connection, message)
                    greeted = True
            except MerakError as error:
                connection.send(MessageKind.ERROR, text=str(error))
        self.complete = self.complete or bool(message.numbers[0])

    def gone(self, worker: int) -> None:
        """Record that a worker left or died: nobody waits for it any more."""
        with self.changed:
            self.live.discard(worker)
            self.frozen.pop(worker, None)
            self.changed.notify_all()

    @property
    def _own(self) -> ServedPiece:
        """The piece, which the first HELLO makes before anything else is received."""
        assert self.piece is not None
        return self.piece

    def close(self) -> None:
        """Wait for the snapshot that is being written."""
        self._settle()

    def _hello(self, worker: int, connection: Connection, message: Message) -> None:
        layout = PieceLayout.from_json(message.text)
        with self.changed:
            if self.piece is None:
                self._begin(layout)
            elif self.piece.layout != layout:
                reason = (
                    "it has other parameters, or other settings, than the workers that came before"
                )
                raise PlanError("worker", worker, reason, "Start all workers alike")
        connection.send(MessageKind.HELLO, (self.ready, self._own.version))

    def _begin(self, layout: PieceLayout) -> None:
        snapshot = self.snapshots.path
        if self.snapshots.restores and snapshot is None:
            reason = (
                "the server was killed, and without it there is no snapshot from which it "
                "could go on"
            )
            raise CheckpointError(
                "--save",
                "(unset)",
                reason,
                "Start the job again from its last checkpoint, with --save",
            )
        if self.snapshots.restores and snapshot is not None:
            self.piece, self.sequences = read_snapshot(snapshot, layout, self.snapshots.job)
            self.record.restored = self.piece.version
            self.ready = True
        else:
            self.piece = ServedPiece(layout)
        if layout.sync:
            self.rounds = Rounds(self.piece, self.changed, self.live, self._updated)

    def _store(self, worker: int, connection: Connection, message: Message) -> None:
        with self.changed:
            connection.receive_tensor(self._own.state[KINDS[int(message.numbers[0])]])
        connection.send(MessageKind.STORE)

    def _fetch(self, worker: int, connection: Connection, message: Message) -> None:
        piece = self.frozen.get(worker, self._own)
        connection.send(MessageKind.FETCH, (piece.version, piece.steps))
        connection.send_tensor(piece.state[KINDS[int(message.numbers[0])]])

    def _ready(self, worker: int, connection: Connection, message: Message) -> None:
        with self.changed:
            self._own.steps = int(message.numbers[0])
            self._own.refresh()
            self._snapshot(wait=True)
            self.ready = True
            self.changed.notify_all()
        connection.send(MessageKind.READY)

    def _pull(self, worker: int, connection: Connection, message: Message) -> None:
        self._wait(connection, lambda: self.ready or 0 not in self.live)
        with self.changed:
            if not self.ready:
                reason = "it ended before the weights were there"
                raise LaunchError("worker", 0, reason, "See what it said, and start again")
        self._send_weights(MessageKind.PULL, connection, worker)

    def _push(self, worker: int, connection: Connection, message: Message) -> None:
        sequence, version, scale, *rates = message.numbers
        piece = self._own
        gradient = torch.empty(piece.layout.elements)
        connection.receive_tensor(gradient)
        with self.changed:
            staleness = max(0, piece.version - int(version))
            late = staleness > piece.layout.max_staleness
            # else it came a second time: the first answer was lost
            if self.sequences.get(worker, -1) < sequence:
                self.sequences[worker] = int(sequence)
                self.record.staleness[staleness] = self.record.staleness.get(staleness, 0) + 1
                self.record.dropped += late
                if not late:
                    piece.update(gradient, Update(scale, _pairs(_softened(rates, staleness))))
                    self._updated()
        self._send_weights(MessageKind.PUSH, connection, worker, (staleness, late))

    def _contribute(self, worker: int, connection: Connection, message: Message):
        step = int(message.numbers[0])
        reported = message.numbers[1:]

        def receive() -> Tensor:
            connection.send(MessageKind.CONTRIBUTE)  # it may come
            gradient = torch.empty(self._own.layout.elements)
            connection.receive_tensor(gradient)
            return gradient

        assert self.rounds is not None, "workers that step together were greeted"
        joined, total = self.rounds.contribute(
            worker, step, reported, receive, partial(self._wait, connection)
        )
        connection.send(MessageKind.CONTRIBUTE, (total.square, len(total.reported)))
        if total.reported:
            connection.send_tensor(
                torch.tensor(
                    [numbers for _, numbers in total.reported], dtype=torch.float64
                ).flatten()
            )
        return joined

    def _apply(self, joined, connection: Connection, message: Message) -> None:
        skip, scale, *rates = message.numbers
        assert self.rounds is not None, "workers that step together were greeted"
        self.rounds.apply(joined, None if skip else Update(scale, _pairs(rates)))
        self._send_weights(MessageKind.APPLY, connection)

    def _freeze(self, worker: int, connection: Connection, message: Message) -> None:
        with self.changed:
            self.frozen[worker] = self._own.copy()
        connection.send(MessageKind.FREEZE, (self._own.version, self._own.steps))

    def _thaw(self, worker: int, connection: Connection, message: Message) -> None:
        self.frozen.pop(worker, None)
        connection.send(MessageKind.THAW)

    def _done(self, worker: int, connection: Connection, message: Message) -> None:
        with self.changed:
            self.done.add(worker)
            self.changed.notify_all()
        self._wait(connection, lambda: self.live <= self.done)
        connection.send(MessageKind.DONE)

    def _first(self, worker: int, connection: Connection, message: Message) -> None:
        self._wait(connection, lambda: min(self.live) == worker)
        connection.send(MessageKind.FIRST, (self.complete,))

    def _wait(self, connection: Connection, until: Callable[[], bool]) -> None:
        """Return when a condition holds; tell the client now and then that it waits."""
        while True:
            with self.changed:
                if self.changed.wait_for(until, self.patience):
                    return
            connection.send(MessageKind.WAIT)

    def _send_weights(
        self,
        kind: MessageKind,
        connection: Connection,
        worker: int = -1,
        numbers: Sequence[float] = (),
    ) -> None:
        """Send the weights of one moment: a copy, where they may change while they are sent."""
        with self.changed:
            piece = self.frozen.get(worker, self._own)
            sync = self._own.layout.sync
            weights: Tensor = piece.weights if sync else piece.weights.clone()
            head = (piece.version, piece.steps, min(self.live, default=0), *numbers)
        connection.send(kind, head)
        connection.send_tensor(weights)

    def _updated(self) -> None:
        if self.snapshots.interval and self._own.version % self.snapshots.interval == 0:
            self._snapshot()

    def _snapshot(self, wait: bool = False) -> None:
        """Start to write a snapshot, unless the last one is still being written.

        wait: until it is written; raises CheckpointError if it cannot be.
        """
        if self.snapshots.path is None or (self._written is not None and not self._written.done()):
            return
        self._settle()
        copy = self._own.copy()
        self._written = self.pool.submit(
            write_snapshot, self.snapshots.path, copy, dict(self.sequences), self.snapshots.job
        )
        if wait:
            written = self._written
            self._written = None
            written.result()

    def _settle(self) -> None:
        """Wait for the last snapshot. If it cannot be written, say so and keep the one before."""
        error = None if self._written is None else self._written.exception()
        self._written = None
        if error is not None:
            self.snapshots.say(f"{error} The snapshot before it stays.")


def _pairs(rates: Sequence[float]) -> list[tuple[float, float]]:
    """Return (learning rate, weight decay) of each group; the message may have more numbers after
    them.
    """
    return [*zip(rates[::2], rates[1::2], strict=False)]


def _softened(rates: Sequence[float], staleness: int) -> list[float]:
    """Divide learning rates by 1 + staleness (https://arxiv.org/abs/1511.05950); weight decay
    stays.
    """
    return [
        value / (1 + staleness) if place % 2 == 0 else value for place, value in enumerate(rates)
    ]
