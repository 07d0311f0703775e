"""bf16 numbers that lie in memory of fp32 ones."""

import sys

import torch


def upper_halves(exact: torch.Tensor) -> torch.Tensor:
    """Return a view of the upper halves of fp32 numbers, which are bf16 numbers.

    They have the values of ``exact`` where those are bf16 numbers, and change them where they are
    written.

    exact: fp32 tensor of any strides.
    """
    assert exact.dtype == torch.float32, exact.dtype
    assert sys.byteorder == "little", "the upper half of a number is the second in memory"
    halves = torch.empty(0, dtype=torch.bfloat16, device=exact.device)
    strides = [2 * stride for stride in exact.stride()]
    return halves.set_(
        exact.untyped_storage(), 2 * exact.storage_offset() + 1, exact.shape, strides
    )
