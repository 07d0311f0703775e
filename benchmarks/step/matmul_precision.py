"""Is 'medium' still fp32 on this machine?

torch.set_float32_matmul_precision('medium') lets oneDNN take over fp32 products. On a CPU without
bf16 matrix units it then runs its own fp32 kernels, on some CPUs twice as fast as the default
library; with such units it computes in bf16.
"""

import torch

FP32_ACCURATE = 1e-5


def medium_error(size: int = 512) -> float:
    """Worst error against fp64, relative to the largest value, of the products NN, NT and TN at
    'medium'.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        errors = []
        for left, right in ((a, b), (a, b.t()), (a.t(), b)):
            exact = left.double() @ right.double()
            errors.append(((left @ right).double() - exact).abs().max() / exact.abs().max())
        return float(max(errors))
    finally:
        torch.set_float32_matmul_precision(before)


def use_fastest_fp32() -> dict[str, object]:
    """Switch this process to 'medium' if that is still fp32-accurate; says what was found and
    chosen.
    """
    error = medium_error()
    if error < FP32_ACCURATE:
        torch.set_float32_matmul_precision("medium")
    return {"medium_error": error, "matmul_precision": torch.get_float32_matmul_precision()}
