"""A store that is asked by a thread of its own: whoever asks waits some seconds for an answer, and
no longer.

torch waits without end where the store's launcher is stopped or its host is lost: the timeout of a
store limits only how long a key may be missing.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Value = TypeVar("Value")


class Answers:
    """Calls functions of a store, one at a time.

    patience: seconds to wait for an answer.
    """

    def __init__(self, patience: float):
        self.patience = patience
        self._questions: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = (
            queue.SimpleQueue()
        )
        self._turn = threading.Lock()
        self._last: Future | None = None
        threading.Thread(target=self._ask, name="megatron_merak store", daemon=True).start()

    def __call__(self, call: Callable[..., Value], *arguments: object) -> Value:
        """Return what a function returns. Raises TimeoutError if no answer comes, at once while an
        old one is due.
        """
        if not self._turn.acquire(timeout=self.patience):
            raise self._silent()
        try:
            if self._last is not None and not self._last.done():
                raise self._silent()
            self._last = Future()
            self._questions.put((self._last, call, arguments))
            try:
                return self._last.result(self.patience)
            except TimeoutError:
                raise self._silent() from None
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the thread when it has its last answer."""
        self._questions.put(None)

    def _silent(self) -> TimeoutError:
        return TimeoutError(f"no answer within {self.patience:.0f} s")

    def _ask(self) -> None:
        while question := self._questions.get():
            answer, call, arguments = question
            try:
                answer.set_result(call(*arguments))
            except BaseException as error:
                answer.set_exception(error)
