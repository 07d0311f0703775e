"""The steps of a stream, tokenized in advance."""

from typing import Any

from torch import Tensor

from .loader import BatchLoader
from .stream import StreamSamples


class StreamLoader(BatchLoader):
    """A BatchLoader whose one thread reads a stream in order, so many steps ahead as there are
    workers elsewhere.

    samples: read from where ``consumed_samples`` is.
    """

    def __init__(self, samples: StreamSamples, *shape: Any, **settings: Any):
        super().__init__(samples, *shape, **{**settings, "threads": 1})
        self.samples = samples

    def __next__(self) -> list[dict[str, Tensor]]:
        # what was handed out before is trained on: a checkpoint to come is behind it
        self.samples.forget(self.consumed_samples)
        return super().__next__()

    def close(self) -> None:
        self.samples.close()
        super().close()
