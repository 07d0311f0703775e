"""When the ops of a step began and ended: by a clock on the CPU, by events on a GPU, which works behind the host."""

from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """``mark()`` notes a moment, ``seconds(mark)`` tells it later, both on the clock ``now``."""

    def __init__(self, now: Callable[[], float]):
        self.mark = now

    def seconds(self, mark: Any) -> float:
        return mark


class GpuStopwatch:
    """Moments are events on the current stream of ``device``; the first ``seconds`` waits for all that were marked.

    now: the clock that the first event is set by, when the device has nothing to do. api: the module with Event,
    current_stream and synchronize.
    """

    def __init__(self, now: Callable[[], float], device: torch.device, api: Any = torch.cuda):
        self._device, self._api, self._waited = device, api, False
        api.synchronize(device)
        self._first, self._began = self.mark(), now()

    def mark(self) -> Any:
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self._device))
        return event

    def seconds(self, mark: Any) -> float:
        if not self._waited:
            self._api.synchronize(self._device)
            self._waited = True
        return self._began + self._first.elapsed_time(mark) / 1e3
