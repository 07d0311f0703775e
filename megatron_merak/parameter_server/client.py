"""One worker's rank and its servers: every call goes to all of them at once, each with its piece."""

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
from ..parallel.roles import Role, ended_key
from .layout import Layout, Span
from .piece import KINDS
from .server import BEATS, born_key, connection_name
from .wire import CLIENT, NUMBERS, POLL, Connection, ConnectionLost, Kind, Message


class Answer(NamedTuple):
    """Of all servers together. version: of the first one's piece. steps: of the optimizer. leader: the first worker
    that lives. staleness: the largest of a gradient's. late: it was too old for some."""

    version: int
    steps: int
    leader: int
    staleness: int = 0
    late: bool = False


class Total(NamedTuple):
    """square: of the norm of the gradients' sum, of this place. told: numbers that came with the gradients, of each
    worker that contributed, in order."""

    square: float
    told: list[tuple[float, ...]]


class Contribution(NamedTuple):
    """step: how many this worker took before. told: up to 12 numbers that the other workers shall know."""

    step: int
    gradient: Tensor
    told: Sequence[float]


@dataclass
class _End:
    """A server as this rank sees it."""

    server: int
    span: Span
    layout: Layout
    connection: Connection | None = None
    birth: int = 0
    version: int = 0
    contributed: int = -1  # the step of which this server, since it was started, has a gradient


class Client:
    """Flat tensors that are passed are of the whole buffer, on the CPU: fp32, but weights in the layout's dtype.

    role: this rank's. store: the job's. ends: of each endpoint of ``role``, the span of the buffer and its layout.
    timeout: how long a server may take to answer, or to be started again. say: is told when one was.
    Every method raises LaunchError when a server is gone for good, and ServerError for what it refuses.
    """

    def __init__(
        self,
        role: Role,
        store: dist.Store,
        pieces: Sequence[tuple[Span, Layout]],
        timeout: timedelta,
        say: Callable[[str], object] = print,
    ):
        self.role, self.store, self.timeout, self.say = role, store, timeout, say
        self.ends = [_End(server, span, layout) for server, (span, layout) in zip(role.endpoints, pieces, strict=True)]
        self._pool = ThreadPoolExecutor(len(self.ends), "servers")
        self.sequence = 0
        self.restarts = 0  # of servers, that this rank saw
        self._calling, self._left = threading.Lock(), threading.Event()
        self._all(lambda end: self._connect(end))
        threading.Thread(target=self._beat, name="beats", daemon=True).start()

    def store_state(self, kind: str, flat: Tensor) -> None:
        """Let the servers' state of one of KINDS be ``flat``."""

        def call(end: _End) -> None:
            end.connection.send(Kind.STORE, (KINDS.index(kind),))
            end.connection.send_tensor(flat[slice(*end.span)])
            self._answer(end)

        self._all(call)

    def fetch_state(self, kind: str, flat: Tensor) -> None:
        """Write one of KINDS of the servers' state into ``flat``."""

        def call(end: _End) -> None:
            end.connection.send(Kind.FETCH, (KINDS.index(kind),))
            self._answer(end)
            end.connection.receive_tensor(flat[slice(*end.span)])

        self._all(call)

    def ready(self, steps: int) -> None:
        """The state is complete. steps: of the optimizer."""
        self._all(lambda end: self._simple(end, Kind.READY, (steps,)))

    def pull(self, weights: Tensor) -> Answer:
        """Write the newest weights into ``weights``, once there are any."""

        def call(end: _End) -> Message:
            end.connection.send(Kind.PULL)
            return self._take(end, weights)

        return _joined(self._all(call))

    def push(self, gradient: Tensor, scale: float, rates: Sequence[float], weights: Tensor) -> Answer:
        """Let a gradient be applied, and write the weights that are new then into ``weights``."""
        self.sequence += 1

        def call(end: _End) -> Message:
            end.connection.send(Kind.PUSH, (self.sequence, end.version, scale, *rates))
            end.connection.send_tensor(gradient[slice(*end.span)])
            return self._take(end, weights)

        return _joined(self._all(call))

    def contribute(self, mine: Contribution) -> Total:
        """Add a gradient to those of the other workers; return when all are there."""
        totals = self._all(lambda end: self._contribute(end, mine))
        most = max((total.told for total in totals), key=len)
        return Total(sum(total.square for total in totals), most)

    def apply(self, mine: Contribution, update: tuple[float, Sequence[float]] | None, weights: Tensor) -> Answer:
        """Let the sum of a step be applied, as (scale, rates) say, or be skipped where that is None, and write the new
        weights into ``weights``. mine: what `contribute` was given, for a server that has lost it."""
        scale, rates = update or (0.0, ())

        def call(end: _End) -> Message:
            if end.contributed != mine.step:
                self._contribute(end, mine)
            end.connection.send(Kind.APPLY, (update is None, scale, *rates))
            return self._take(end, weights)

        return _joined(self._all(call))

    def freeze(self) -> None:
        """Until `thaw`, `fetch_state` and `pull` read the state as it is now."""
        self._all(lambda end: self._simple(end, Kind.FREEZE))

    def thaw(self) -> None:
        self._all(lambda end: self._simple(end, Kind.THAW))

    def done(self) -> None:
        """This worker takes no more steps. Return when no other one does, or is gone: the state is final."""
        self._all(lambda end: self._simple(end, Kind.DONE))

    def first(self) -> bool:
        """Return when the workers before this one have left, or are gone: whether one of them completed the job."""
        return any(answer.numbers[0] for answer in self._all(lambda end: self._simple(end, Kind.FIRST)))

    def leave(self, complete: bool = False) -> None:
        """``complete``: whatever the job writes at its end is there."""
        self._left.set()
        with self._calling:
            self._leave(complete)

    def _leave(self, complete: bool) -> None:
        for end in self.ends:
            try:
                end.connection.send(Kind.LEAVE, (complete,))
            except ConnectionLost:
                pass  # so it is gone already
        self._pool.shutdown()

    def _contribute(self, end: _End, mine: Contribution) -> Total:
        self._simple(end, Kind.CONTRIBUTE, (mine.step, *mine.told))  # answered when the gradient may come
        end.connection.send_tensor(mine.gradient[slice(*end.span)])
        square, count = self._answer(end).numbers[:2]
        heard = torch.empty(int(count) * (NUMBERS - 1), dtype=torch.float64)
        end.connection.receive_tensor(heard)
        end.contributed = mine.step
        return Total(square, [tuple(row) for row in heard.view(-1, NUMBERS - 1).tolist()])

    def _simple(self, end: _End, kind: Kind, numbers: Sequence[float] = ()) -> Message:
        end.connection.send(kind, numbers)
        return self._answer(end)

    def _take(self, end: _End, weights: Tensor) -> Message:
        answer = self._answer(end)
        end.connection.receive_tensor(weights[slice(*end.span)])
        end.version = int(answer.numbers[0])
        return answer

    def _answer(self, end: _End) -> Message:
        while (message := end.connection.receive()).kind is Kind.WAIT:
            pass
        if message.kind is Kind.ERROR:
            reason = message.text.rstrip(".")
            raise ServerError("parameter server", f"(rank {end.server})", reason, "Correct that, and start again")
        return message

    def _all(self, call: Callable[[_End], object]) -> list:
        """``call`` for every server at once; once more where one was lost and is there again."""

        def persist(end: _End) -> object:
            while True:
                try:
                    return call(end)
                except ConnectionLost as error:
                    self._connect(end, error)

        with self._calling:
            return [*self._pool.map(persist, self.ends)]

    def _beat(self) -> None:
        """Between two calls, tell the servers now and then that this rank is at work."""
        while not self._left.wait(self.timeout.total_seconds() / BEATS):
            if not self._calling.acquire(blocking=False):
                continue
            try:
                for end in self.ends if not self._left.is_set() else ():
                    with contextlib.suppress(ConnectionLost):  # the next call will find out
                        end.connection.send(Kind.BEAT)
            finally:
                self._calling.release()

    def _connect(self, end: _End, lost: Exception | None = None) -> None:
        """Connect to a server that was started since this rank last knew of it; wait until there is one."""
        deadline, key = time.monotonic() + self.timeout.total_seconds(), born_key(end.server)
        while True:
            birth = int(self.store.get(key)) if self.store.check([key]) else 0
            if birth > end.birth:
                break
            if time.monotonic() > deadline or self.store.check([ended_key(end.server)]):
                reason = "it did not come" if lost is None else f"it is gone, or gave this rank up ({lost})"
                remedy = "Resume from the last checkpoint; merak-launch starts servers that are killed again"
                raise LaunchError("parameter server", f"(rank {end.server})", reason, remedy)
            time.sleep(POLL)
        end.birth, end.contributed, before = birth, -1, end.version
        try:
            name = connection_name(end.server, birth, self.role.rank)
            end.connection = Connection(self.store, name, CLIENT, self.timeout)
            end.connection.send(Kind.HELLO, text=end.layout.to_json())
            end.version = int(self._answer(end).numbers[1])
        except ConnectionLost as error:
            self._connect(end, error)
            return
        if lost is not None:
            self.restarts += 1
            behind = f", {counted(before - end.version, 'update')} behind" if before > end.version else ""
            self.say(f"parameter server (rank {end.server}) is back at update {end.version}{behind}")


def _joined(answers: Sequence[Message]) -> Answer:
    first = answers[0].numbers
    staleness, late = (max(int(answer.numbers[place]) for answer in answers) for place in (3, 4))
    return Answer(int(first[0]), int(first[1]), int(first[2]), staleness, bool(late))
