"""The connections of one worker's rank to its servers: every call goes to all of them at once, each
with its piece.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..counting import counted
from ..errors import LaunchError, ServerError
from .layout import PieceLayout, Span
from .piece import KINDS
from .roles import Role, ended_key
from .server import HEARTBEATS, connection_name, starts_key
from .wire import CLIENT, NUMBERS, POLL, Connection, ConnectionLost, Message, MessageKind


class Reply(NamedTuple):
    """The combined reply of all servers.

    version:   of the first server's piece.
    steps:     of the optimizer.
    leader:    the first worker that is alive.
    staleness: the largest of a gradient.
    late:      whether the gradient was too stale for some server.
    """

    version: int
    steps: int
    leader: int
    staleness: int = 0
    late: bool = False


class Total(NamedTuple):
    """The sum of the workers' gradients at this place.

    square:   its squared norm.
    reported: numbers that came with the gradients, one tuple per worker that contributed, in order.
    """

    square: float
    reported: list[tuple[float, ...]]


class Contribution(NamedTuple):
    """A worker's gradient for a step that all workers take together.

    step:     steps that this worker took before.
    reported: up to 12 numbers for the other workers.
    """

    step: int
    gradient: Tensor
    reported: Sequence[float]


@dataclass
class _End:
    """A server as this rank sees it."""

    server: int
    span: Span
    layout: PieceLayout
    made: Connection | None = None
    start: int = 0
    version: int = 0
    contributed: int = -1  # the step of which this server, since it was started, has a gradient

    @property
    def connection(self) -> Connection:
        """The connection that is made before anything is sent."""
        assert self.made is not None
        return self.made


class Client:
    """This rank's connections to its servers.

    role:    this rank's.
    store:   the job's.
    ends:    of each endpoint of ``role``, the span of the buffer and its layout.
    timeout: how long a server may take to reply, or to be restarted.
    say:     called with a line when a server was restarted.

    Flat tensors that are passed are of the whole buffer and on the CPU: weights in the layout's
    dtype, others in fp32. Every method raises LaunchError if a server is gone for good, and
    ServerError for what it refuses.
    """

    def __init__(
        self,
        role: Role,
        store: dist.Store,
        pieces: Sequence[tuple[Span, PieceLayout]],
        timeout: timedelta,
        say: Callable[[str], object] = print,
    ):
        self.role = role
        self.store = store
        self.timeout = timeout
        self.say = say
        self.ends = [
            _End(server, span, layout)
            for server, (span, layout) in zip(role.endpoints, pieces, strict=True)
        ]
        self._pool = ThreadPoolExecutor(len(self.ends), "servers")
        self.sequence = 0
        self.restarts = 0  # of servers, that this rank saw
        self._calling = threading.Lock()
        self._left = threading.Event()
        self._all(lambda end: self._connect(end))
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def store_state(self, kind: str, flat: Tensor) -> None:
        """Set one of KINDS of the servers' state to ``flat``."""

        def call(end: _End) -> None:
            end.connection.send(MessageKind.STORE, (KINDS.index(kind),))
            end.connection.send_tensor(flat[slice(*end.span)])
            self._reply(end)

        self._all(call)

    def fetch_state(self, kind: str, flat: Tensor) -> None:
        """Copy one of KINDS of the servers' state into ``flat``."""

        def call(end: _End) -> None:
            end.connection.send(MessageKind.FETCH, (KINDS.index(kind),))
            self._reply(end)
            end.connection.receive_tensor(flat[slice(*end.span)])

        self._all(call)

    def ready(self, steps: int) -> None:
        """Tell the servers that their state is complete. steps: of the optimizer."""
        self._all(lambda end: self._simple(end, MessageKind.READY, (steps,)))

    def pull(self, weights: Tensor) -> Reply:
        """Copy the newest weights into ``weights``; wait until there are any."""

        def call(end: _End) -> Message:
            end.connection.send(MessageKind.PULL)
            return self._take(end, weights)

        return _combined(self._all(call))

    def push(
        self, gradient: Tensor, scale: float, rates: Sequence[float], weights: Tensor
    ) -> Reply:
        """Apply a gradient, and copy the updated weights into ``weights``."""
        self.sequence += 1

        def call(end: _End) -> Message:
            end.connection.send(MessageKind.PUSH, (self.sequence, end.version, scale, *rates))
            end.connection.send_tensor(gradient[slice(*end.span)])
            return self._take(end, weights)

        return _combined(self._all(call))

    def contribute(self, contribution: Contribution) -> Total:
        """Add a gradient to those of the other workers; return when all have contributed."""
        totals = self._all(lambda end: self._contribute(end, contribution))
        most = max((total.reported for total in totals), key=len)
        return Total(sum(total.square for total in totals), most)

    def apply(
        self,
        contribution: Contribution,
        update: tuple[float, Sequence[float]] | None,
        weights: Tensor,
    ) -> Reply:
        """Apply the sum of a step, and copy the updated weights into ``weights``.

        contribution: the argument of `contribute`, for a server that has lost it.
        update:       (factor, rates); None: skip the step.
        """
        scale, rates = update or (0.0, ())

        def call(end: _End) -> Message:
            if end.contributed != contribution.step:
                self._contribute(end, contribution)
            end.connection.send(MessageKind.APPLY, (update is None, scale, *rates))
            return self._take(end, weights)

        return _combined(self._all(call))

    def freeze(self) -> None:
        """Let `fetch_state` and `pull` read the state as it is now, until `thaw`."""
        self._all(lambda end: self._simple(end, MessageKind.FREEZE))

    def thaw(self) -> None:
        self._all(lambda end: self._simple(end, MessageKind.THAW))

    def done(self) -> None:
        """Declare that this worker takes no more steps. Return when no other worker does: the state
        is then final.
        """
        self._all(lambda end: self._simple(end, MessageKind.DONE))

    def first(self) -> bool:
        """Wait until the workers before this one have left or died; return whether one of them
        completed the job.
        """
        return any(
            reply.numbers[0]
            for reply in self._all(lambda end: self._simple(end, MessageKind.FIRST))
        )

    def leave(self, complete: bool = False) -> None:
        """Leave the job. complete: whether all files that the job writes at its end exist."""
        self._left.set()
        with self._calling:
            self._leave(complete)

    def _leave(self, complete: bool) -> None:
        for end in self.ends:
            try:
                end.connection.send(MessageKind.LEAVE, (complete,))
            except ConnectionLost:
                pass  # so it is gone already
        self._pool.shutdown()

    def _contribute(self, end: _End, contribution: Contribution) -> Total:
        # The reply comes when the gradient may be sent.
        self._simple(end, MessageKind.CONTRIBUTE, (contribution.step, *contribution.reported))
        end.connection.send_tensor(contribution.gradient[slice(*end.span)])
        square, count = self._reply(end).numbers[:2]
        received = torch.empty(int(count) * (NUMBERS - 1), dtype=torch.float64)
        end.connection.receive_tensor(received)
        end.contributed = contribution.step
        return Total(square, [tuple(row) for row in received.view(-1, NUMBERS - 1).tolist()])

    def _simple(self, end: _End, kind: MessageKind, numbers: Sequence[float] = ()) -> Message:
        end.connection.send(kind, numbers)
        return self._reply(end)

    def _take(self, end: _End, weights: Tensor) -> Message:
        reply = self._reply(end)
        end.connection.receive_tensor(weights[slice(*end.span)])
        end.version = int(reply.numbers[0])
        return reply

    def _reply(self, end: _End) -> Message:
        while (message := end.connection.receive()).kind is MessageKind.WAIT:
            pass
        if message.kind is MessageKind.ERROR:
            reason = message.text.rstrip(".")
            raise ServerError(
                "parameter server", f"(rank {end.server})", reason, "Correct that, and start again"
            )
        return message

    def _all(self, call: Callable[[_End], object]) -> list:
        """Make a call to every server at once; repeat it for a server that was lost and has
        restarted.
        """

        def persist(end: _End) -> object:
            while True:
                try:
                    return call(end)
                except ConnectionLost as error:
                    self._connect(end, error)

        with self._calling:
            return [*self._pool.map(persist, self.ends)]

    def _beat(self) -> None:
        """Send servers a heartbeat now and then between two calls."""
        while not self._left.wait(self.timeout.total_seconds() / HEARTBEATS):
            if not self._calling.acquire(blocking=False):
                continue
            try:
                for end in self.ends if not self._left.is_set() else ():
                    with contextlib.suppress(ConnectionLost):  # the next call will find out
                        end.connection.send(MessageKind.HEARTBEAT)
            finally:
                self._calling.release()

    def _connect(self, end: _End, lost: Exception | None = None) -> None:
        """Connect to a server that was started since this rank last connected; wait for one."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        key = starts_key(end.server)
        while True:
            start = int(self.store.get(key)) if self.store.check([key]) else 0
            if start > end.start:
                break
            if time.monotonic() > deadline or self.store.check([ended_key(end.server)]):
                reason = (
                    "it did not come"
                    if lost is None
                    else f"it is gone, or gave this rank up ({lost})"
                )
                remedy = (
                    "Resume from the last checkpoint; merak-launch starts servers that are "
                    "killed again"
                )
                raise LaunchError("parameter server", f"(rank {end.server})", reason, remedy)
            time.sleep(POLL)
        before = end.version
        end.start = start
        end.contributed = -1
        try:
            name = connection_name(end.server, start, self.role.rank)
            end.made = Connection(self.store, name, CLIENT, self.timeout, secret=self.role.secret)
            end.connection.send(MessageKind.HELLO, text=end.layout.to_json())
            end.version = int(self._reply(end).numbers[1])
        except ConnectionLost as error:
            self._connect(end, error)
            return
        if lost is not None:
            self.restarts += 1
            behind = (
                f", {counted(before - end.version, 'update')} behind"
                if before > end.version
                else ""
            )
            self.say(
                f"parameter server (rank {end.server}) is back at update {end.version}{behind}"
            )


def _combined(replies: Sequence[Message]) -> Reply:
    first = replies[0].numbers
    staleness, late = (max(int(reply.numbers[place]) for reply in replies) for place in (3, 4))
    return Reply(int(first[0]), int(first[1]), int(first[2]), staleness, late=bool(late))
