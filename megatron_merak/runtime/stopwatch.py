"""Times the ops of a step: with a clock on a CPU, with events on a GPU, which runs asynchronously
to the host.
"""

from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """``mark()`` records the current time, ``seconds(mark)`` returns it later, in seconds of the
    clock ``now``.
    """

    def __init__(self, now: Callable[[], float]):
        self.mark = now

    def seconds(self, mark: Any) -> float:
        return mark


class GpuStopwatch:
    """Marks are events on the current stream of ``device``; the first call of ``seconds`` waits for
    all of them.

    now: the clock that the events are aligned with, read at construction, when the device is idle.
    api: the module with Event, current_stream and synchronize.
    """

    def __init__(self, now: Callable[[], float], device: torch.device, api: Any = torch.cuda):
        self._device = device
        self._api = api
        self._waited = False
        api.synchronize(device)
        self._first = self.mark()
        self._began = now()

    def mark(self) -> Any:
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        if not self._waited:
            self._api.synchronize(self._device)
            self._waited = True
        return self._began + self._first.elapsed_time(mark) / 1e3
