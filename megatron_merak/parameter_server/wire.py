"""Messages between one worker's rank and one server, over a process group of these two alone.

A rank that dies breaks its own connections only; a restarted server is connected to anew. A message
is a kind, some numbers, and possibly text or a flat tensor of a length that both sides know.
"""

import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.listening import SECRET_BYTES, proof, proves

NUMBERS = 16  # of a message, beside its kind
_CHUNK = 1 << 26  # elements of a tensor that are sent at a time

CLIENT = 0
SERVER = 1
POLL = 0.2  # seconds between two looks into the store


class MessageKind(IntEnum):
    """What a message says.

    The server replies to each one, except LEAVE and HEARTBEAT, with a message of the same kind, or
    ERROR, and possibly some WAIT before it. So a side that is silent for too long is gone, however
    long a step takes.
    """

    HELLO = 1  # text: the client's layout
    STORE = 2  # a tensor of the state: one kind of it, from the client
    FETCH = 3  # and to the client
    READY = 4  # the state is complete: others may pull
    PULL = 5  # the newest weights
    PUSH = 6  # asynchronous: a gradient to apply at once; the reply has weights
    # synchronous: a gradient to add to those of the other workers; replies come before and after it
    CONTRIBUTE = 7
    APPLY = 8  # synchronous: apply the sum; the reply has weights
    FREEZE = 9  # keep a copy of the state, which FETCH and PULL then read
    THAW = 10
    DONE = 11  # the worker takes no more steps; the reply comes once no worker does
    LEAVE = 12  # whether the job is complete: its final state is written
    ERROR = 13  # text: what is wrong
    WAIT = 14  # from the server: the reply will come, it waits for others
    HEARTBEAT = 15  # from the client
    # the reply comes once no worker before this one is left: whether the job is complete
    FIRST = 16


class Message(NamedTuple):
    """A message. numbers: NUMBERS of them, 0 if unused."""

    kind: MessageKind
    numbers: tuple[float, ...] = ()
    text: str = ""


LONGEST = 1 << 28  # bytes of a message's text


class ConnectionLost(Exception):
    """The other side has gone, or never came."""


def comes(store: dist.Store, name: str, side: int, unless: str, timeout: timedelta) -> bool:
    """Whether the ``side`` of a connection comes within ``timeout``, and before the key ``unless``
    is in the store.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    key = _coming(name, side)
    while not store.check([key]):
        if store.check([unless]) or time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


def _coming(name: str, side: int) -> str:
    return f"{name}, side {side} comes"


class Connection:
    """One end of a connection.

    store:   of the job.
    name:    the same at both ends, and never used before.
    side:    CLIENT or SERVER.
    timeout: how long the other side may take to connect, and to reply.
    secret:  of the job; nothing is read from a side before it has proved that it knows it.
    """

    def __init__(self, store: dist.Store, name: str, side: int, timeout: timedelta, secret: bytes):
        self.other = 1 - side
        self.name = name
        try:
            # A connection to the store serves one thread at a time, which may wait there for the
            # other side.
            own = store.clone()  # type: ignore[attr-defined]  # which torch's stubs leave out
            own.set(_coming(name, side), "")
            self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, own), side, 2, timeout)
        except RuntimeError as error:
            raise ConnectionLost(_first_sentence(error)) from error
        if side == SERVER:
            self._challenge(secret)
        else:
            self._answer(secret)

    def _challenge(self, secret: bytes) -> None:
        """Let the client prove that it knows the secret, then prove it too. Raises
        ConnectionLost.
        """
        own = secrets.token_bytes(SECRET_BYTES)
        self._send_bytes(own)
        theirs = self._receive_bytes()
        self._check(self._receive_bytes(), proof(secret, "client", self.name, own, theirs))
        self._send_bytes(proof(secret, "server", self.name, own, theirs))

    def _answer(self, secret: bytes) -> None:
        """The client's part of ``_challenge``."""
        theirs = self._receive_bytes()
        own = secrets.token_bytes(SECRET_BYTES)
        self._send_bytes(own)
        self._send_bytes(proof(secret, "client", self.name, theirs, own))
        self._check(self._receive_bytes(), proof(secret, "server", self.name, theirs, own))

    def _check(self, given: bytes, wanted: bytes) -> None:
        if not proves(given, wanted):
            del self.group  # which closes the connection
            raise ConnectionLost("the other side does not know the secret of this job")

    def _send_bytes(self, data: bytes) -> None:
        self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def _receive_bytes(self) -> bytes:
        data = torch.empty(SECRET_BYTES, dtype=torch.uint8)
        self._receive(data)
        return data.numpy().tobytes()

    def send(self, kind: MessageKind, numbers: Sequence[float] = (), text: str = "") -> None:
        data = text.encode()
        head = torch.zeros(NUMBERS + 2, dtype=torch.float64)
        head[0] = kind
        head[1] = len(data)
        head[2 : 2 + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        self._send(head)
        if data:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> Message:
        head = torch.empty(NUMBERS + 2, dtype=torch.float64)
        self._receive(head)
        kind, length, *numbers = head.tolist()
        if kind not in (*MessageKind,) or not 0 <= length <= LONGEST:
            raise ConnectionLost("what it sends is no message of a parameter server")
        data = torch.empty(int(length), dtype=torch.uint8)
        if length:
            self._receive(data)
        return Message(
            MessageKind(int(kind)), tuple(numbers), data.numpy().tobytes().decode(errors="replace")
        )

    def send_tensor(self, flat: Tensor) -> None:
        """Send ``flat``: contiguous, one dimension, on the CPU."""
        for part in flat.split(_CHUNK):
            self._send(part)

    def receive_tensor(self, flat: Tensor) -> None:
        for part in flat.split(_CHUNK):
            self._receive(part)

    def _send(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._wait(self.group.send, tensor)

    def _receive(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._wait(self.group.recv, tensor)

    def _wait(self, transfer, tensor: Tensor) -> None:
        try:
            transfer([tensor], self.other, 0).wait()
        except RuntimeError as error:
            raise ConnectionLost(_first_sentence(error)) from error


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error of gloo, without the place in its sources."""
    text = str(error).partition("\n")[0]
    return (text.partition("] ")[2] or text).partition(". ")[0]
