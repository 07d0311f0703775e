"""Faster fp32 matrix products on CPUs, where they are still fp32."""

import torch


def choose_fp32_matmul(device: torch.device) -> str:
    """Set and return torch's fp32 matmul precision: 'medium' on CPUs where a probe finds it as accurate as 'highest'.

    'medium' lets torch choose another library, which on many CPUs computes in fp32 all the same and twice as fast, but
    on those with bf16 matrix units rounds to bf16: some releases of torch all products, others large and batched ones
    only, so that several are tried. Other devices are left at 'highest'.
    """
    torch.set_float32_matmul_precision("highest")
    if device.type != "cpu":
        return "highest"
    generator = torch.Generator().manual_seed(0)
    torch.set_float32_matmul_precision("medium")
    for shape in ((192, 192), (512, 512), (4, 64, 64)):
        left, right = (torch.randn(shape, generator=generator) for _ in range(2))
        exact = left.double() @ right.double()
        products = (left @ right, left @ right.mT.contiguous().mT, left.mT.contiguous().mT @ right)
        if max((product - exact).abs().max() / exact.abs().max() for product in products) > 1e-5:
            torch.set_float32_matmul_precision("highest")
            return "highest"
    return "medium"
