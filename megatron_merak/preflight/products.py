"""How fast matrix products are on every rank at once, as they are in training."""

import time

import torch

_ON_CPU = 512
_ON_GPU = 4096
_SECONDS = 0.4


def product_rate(device: torch.device) -> float:
    """Return the FLOP per second of the fastest of some products, after one that warms up."""
    on_gpu = device.type == "cuda"
    size = _ON_GPU if on_gpu else _ON_CPU
    dtype = torch.bfloat16 if on_gpu else torch.float32
    one = torch.full((size, size), 0.5, dtype=dtype, device=device)
    fastest = float("inf")
    _product(one)
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        fastest = min(fastest, _product(one))
    return 2 * size**3 / fastest


def _product(one: torch.Tensor) -> float:
    began = time.perf_counter()
    one @ one
    if one.is_cuda:
        torch.cuda.synchronize(one.device)
    return time.perf_counter() - began
