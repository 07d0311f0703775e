"""Attention as a GPU runs it: C++ chooses the kernel by the device, and takes fake tensors for none
that has one.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` by FlashAttention where that serves the types and the mask,
    else by the memory efficient kernel, which does not share heads."""
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -torch.inf)
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    tracked = any(x.requires_grad for x in (query, key, value))
    arguments = (query, key, value, bias, tracked, dropout_p, is_causal)
    return aten._scaled_dot_product_efficient_attention(*arguments, scale=scale)[0]
