"""The same weights and the same data for every contestant, whatever part of the model a
rank holds.
"""

import zlib

import torch

from benchmarks.step.cases import ModelShape


def initial_weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The full fp32 tensor with this HuggingFace name at step 0: matrices N(0, 0.02), norm scales 1
    + N(0, 0.02).
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    values = torch.empty(shape).normal_(0.0, 0.02, generator=generator)
    return values + 1.0 if len(shape) == 1 else values


def global_batch(shape: ModelShape, seed: int, step: int) -> torch.Tensor:
    """The tokens of step `step`: int64 [micro_batches * micro_batch, sequence + 1], uniform over
    the vocabulary.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/batch/{step}".encode()))
    rows = shape.micro_batches * shape.micro_batch
    return torch.randint(shape.vocabulary, (rows, shape.sequence + 1), generator=generator)


@torch.no_grad()
def fill(named_parameters, seed: int) -> None:
    """Overwrite every (HuggingFace name, parameter) with its initial weight, in the parameter's own
    dtype.
    """
    for name, parameter in named_parameters:
        parameter.copy_(initial_weight(name, tuple(parameter.shape), seed))
