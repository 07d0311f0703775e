"""How fast attention is: as training computes it, and by each of torch's kernels."""

from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cluster import AttentionRate
from ..ops import causal_attention
from ..preflight.products import DTYPES
from ..preflight.stopwatch import timings
from .shapes import Heads

_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_rate(size: Heads, dtype: str, device: torch.device, seconds: float) -> AttentionRate:
    """Return the median rate of causal attention as training computes it.

    seconds: that its forwards take together, and its backwards.
    """
    return _rate(lambda q, k, v: causal_attention(q, k, v), size, dtype, device, seconds=seconds)


def by_kernel(
    size: Heads, dtype: str, device: torch.device, seconds: float
) -> Iterator[tuple[str, AttentionRate | str]]:
    """Yield the rate of each of torch's kernels of a GPU by its name, or why it does not run."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=size.groups < size.heads
        )

    for name, kernel in _KERNELS.items() if device.type == "cuda" else ():
        try:
            with sdpa_kernel(kernel):
                yield name, _rate(attend, size, dtype, device, seconds=seconds)
        except RuntimeError as error:
            yield name, str(error).strip().splitlines()[0][:200]


def _rate(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    size: Heads,
    dtype: str,
    device: torch.device,
    seconds: float,
) -> AttentionRate:
    rows = (size.samples, size.length)
    query, key, value = (
        torch.randn(
            *rows, heads, size.features, device=device, dtype=DTYPES[dtype], requires_grad=True
        )
        for heads in (size.heads, size.groups, size.groups)
    )
    found = attend(query, key, value)
    grad = torch.randn_like(found)

    def backward() -> object:
        return torch.autograd.grad(found, (query, key, value), grad, retain_graph=True)

    ahead = median(timings(lambda: attend(query, key, value), device, seconds))
    behind = median(timings(backward, device, seconds))
    return AttentionRate(
        size.flops,
        size.length,
        size.features,
        dtype,
        forward=size.flops / ahead,
        backward=2 * size.flops / behind,
    )
