"""The samples of the micro-batches of a step, fetched in advance."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

Sample = Mapping[str, torch.Tensor]


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def microbatch_samples(
    consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, num_microbatches: int
) -> list[range]:
    """Dataset indices of each micro-batch of data-parallel rank `dp_rank` in the step that starts
    at `consumed_samples` (Megatron's `single` sampler).

    The global batch is cut into chunks of micro_batch_size * dp_size, one per micro-batch, and a
    chunk into one piece per rank; so the union over the ranks is the same for every dp_size.
    """
    starts = [
        consumed_samples + (k * dp_size + dp_rank) * micro_batch_size
        for k in range(num_microbatches)
    ]
    return [range(start, start + micro_batch_size) for start in starts]


class BatchLoader:
    """Iterator over steps: each item is a list of micro-batches, dicts of stacked tensors
    [micro_batch_size, ...].

    `size(consumed_samples)`: samples of a step, over all data-parallel ranks. `consumed_samples`
    counts those that were handed out; a loader made with the value of another one continues exactly
    where that one stood, also with another dp_size, micro-batch or global batch. A last, partial
    global batch is dropped: then iteration stops. With `workers` > 0 that many threads prepare as
    many steps ahead; an error in one of them is raised by the `next` of its step. `close` ends the
    threads. `threads`: fewer of them than steps ahead; a dataset that is read in order needs one.
    `pinned`: tensors lie in memory that a GPU copies from without the host waiting.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        size: Callable[[int], int],
        consumed_samples: int = 0,
        workers: int = 0,
        pinned: bool = False,
        threads: int | None = None,
    ):
        assert 0 <= dp_rank < dp_size and micro_batch_size > 0
        assert consumed_samples >= 0 and workers >= 0
        self.dataset = dataset
        self.consumed_samples = consumed_samples
        self._shape = (micro_batch_size, dp_rank, dp_size)
        self._size = size
        self._workers = workers
        self._pinned = pinned
        self._pool: ThreadPoolExecutor | None = None
        if workers:
            self._pool = ThreadPoolExecutor(threads or workers, "batch-loader")
        # (samples consumed after the step, the step)
        self._ahead: deque[tuple[int, Future]] = deque()

    def __iter__(self) -> "BatchLoader":
        return self

    def __next__(self) -> list[dict[str, torch.Tensor]]:
        end = self._end(self.consumed_samples)
        if end > len(self.dataset):
            raise StopIteration
        pool = self._pool
        if pool is None:
            step = self._load(self.consumed_samples)
        else:
            self._fetch_ahead(pool)
            step = self._ahead[0][1].result()
            self._ahead.popleft()
        self.consumed_samples = end
        return step

    def at(self, consumed_samples: int) -> list[dict[str, torch.Tensor]] | None:
        """Return the step that starts there, whatever was returned before; None if the data end
        within it.
        """
        return (
            None
            if self._end(consumed_samples) > len(self.dataset)
            else self._load(consumed_samples)
        )

    def _end(self, consumed_samples: int) -> int:
        return consumed_samples + self._size(consumed_samples)

    def _fetch_ahead(self, pool: ThreadPoolExecutor) -> None:
        """Prepare one step more than there are workers: the one that is waited for, and those after
        it.
        """
        start = self._ahead[-1][0] if self._ahead else self.consumed_samples
        while len(self._ahead) <= self._workers and (end := self._end(start)) <= len(self.dataset):
            self._ahead.append((end, pool.submit(self._load, start)))
            start = end

    def _load(self, consumed_samples: int) -> list[dict[str, torch.Tensor]]:
        micro_batch_size, _, dp_size = self._shape
        micro_batches = self._size(consumed_samples) // (micro_batch_size * dp_size)
        pieces = microbatch_samples(consumed_samples, *self._shape, micro_batches)
        batches = [stack([self.dataset[index] for index in piece]) for piece in pieces]
        return (
            [{key: value.pin_memory() for key, value in batch.items()} for batch in batches]
            if self._pinned
            else batches
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def stack(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Stack samples of equal keys and shapes to one dict of tensors with a leading batch
    dimension.
    """
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
