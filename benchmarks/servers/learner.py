"""Follows a trace of modelled workers and servers with real gradients, which the servers' own code
applies.

There is one process and no network: a message goes to a `Service` as from a connection, and its
answer comes back.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.servers.modelled import Event, Trace
from megatron_merak.parameter_server.layout import PieceLayout, Span, pieces_of
from megatron_merak.parameter_server.piece import KINDS
from megatron_merak.parameter_server.service import Service, Snapshots
from megatron_merak.parameter_server.wire import NUMBERS, Message, MessageKind

MASTER = (KINDS.index("master"),)
HELLO = (MessageKind.HELLO, (), None)


class Line:
    """The server's end of a connection on which some messages have come already, each with its
    tensor or None.
    """

    def __init__(
        self, *messages: tuple[MessageKind, Sequence[float], Tensor | None], text: str = ""
    ):
        self.messages, self.text = [*messages, (MessageKind.LEAVE, (), None)], text
        self.tensor: Tensor | None = None
        self.answer = Message(MessageKind.LEAVE)
        self.answered: Tensor | None = None

    def receive(self) -> Message:
        kind, numbers, self.tensor = self.messages.pop(0)
        return Message(kind, (*numbers, *[0.0] * (NUMBERS - len(numbers))), self.text)

    def receive_tensor(self, flat: Tensor) -> None:
        flat.copy_(self.tensor)

    def send(self, kind: MessageKind, numbers: Sequence[float] = (), text: str = "") -> None:
        if kind is MessageKind.ERROR:
            raise RuntimeError(text)
        self.answer = Message(kind, tuple(numbers), text)

    def send_tensor(self, flat: Tensor) -> None:
        self.answered = flat.clone()


@dataclass(frozen=True)
class Settings:
    """What servers are told of a model; see `PieceLayout`. decay: of weights."""

    workers: int
    sync: bool
    max_staleness: int
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.0


class Servers:
    """Services that hold ``weights``, fp32 [n], one piece each.

    staleness: of each worker, how many of its gradients were so old, over all pieces. dropped:
               those that were too old.
    """

    def __init__(self, weights: Tensor, servers: int, settings: Settings):
        self.settings = settings
        self.spans: list[Span] = pieces_of(weights.numel(), servers)
        self.staleness: list[Counter[int]] = [Counter() for _ in range(settings.workers)]
        self.dropped = [0] * settings.workers
        self._sequence = 0
        self._versions: Counter[tuple[int, int]] = Counter()
        self._pool = ThreadPoolExecutor(settings.workers)
        self._layouts: list[str] = []  # of each server: what a connection says first
        self.services = [self._service(weights[slice(*span)]) for span in self.spans]

    def _service(self, weights: Tensor) -> Service:
        settings, whole = self.settings, (0, weights.numel())
        service = Service(settings.workers, Snapshots(), self._pool)
        layout = PieceLayout(
            elements=weights.numel(),
            dtype="float32",
            groups=((*whole, 0),),
            counted=(whole,),
            copies=(),
            betas=settings.betas,
            eps=settings.eps,
            workers=settings.workers,
            sync=settings.sync,
            max_staleness=settings.max_staleness,
        )
        self._layouts.append(layout.to_json())
        store = (MessageKind.STORE, MASTER, weights)
        service.serve(0, Line(HELLO, store, (MessageKind.READY, (0,), None), text=layout.to_json()))
        return service

    def push(self, worker: int, server: int, gradient: Tensor, rate: float) -> Tensor:
        """Let one server apply its piece of a worker's gradient [n]; its weights after that."""
        self._sequence += 1
        numbers = (self._sequence, self._versions[worker, server], 1.0, rate, self.settings.decay)
        push = (MessageKind.PUSH, numbers, gradient[slice(*self.spans[server])])
        line = Line(HELLO, push, text=self._layouts[server])
        self.services[server].serve(worker, line)
        version, _, _, staleness, late = line.answer.numbers
        self._versions[worker, server] = int(version)
        self.staleness[worker][int(staleness)] += 1
        self.dropped[worker] += int(late)
        return line.answered

    def step(self, server: int, step: int, gradients: Sequence[Tensor], rate: float) -> Tensor:
        """Let one server add its piece of all workers' gradients [n] and apply the sum; its weights
        after that.
        """
        piece = slice(*self.spans[server])
        apply = (MessageKind.APPLY, (0, 1.0, rate, self.settings.decay), None)
        lines = [
            Line(
                HELLO,
                (MessageKind.CONTRIBUTE, (step,), gradient[piece]),
                apply,
                text=self._layouts[server],
            )
            for gradient in gradients
        ]
        list(self._pool.map(self.services[server].serve, range(len(lines)), lines))
        return lines[0].answered

    def weights(self) -> Tensor:
        """Of all pieces, fp32 [n]."""
        return torch.cat([service.piece.state["master"] for service in self.services])


class Problem(Protocol):
    """weights: fp32 [n], to begin with."""

    weights: Tensor

    def gradient(self, weights: Tensor, part: int) -> Tensor:
        """Of the mean loss over the samples of a part of a batch, fp32 [n]."""

    def loss(self, weights: Tensor) -> float:
        """On samples that are not trained on."""


@dataclass
class Curve:
    """Loss over modelled seconds, and what became of gradients; see `Servers`."""

    trace: Trace
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    staleness: list[Counter[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    weights: Tensor | None = None

    def reached(self, goal: float) -> float:
        """Seconds until the loss is at most ``goal``; infinity where it never is."""
        return next(
            (time for time, loss in zip(self.seconds, self.losses, strict=True) if loss <= goal),
            math.inf,
        )


def learn(
    trace: Trace, problem: Problem, settings: Settings, rate: Callable[[int], float], every: int
) -> Curve:
    """Train by a trace of ps-sync or ps-async. rate: of each step of all workers. every: steps
    between two losses.
    """
    servers = Servers(problem.weights, len(trace.setup.role.endpoints), settings)
    curve = Curve(trace, [0.0], [problem.loss(problem.weights)])
    follower = (_Together if settings.sync else _Alone)(problem, servers, trace.setup.workers, rate)
    # of the events until a loss
    last = every * len(servers.spans) * (1 if settings.sync else trace.setup.workers)
    for number, event in enumerate(trace.events, 1):
        follower.follow(event)
        if number % last == 0:
            curve.seconds.append(event.seconds)
            curve.losses.append(problem.loss(servers.weights()))
    curve.staleness = servers.staleness
    curve.dropped = servers.dropped
    curve.weights = servers.weights()
    return curve


class _Together:
    """All workers have the same weights, and take the same step."""

    def __init__(
        self, problem: Problem, servers: Servers, workers: int, rate: Callable[[int], float]
    ):
        self.problem = problem
        self.servers = servers
        self.workers = workers
        self.rate = rate
        self.weights, self.step = problem.weights.clone(), -1
        self.gradients: list[Tensor] = []

    def follow(self, event: Event) -> None:
        step, workers = event.part, self.workers
        if step != self.step:
            self.step, parts = step, range(step * workers, (step + 1) * workers)
            self.gradients = [self.problem.gradient(self.weights, part) / workers for part in parts]
        answer = self.servers.step(event.server, step, self.gradients, self.rate(step))
        self.weights[slice(*self.servers.spans[event.server])] = answer


class _Alone:
    """A worker's gradient is of the weights that it had when it claimed the part; servers may
    answer long before others have it."""

    def __init__(
        self, problem: Problem, servers: Servers, workers: int, rate: Callable[[int], float]
    ):
        self.problem = problem
        self.servers = servers
        self.workers = workers
        self.rate = rate
        self.weights = [problem.weights.clone() for _ in range(workers)]
        self.parts, self.gradients = [-1] * workers, [problem.weights] * workers

    def follow(self, event: Event) -> None:
        worker = event.worker
        part = event.part
        server = event.server
        if part != self.parts[worker]:
            self.parts[worker] = part
            self.gradients[worker] = self.problem.gradient(self.weights[worker], part)
        answer = self.servers.push(
            worker, server, self.gradients[worker], self.rate(part // self.workers)
        )
        self.weights[worker][slice(*self.servers.spans[server])] = answer
