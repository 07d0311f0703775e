"""Which samples form which batch, and the batches themselves: a function of seeds, not of layout or
history.

The samples of an epoch are cut into batches, numbered from 0; replica r of R takes batches r, r +
R, r + 2 R, ...

    epoch's order      17  3  8 | 20  5  1 |  9 11  2 |  6  4         11 samples, batches of 3
    replica 0 of 2     batch 0              batch 2
    replica 1 of 2               batch 1               batch 3: 6 4 + 17, the epoch's first again

With one replica, the last batch stays short. With several, it is filled from the epoch's first
samples, as accelerate does, so that every replica trains on as many. The order of an epoch is
``randperm`` seeded with seed + epoch, like ``transformers.Trainer``'s. Random numbers of a dataset
or collator come from a generator seeded by (seed, epoch, batch), and those of a stream from one
seeded by seed + epoch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers.trainer_pt_utils import get_length_grouped_indices

from ...errors import DataError
from ...stages.randomness import PrivateStream, private_randomness
from .apart import apart, copied

Batch = dict[str, Any]


def epoch_order(
    samples: int, seed: int, epoch: int, lengths: Sequence[int] | None = None, group: int = 1
) -> list[int]:
    """Return a permutation of the samples; with ``lengths``, samples of similar length are together
    in runs of ``group``.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    if lengths is not None:
        return get_length_grouped_indices(lengths, group, generator=generator)
    return torch.randperm(samples, generator=generator).tolist()


@dataclass(frozen=True)
class Division:
    """``samples`` in batches of ``batch_size`` over ``replicas``; numbers of batches are those of
    one replica.
    """

    samples: int
    batch_size: int
    replicas: int = 1
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """The number of batches of an epoch that every replica takes."""
        if self.drop_last:
            return self.samples // self.batch_size // self.replicas
        return -(-self.samples // (self.batch_size * self.replicas))

    def rows(self, number: int) -> range | list[int]:
        """Return the positions in the epoch's order of batch ``number``, counted over all
        replicas.
        """
        first = number * self.batch_size
        if self.replicas == 1:
            return range(first, min(first + self.batch_size, self.samples))
        return [place % self.samples for place in range(first, first + self.batch_size)]


def tensors_of(collated: object) -> Batch:
    """Return a collator's result as a plain dictionary. Raises DataError if it is none."""
    if not isinstance(collated, Mapping):
        reason = f"the data collator returned a {type(collated).__name__}"
        raise DataError(
            "batch",
            "(collated)",
            reason,
            "Return a dictionary of tensors, named as the model's inputs",
        )
    for name, value in collated.items():
        if not isinstance(value, Tensor | int | float | bool | str | None):
            reason = f"the data collator made it a {type(value).__name__}"
            raise DataError(
                "batch entry",
                name,
                reason,
                "Return a tensor, or drop it: remove_unused_columns=True",
            )
    return dict(collated)


@dataclass(frozen=True)
class IndexedBatches(Dataset):
    """An epoch's batches by number, collated and padded. order: None for the dataset's own."""

    dataset: Dataset
    collate: Callable[[list], Mapping[str, object]]
    division: Division
    order: Sequence[int] | None
    seeds: tuple[int, ...]

    def __getitem__(self, number: int) -> Batch:
        rows = self.division.rows(number)
        indices = list(rows) if self.order is None else [self.order[row] for row in rows]
        with private_randomness(*self.seeds, number):
            fetch = getattr(self.dataset, "__getitems__", None)
            samples = fetch(indices) if fetch else [self.dataset[index] for index in indices]
            return tensors_of(self.collate(samples))


@dataclass(frozen=True)
class StreamedBatches(IterableDataset):
    """Batches of an ``IterableDataset`` for one replica; the last ones are filled as in
    ``Division``.
    """

    samples: PrivateStream
    collate: Callable[[list], Mapping[str, object]]
    batch_size: int
    replica: int
    replicas: int
    drop_last: bool
    seeds: tuple[int, ...]

    def __iter__(self) -> Iterator[Batch]:
        first = None
        number = self.replica
        global_batch = self.batch_size * self.replicas
        while len(chunk := self.samples.take(global_batch)) == global_batch:
            yield self._batch(chunk, number)
            first = first or chunk
            number = number + self.replicas
        if chunk and not self.drop_last:
            filler = first or chunk
            while self.replicas > 1 and len(chunk) < global_batch:
                chunk = chunk + filler
            yield self._batch(chunk, number)

    def _batch(self, chunk: list, number: int) -> Batch:
        rows = chunk[self.replica * self.batch_size : (self.replica + 1) * self.batch_size]
        with private_randomness(*self.seeds, number):
            return tensors_of(self.collate(rows))


def _as_it_is(batch: object) -> object:
    return batch


def samples_of(dataset: Dataset) -> int:
    """Return the number of samples of a dataset that is no stream; torch's class does not promise a
    length.
    """
    sized: Any = dataset
    return len(sized)


@dataclass(frozen=True)
class Loading:
    """How batches are loaded.

    options: of a ``DataLoader``, such as its workers.
    order:   epoch -> the epoch's samples; None for the dataset's own order.
    samples: in an epoch; None for the dataset's length.
    begun:   streams that ``first`` has read from, by the ids of their datasets: (seed and epoch,
             samples).
    """

    dataset: Dataset
    collate: Callable[[list], Mapping[str, object]]
    batch_size: int
    replica: int
    replicas: int
    seed: int
    drop_last: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    order: Callable[[int], Sequence[int] | None] = lambda epoch: None
    samples: int | None = None
    begun: dict[int, tuple[tuple[int, int], PrivateStream]] = field(default_factory=dict)

    @property
    def streamed(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def samples_per_batch(self) -> int:
        """Return the number of samples of a batch of all replicas."""
        return self.batch_size * self.replicas

    @property
    def division(self) -> Division | None:
        """How samples are divided; None for a stream. Raises DataError if there is not one
        batch.
        """
        if self.streamed:
            return None
        division = Division(self.count, self.batch_size, self.replicas, self.drop_last)
        if division.batches == 0:
            reason = (
                f"it is too short for a batch of {self.batch_size} on each of "
                f"{self.replicas} replicas"
            )
            remedy = "Give more samples, or set dataloader_drop_last=False"
            raise DataError("a dataset of length", self.count, reason, remedy)
        return division

    @property
    def count(self) -> int:
        """Return the number of samples of an epoch."""
        return samples_of(self.dataset) if self.samples is None else self.samples

    def __len__(self) -> int:
        """Return the number of batches of one replica and epoch, as a ``DataLoader`` does."""
        division = self.division
        if division is None:
            raise TypeError("a stream has no length")
        return division.batches

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Iterate over this replica's batches of an epoch without its first ``skip``. A stream that
        ``first`` began continues.
        """
        if self.streamed:
            return self._stream(epoch, skip)
        self._set_epoch(epoch)
        division = self.division
        assert division is not None, "only streams have none"
        batches = IndexedBatches(
            self.dataset, self.collate, division, self.order(epoch), (self.seed, epoch)
        )
        numbers = [self.replica + self.replicas * place for place in range(skip, division.batches)]
        return iter(self._loader(batches, sampler=numbers))

    def first(self, epoch: int) -> Batch:
        """Return the first replica's first batch of an epoch, which the next iteration over that
        epoch yields again.

        A stream's iterator is kept until then. Raises DataError if a stream has no batch.
        """
        collate = apart(self.collate)
        if not self.streamed:
            alone = replace(
                self,
                replica=0,
                replicas=1,
                options={},
                dataset=apart(self.dataset),
                collate=collate,
            )
            return next(alone.epoch(epoch))
        samples = self._samples(epoch)
        self.begun[id(self.dataset)] = (self.seed, epoch), samples
        rows = samples.look(self.batch_size)
        if not rows or (self.drop_last and len(rows) < self.batch_size):
            remedy = "Pass a stream with more samples, or one that can be iterated again"
            raise DataError(
                "dataset",
                type(self.dataset).__name__,
                "the stream ends before its first batch",
                remedy,
            )
        with private_randomness(self.seed, epoch, 0):
            return tensors_of(collate(copied(rows)))

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def _samples(self, epoch: int) -> PrivateStream:
        """Return a stream's samples, beginning with those that ``first`` read, if they are this
        epoch's.
        """
        key, begun = self.begun.pop(id(self.dataset), (None, None))
        if begun is not None and key == (self.seed, epoch):
            return begun
        self._set_epoch(epoch)
        return PrivateStream(lambda: iter(self._loader(self.dataset)), self.seed + epoch)

    def some(self, numbers: Sequence[int]) -> Iterator[Batch]:
        """Return the batches of these numbers, in the first epoch's order and without filling: for
        evaluation.
        """
        division = Division(self.count, self.batch_size)
        batches = IndexedBatches(
            self.dataset, self.collate, division, self.order(0), (self.seed, 0)
        )
        return iter(self._loader(batches, sampler=numbers))

    def _stream(self, epoch: int, skip: int) -> Iterator[Batch]:
        samples = self._samples(epoch)
        streamed = StreamedBatches(
            samples,
            self.collate,
            self.batch_size,
            replica=self.replica,
            replicas=self.replicas,
            drop_last=self.drop_last,
            seeds=(self.seed, epoch),
        )
        batches = iter(streamed)
        for _ in zip(range(skip), batches, strict=False):
            pass
        return batches

    def _loader(self, dataset: Dataset, **more: Any) -> DataLoader:
        return DataLoader(dataset, batch_size=None, collate_fn=_as_it_is, **self.options, **more)
