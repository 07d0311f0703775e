"""The host waits for the device once, however many numbers it wants to know."""

import torch
from torch import Tensor


def read(*tensors: Tensor) -> list[list[float]]:
    """The values of each tensor (any shape; floating-point numbers, or integers below 2**53), exactly, in one sync."""
    values = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors]).tolist()
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.numel())
    return [values[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]
