"""The order of an epoch's samples, from a sampler: this library's own, or one that a subclass
returns.
"""

import hashlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, Sampler

from ...errors import DataError
from ...parallel.agree import gather_json
from ...stages.randomness import private_randomness
from .order import epoch_order


class EpochSampler(Sampler):
    """Samples in an order that is a function of the epoch. order: epoch -> indices; None for the
    dataset's order.
    """

    def __init__(self, samples: int, order: Callable[[int], Sequence[int] | None]):
        self.samples = samples
        self.order = order
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self):
        order = self.order(self.epoch)
        return iter(range(self.samples) if order is None else order)


@dataclass
class LengthOrder:
    """Orders of epochs in which samples of similar length are together.

    lengths: of all samples.
    group:   samples that are sorted together, those of a step.
    begun:   an epoch, and its ``group``, that a run with other steps began: it goes on in its order.
    """

    lengths: Sequence[int]
    seed: int
    group: int
    begun: tuple[int, int] | None = None

    def group_of(self, epoch: int) -> int:
        """Return how many samples are sorted together in an epoch."""
        if self.begun is not None and self.begun[0] == epoch:
            return self.begun[1]
        return self.group

    def __call__(self, epoch: int) -> list[int]:
        group = self.group_of(epoch)
        return epoch_order(len(self.lengths), self.seed, epoch, self.lengths, group=group)


@dataclass
class Drawn:
    """Orders of epochs from a user's sampler. Calling it is collective over ``group``, all ranks of
    the job.

    As with accelerate, a ``RandomSampler`` is seeded by seed + epoch, and ``set_epoch`` is called
    if it exists. Other samplers are iterated once per epoch, whichever epoch a resumed run begins
    with; global generators are seeded by (seed, epoch). Raises DataError if ranks get different
    orders.
    """

    sampler: Sampler
    seed: int
    group: dist.ProcessGroup | None
    epochs: int = field(default=0, init=False)

    def __call__(self, epoch: int) -> list[int]:
        sampler = self.sampler
        if isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            count = sampler._num_samples
            order = list(RandomSampler(sampler.data_source, sampler.replacement, count, generator))
        elif hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            order = self._draw(epoch)
        else:
            for number in range(self.epochs, epoch):
                self._draw(number)
            order = self._draw(epoch)
            self.epochs = epoch + 1
        return self._agreed(order)

    def _draw(self, epoch: int) -> list[int]:
        with private_randomness(self.seed, epoch):
            return list(self.sampler)

    def _agreed(self, order: list) -> list[int]:
        name = type(self.sampler).__name__
        reports = gather_json([_digest(order), length_of(self.sampler)], self.group, "cpu")
        for rank, (digest, length) in enumerate(reports):
            if digest is None:
                remedy = (
                    "Yield one sample index at a time; per_device_train_batch_size forms "
                    "the batches"
                )
                raise DataError(
                    "sampler", name, "it yields items other than sample indices", remedy
                )
            if digest != reports[0][0]:
                remedy = (
                    "Use the same seed on every rank: samples are distributed over replicas "
                    "afterwards"
                )
                raise DataError(
                    "sampler", name, f"rank {rank} draws a different order than rank 0", remedy
                )
            if length is not None and length != len(order):
                remedy = "Return the number of samples of an epoch from __len__"
                raise DataError(
                    "sampler",
                    name,
                    f"it yields {len(order)} samples, and its length is {length}",
                    remedy,
                )
        return [int(index) for index in order]


def length_of(sampler: Sampler) -> int | None:
    """Return the number of samples of an epoch; None if the sampler does not know."""
    return len(sampler) if isinstance(sampler, Sized) else None


def _digest(order: list) -> str | None:
    try:
        numbers = torch.tensor([index.__index__() for index in order], dtype=torch.int64)
    except (AttributeError, TypeError):
        return None
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()
