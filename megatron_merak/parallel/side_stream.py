"""Collectives of the current stream, run on a stream of their own beside what the current one is given next.

    current stream   multiply 0 | multiply 1 |            | use the sums
    side stream                 | sum 0      | sum 1      |

Streams wait for each other by events; the host waits for nothing.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective under way, as ``dist.all_reduce(..., async_op=True)`` returns it."""

    def wait(self) -> object:
        """What the current stream (on a CPU: the caller) does next finds the result."""

    def is_completed(self) -> bool:
        """Whether the result is there already."""


Start = Callable[[Tensor], Pending]
"""Starts to sum a dense tensor over ranks in place, after what the current stream was given so far."""


class SideStream:
    """Makes a ``Start`` of a sum that runs on the current stream, by running it on a stream of its own.

    all_reduce: sums a tensor in place on the current stream, such as ``PeerMemory.all_reduce``. api: the module with
    Stream, Event, stream and current_stream.
    """

    def __init__(self, all_reduce: Callable[[Tensor], None], api: Any = torch.cuda):
        self._all_reduce, self._api = all_reduce, api
        self.stream = api.Stream()

    def __call__(self, tensor: Tensor) -> Pending:
        ready, done = self._api.Event(), self._api.Event()
        ready.record(self._api.current_stream())
        with self._api.stream(self.stream):
            self.stream.wait_event(ready)
            self._all_reduce(tensor)
            done.record(self.stream)
        tensor.record_stream(self.stream)  # its memory is not given away before the sum is through
        return _Done(done, self._api)


class _Done:
    def __init__(self, event: Any, api: Any):
        self._event, self._api = event, api

    def wait(self) -> None:
        self._api.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()
