"""The steps of a stream, tokenized in advance."""

from threading import Timer
from typing import Any

from torch import Tensor

from ..parallel.position import tell
from .loader import BatchLoader
from .stream import StreamSamples

_SLOW = 5.0  # seconds that the first step may take before the user is told why


class StreamLoader(BatchLoader):
    """A BatchLoader whose one thread reads a stream in order, so many steps ahead as there are
    workers elsewhere.

    samples: read from where ``consumed_samples`` is.
    """

    def __init__(self, samples: StreamSamples, *shape: Any, **settings: Any):
        super().__init__(samples, *shape, **{**settings, "threads": 1})
        self.samples = samples
        self._is_begun = False

    def __next__(self) -> list[dict[str, Tensor]]:
        if self._is_begun:
            return self._go_on()
        self._is_begun = True
        text = "megatron_merak: streams are read forward to where the run is"
        slow = Timer(_SLOW, tell, [text])
        slow.daemon = True
        slow.start()
        try:
            return self._go_on()
        finally:
            slow.cancel()

    def _go_on(self) -> list[dict[str, Tensor]]:
        # what was handed out before is trained on: a checkpoint to come is behind it
        self.samples.forget(self.consumed_samples)
        return super().__next__()

    def close(self) -> None:
        self.samples.close()
        super().close()
