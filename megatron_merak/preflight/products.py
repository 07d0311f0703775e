"""How fast matrix products are: one size on every rank at once, as the look compares them, and the
three of a linear layer at any shape, as plans read them.
"""

from statistics import median

import torch

from ..cluster import ProductRate
from .stopwatch import timings

_ON_CPU = 512
_ON_GPU = 4096
_SECONDS = 0.4
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def product_rate(device: torch.device) -> float:
    """Return the FLOP per second of the fastest of some products, by the clock on the wall."""
    on_gpu = device.type == "cuda"
    size = _ON_GPU if on_gpu else _ON_CPU
    dtype = torch.bfloat16 if on_gpu else torch.float32
    one = torch.full((size, size), 0.5, dtype=dtype, device=device)
    return 2 * size**3 / min(timings(lambda: one @ one, device, _SECONDS, wall=True))


def products_of(
    sides: tuple[int, int, int], dtype: str, device: torch.device, seconds: float
) -> ProductRate:
    """Return the median rates of the products of a linear layer.

    sides:   m, n, k: [m, k] by [n, k] transposed.
    seconds: that the calls of each product take together.
    """
    m, n, k = sides
    kind = DTYPES[dtype]
    x = torch.randn(m, k, device=device, dtype=kind)
    weight = torch.randn(n, k, device=device, dtype=kind)
    grad = torch.randn(m, n, device=device, dtype=kind)
    calls = (lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x)
    rates = [2 * m * n * k / median(timings(call, device, seconds)) for call in calls]
    forward, of_input, of_weight = rates
    return ProductRate(
        m, n, k, dtype, forward=forward, input_gradient=of_input, weight_gradient=of_weight
    )
