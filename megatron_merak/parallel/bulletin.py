"""What the ranks of a job say of themselves in its store, and the verdict on a hang.

A watchdog publishes and reads here, see ``watchdog``. Every call raises RuntimeError, ValueError or
OSError where the store does not answer.
"""

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .answers import Answers

ANSWER = 10.0  # seconds after which the store counts as lost
_LAST_OUT = 5.0  # seconds that the first rank waits for the others to leave the store


@dataclass(frozen=True)
class Peer:
    """What another rank published last; when this rank first saw it, and when it last looked."""

    state: dict[str, Any]
    heard: float
    looked: float

    @property
    def ended(self) -> str:
        return self.state["ended"]

    @property
    def silent(self) -> float:
        return self.looked - self.heard

    @property
    def still(self) -> float:
        return self.state["still"] + self.silent


_NEVER: Mapping[str, Any] = {
    "ended": "",
    "at": "(never heard of)",
    "in_step": False,
    "stage": None,
    "still": 0.0,
    "waits": False,
    "stack": "",
    "place": ["", 0, 0],
    "memory": [0, 0, 0, 0],
    "number": 0,
}


class Bulletin:
    """The part of a job's store that its watchdogs write and read.

    rank, size: of the job.
    store:      of the job, without keys of an earlier attempt.
    """

    def __init__(self, rank: int, size: int, store: dist.Store):
        self.rank = rank
        self.size = size
        # A clone has a connection of its own: a blocked call of another thread must not block this
        # one.
        own = store.clone()  # type: ignore[attr-defined]  # which torch's stubs leave out
        self._store = dist.PrefixStore("watchdog", own)
        self._store.set_timeout(timedelta(seconds=ANSWER))
        # Ranks may make and leave several groups in one process; all of them count these alike.
        number = self._store.add(f"starts of {rank}", 1)
        self._store = dist.PrefixStore(f"{number}", self._store)
        self._ask = Answers(ANSWER)
        self._lock = threading.Lock()
        self._published = 0
        self._farewell = False
        self._peers: dict[int, Peer] = {}

    def publish(self, state: dict[str, Any]) -> None:
        """Say where this rank is. A farewell, whose state has ``ended``, stays."""
        with self._lock:
            if self._farewell and not state["ended"]:
                return  # another thread has said farewell since the state was looked at
            self._farewell = bool(state["ended"])
            self._published += 1
            text = json.dumps(state | {"number": self._published})
            self._ask(self._store.set, f"{self.rank}", text)

    def read(self) -> dict[int, Peer]:
        """Return what all other ranks have published last."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        known = [
            rank
            for rank in others
            if rank in self._peers or self._ask(self._store.check, [f"{rank}"])
        ]
        texts = self._ask(self._store.multi_get, [f"{rank}" for rank in known]) if known else []
        now = time.monotonic()
        states = {rank: json.loads(text) for rank, text in zip(known, texts, strict=True)}
        peers = {}
        for rank in others:
            state = states.get(rank, _NEVER)
            before = self._peers.get(rank)
            heard = now
            if before is not None and before.state["number"] == state["number"]:
                heard = before.heard
            peers[rank] = Peer(state, heard, now)
        self._peers = peers
        return peers

    def forget(self) -> None:
        """Forget when ranks were heard of: none is silent by what happened before."""
        self._peers = {}

    def judged(self) -> bool:
        """Whether a rank has begun to write a verdict."""
        return bool(self._ask(self._store.add, "verdicts", 0))

    def judge(self, verdict: Mapping[str, Any]) -> None:
        """Write a verdict, unless another rank was first."""
        if self._ask(self._store.add, "verdicts", 1) == 1:
            self._ask(self._store.set, "verdict", json.dumps(verdict))

    def verdict(self, poll: float) -> dict[str, Any]:
        """Wait for the verdict of the rank that was first, and return it.

        poll: seconds between two looks.
        """
        end = time.monotonic() + ANSWER
        while time.monotonic() < end and not self._ask(self._store.check, ["verdict"]):
            time.sleep(poll)
        return json.loads(self._ask(self._store.get, "verdict"))

    def wait_for_readers(self, readers: int, patience: float, poll: float) -> None:
        """Wait until so many ranks have read the verdict.

        patience: seconds to wait for them.
        poll:     seconds between two looks.
        """
        end = time.monotonic() + patience
        seen = self._ask(self._store.add, "seen", 1)
        while seen < readers and time.monotonic() < end:
            time.sleep(poll)
            seen = self._ask(self._store.add, "seen", 0)

    def close(self) -> None:
        """Publish and read no more."""
        self._ask.close()

    def leave(self) -> None:
        """Use the job's store no more, behind ``close``; the first rank waits for the others, since
        on its host the store is.

        Where a store ends while a rank is in a call to it, torch prints the stack of its C++ code.
        """
        end = time.monotonic() + _LAST_OUT
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            if self.rank:
                self._store.add("left", 1)
                return
            while self._store.add("left", 0) < self.size - 1 and time.monotonic() < end:
                time.sleep(_LAST_OUT / 500)
