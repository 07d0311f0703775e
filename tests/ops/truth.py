"""Operations beside the same formula in float64: inputs, gradients, and what rounding explains."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KERNELS = (torch.ops.merak, torch.ops.merak_torch)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half of the last place of a number in [1, 2), and of the smallest numbers.
ROUNDING = {
    torch.float32: (2**-24, 0.0),
    torch.bfloat16: (2**-8, 0.0),
    torch.float16: (2**-11, 2**-25),
}


def random(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 3, scale: float = 1.0
):
    """Normal numbers that ``dtype`` has, one tensor per shape."""
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def gradients(
    fn: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor
) -> list[Tensor]:
    """The result and the gradient of every input."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = fn(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def in_double(
    fn: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor
) -> list[Tensor]:
    return gradients(fn, [x.double() for x in inputs], upstream.double())


def assert_rounded(found: Tensor, truth: Tensor, sums: int = 8, roundings: float = 1.0) -> None:
    """``found`` is ``truth`` but for rounding each number to its type (so many times, of which all
    but the first may be of numbers as large as the largest) and ``sums`` roundings to fp32 of
    numbers as large as the largest.
    """
    unit, smallest = ROUNDING[found.dtype]
    largest = truth.abs().max() if truth.numel() else 0.0
    allowed = (
        1.01 * unit * truth.abs() + smallest + ((roundings - 1) * unit + sums * 2**-24) * largest
    )
    worst = ((found.double() - truth).abs() - allowed).max() if truth.numel() else -1.0
    assert found.shape == truth.shape and worst <= 0, (worst, largest)


def threads(fn: Callable[[], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """What ``fn`` returns on one, two and three threads."""
    before, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(fn())
    torch.set_num_threads(before)
    return found
