"""Samples per optimizer step, and the number of steps in a number of samples."""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from operator import itemgetter

from ..errors import ConfigError
from .sections import TrainConfig

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
RAMP = "--rampup-batch-size"
STEPS = "--step-batch-size-schedule"
_MOST = 2**53  # samples: beyond it floating point, in which Megatron-LM counts, is not exact
_MOST_SIZES = 100_000


@dataclass(frozen=True)
class Batches:
    """Samples per optimizer step, as a function of the samples that a run has consumed.

    sizes: (consumed samples from which on it applies, samples per step), ascending, the first from
           0.
    """

    sizes: tuple[tuple[int, int], ...]

    @property
    def largest(self) -> int:
        """Samples of the largest step."""
        return max(size for _, size in self.sizes)

    def size(self, consumed: int) -> int:
        """Samples of the step that follows ``consumed`` samples."""
        return self.sizes[bisect_right(self.sizes, consumed, key=itemgetter(0)) - 1][1]

    def steps(self, samples: int, consumed: int = 0) -> int:
        """Steps from ``consumed`` samples to ``samples``; the last, partial one is dropped."""
        return sum(steps for _, steps in self.phases(samples, consumed))

    def phases(self, samples: int, consumed: int = 0) -> Iterator[tuple[int, int]]:
        """(samples per step, steps) from ``consumed`` samples to ``samples``, in order."""
        for (first, size), (after, _) in pairwise([*self.sizes, (samples, 0)]):
            if size and first <= consumed < after:
                steps = min(-(-(after - consumed) // size), (samples - consumed) // size)
                if steps > 0:
                    consumed += steps * size
                    yield size, steps


def batches_of(train: TrainConfig, sequence_length: int, replicas: int) -> Batches:
    """Return the batch sizes that flags define for so many replicas. Raises ConfigError.

    sequence_length: tokens of a sample; --step-batch-size-schedule counts tokens.
    """
    unit = train.micro_batch_size * replicas
    if train.rampup_batch_size:
        batches = _ramp(train)
    elif train.step_batch_size_schedule is not None:
        batches = _steps(train, sequence_length)
    else:
        batches = Batches(((0, train.global_batch_size or unit),))
    if not train.decrease_batch_size_if_needed:
        return batches
    if train.step_batch_size_schedule is not None:
        remedy = "Leave out --decrease-batch-size-if-needed"
        raise ConfigError(
            STEPS, train.step_batch_size_schedule, "already gives every batch size", remedy
        )
    return Batches(tuple((first, size // unit * unit) for first, size in batches.sizes))


def check_sizes(train: TrainConfig, batches: Batches, replicas: int, consumed: int = 0) -> None:
    """Raise ConfigError if a step after ``consumed`` samples does not consist of full micro-batches
    of all replicas.
    """
    unit = train.micro_batch_size * replicas
    product = (
        f"--micro-batch-size {train.micro_batch_size} x data-parallel size {replicas} = {unit}"
    )
    later = [after for after, _ in batches.sizes[1:]] + [consumed + 1]
    for (_, size), after in zip(batches.sizes, later, strict=True):
        if after > consumed and (size % unit or size == 0):
            flag, value = _present(train, size)
            subject = (
                "is" if flag == "--global-batch-size" else f"has a batch size of {size}, which is"
            )
            if size == 0:
                raise ConfigError(
                    flag,
                    value,
                    f"is smaller than {product}",
                    f"Use at least {unit}, or fewer replicas",
                )
            near = " or ".join(
                str(near) for near in (size // unit * unit, (size // unit + 1) * unit) if near
            )
            remedy = (
                f"Use {near}"
                if flag == "--global-batch-size"
                else f"Use multiples of {unit}, such as {near}"
            )
            raise ConfigError(flag, value, f"{subject} not a multiple of {product}", remedy)


def check_length(train: TrainConfig, batches: Batches) -> None:
    """Raise ConfigError for a run in both iterations and samples, or in iterations with changing
    sizes.
    """
    if train.skip_train:
        return
    for flag in (RAMP, STEPS):
        value = _value(train, flag)
        if value is not None and train.train_samples is None:
            reason = "counts samples, but the length of the run is not given in samples"
            raise ConfigError(flag, value, reason, "Give --train-samples instead of --train-iters")
    if train.train_samples is None:
        return
    if train.train_iters is not None:
        reason = f"contradicts --train-iters {train.train_iters}"
        raise ConfigError("--train-samples", train.train_samples, reason, "Give only one of them")
    if batches.size(0) and batches.steps(train.train_samples) == 0:
        reason = f"is less than the first step's {batches.size(0)}"
        raise ConfigError("--train-samples", train.train_samples, reason, "Raise it")


def _present(train: TrainConfig, size: int) -> tuple[str, object]:
    """Return the flag that sets a batch size, and its value."""
    for flag in (RAMP, STEPS):
        if (value := _value(train, flag)) is not None and size != train.global_batch_size:
            return flag, value
    return "--global-batch-size", train.global_batch_size


def _value(train: TrainConfig, flag: str) -> str | None:
    return (
        " ".join(train.rampup_batch_size) or None
        if flag == RAMP
        else train.step_batch_size_schedule
    )


def _ramp(train: TrainConfig) -> Batches:
    """Return Megatron-LM's ramp: from the first size to --global-batch-size in equal increments,
    each for as many samples.
    """
    value = _value(train, RAMP)
    last = train.global_batch_size
    if train.step_batch_size_schedule is not None:
        raise ConfigError(RAMP, value, f"contradicts {STEPS}", "Give only one of them")
    like = (
        "Write it like '16 16 1000000': the first batch size, the increment, the samples of "
        "the ramp"
    )
    written = [number(text) for text in train.rampup_batch_size if re.fullmatch("[0-9]+", text)]
    numbers = [each for each in written if each]
    if len(numbers) != 3 or len(train.rampup_batch_size) != 3:
        raise ConfigError(
            RAMP, f"{value:.80}", "is not three positive whole numbers of 15 digits at most", like
        )
    first, increment, samples = numbers
    if last is None:
        raise ConfigError(
            "--global-batch-size",
            "(missing)",
            f"is needed with {RAMP}, as its last size",
            "Give it",
        )
    if first > last or (last - first) % increment:
        reason = (
            f"does not reach --global-batch-size {last}: the increment does not divide "
            f"{last - first}"
        )
        reason = f"starts above --global-batch-size {last}" if first > last else reason
        raise ConfigError(
            RAMP, value, reason, "Change the first size, the increment or --global-batch-size"
        )
    count = (last - first) // increment
    if count > _MOST_SIZES:
        raise ConfigError(
            RAMP,
            value,
            f"makes {count:,} batch sizes",
            f"Raise the increment to {last // _MOST_SIZES}",
        )
    starts = [_start(step, samples, count) for step in range(count + 1)]
    # of equal starts the last holds
    sizes = dict(zip(starts, range(first, last + 1, increment), strict=True))
    return Batches(tuple(sizes.items()))


def _start(step: int, samples: int, count: int) -> int:
    """Return the number of consumed samples at which the ramp reaches ``step``.

    Megatron-LM divides in floating point, which is sometimes one sample late.
    """
    start = -(-step * samples // count) if step else 0
    return start if step == 0 or int(start / (samples / count)) >= step else start + 1


def _steps(train: TrainConfig, sequence_length: int) -> Batches:
    """Parse sizes with thresholds in tokens, like '0:768 250B:1536'."""
    text = train.step_batch_size_schedule or ""
    like = "Write it like '0:768 250B:1536 500B:3072': tokens from which on, and samples per step"
    sizes: dict[int, int] = {}
    for entry in text.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        threshold = number(tokens)
        samples = number(size)
        if not colon or threshold is None or not samples:
            raise ConfigError(STEPS, text, f"has an entry {entry!r}", like)
        if sizes and threshold // sequence_length <= max(sizes):
            raise ConfigError(
                STEPS, text, f"{entry!r} does not begin after the entry before it", like
            )
        sizes[threshold // sequence_length] = samples
    if 0 not in sizes:
        raise ConfigError(STEPS, text, "does not say the size from 0 tokens on", like)
    batches = Batches(tuple(sizes.items()))
    if train.global_batch_size not in (None, batches.largest):
        reason = f"contradicts {STEPS}, whose largest size is {batches.largest}"
        raise ConfigError("--global-batch-size", train.global_batch_size, reason, "Leave it out")
    return batches


def number(text: str) -> int | None:
    """Parse '250B', '0.3K' and the like, as Megatron-LM does; None for anything else, and for
    fractions.
    """
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", digits) or (Decimal(digits) * factor) % 1:
        return None
    value = int(float(digits) * factor)
    return value if value < _MOST else None
