"""Causal self-attention on heads."""

import torch.nn.functional as F
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """query [b, s, n, d], key and value [b, s, g, d] with n a multiple of g -> [b, s, n * d]."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p=dropout,
        is_causal=True,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2).flatten(2)
