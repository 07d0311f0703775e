"""Runs collectives on a side stream, overlapped with later work of the current stream.

    current stream   multiply 0 | multiply 1 |            | use the sums
    side stream                 | sum 0      | sum 1      |

Streams wait for each other through events; the host never waits.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Pending(Protocol):
    """A collective in flight, as ``dist.all_reduce(..., async_op=True)`` returns it."""

    def wait(self) -> object:
        """Make later work on the current stream (on a CPU: the caller) wait for the result."""

    def is_completed(self) -> bool:
        """Whether the result is available already."""


Start = Callable[[Tensor], Pending]
"""Starts an in-place all-reduce of a dense tensor, after the work enqueued so far on the current
stream.
"""


class SideStream:
    """A ``Start`` that runs an all-reduce on a side stream.

    all_reduce: all-reduces a tensor in place on the current stream, such as
                ``PeerMemory.all_reduce``.
    api:        the module with Stream, Event, stream and current_stream.
    """

    def __init__(self, all_reduce: Callable[[Tensor], None], api: Any = torch.cuda):
        self._all_reduce = all_reduce
        self._api = api
        self.stream = api.Stream()

    def __call__(self, tensor: Tensor) -> Pending:
        ready = self._api.Event()
        done = self._api.Event()
        ready.record(self._api.current_stream())
        with self._api.stream(self.stream):
            self.stream.wait_event(ready)
            self._all_reduce(tensor)
            done.record(self.stream)
        tensor.record_stream(self.stream)  # its memory is not reused before the all-reduce is done
        return _Done(done, self._api)


class _Done:
    def __init__(self, event: Any, api: Any):
        self._event = event
        self._api = api

    def wait(self) -> None:
        self._api.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()
