"""Reads several tensors on the host with a single device synchronisation."""

from itertools import islice

import torch
from torch import Tensor


def read(*tensors: Tensor | None) -> list[list[float]]:
    """Return the exact values of each tensor as a flat list, [] for None, with one host sync.

    tensors: any shape; floating-point, or integers below 2**53.
    """
    flat = [tensor.detach().reshape(-1).double() for tensor in tensors if tensor is not None]
    values = iter(torch.cat(flat).tolist())
    return [[] if tensor is None else list(islice(values, tensor.numel())) for tensor in tensors]
