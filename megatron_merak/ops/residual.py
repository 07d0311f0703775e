"""Bias, dropout and residual add: what follows every row-parallel linear."""

import torch.nn.functional as F
from torch import Tensor


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, dropout: float, training: bool) -> Tensor:
    """residual + dropout(x + bias); x and residual [..., h], bias [h] or None."""
    if bias is not None:
        x = x + bias
    if training and dropout > 0:
        x = F.dropout(x, dropout)
    return residual + x
