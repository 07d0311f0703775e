"""The CUDA kernels of bias, dropout and residual, on the CPU, against float64 and a dropout mask in
plain Python.
"""

import functools
import math

import pytest
import torch

from tests.native.shim import NEEDED, TYPES, LaunchError, load, near, shifted

pytestmark = NEEDED
SIZES = [(1, 1), (3, 7), (5, 8), (4, 1000), (700, 40), (2, 2055)]
WORD = (1 << 64) - 1


@pytest.fixture(scope="module")
def kernels():
    return load("residual")


def splitmix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
    return state ^ (state >> 31)


@functools.cache
def kept(seed, count, p):
    """bool [count]: element i is kept if its 32 bits, low half of its pair's number first, reach p
    2^32.
    """
    numbers = [
        splitmix((seed + pair * 0x9E3779B97F4A7C15) & WORD) for pair in range((count + 1) // 2)
    ]
    bits = [half for number in numbers for half in (number & 0xFFFFFFFF, number >> 32)]
    return torch.tensor([b >= p * 2**32 for b in bits[:count]], dtype=torch.bool)


def numbers(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def seed_tensor(seed):
    return None if seed is None else torch.tensor([seed], dtype=torch.int64)


def run(kernels, x, bias, residual, p, seed, grad):
    rows, width = x.shape
    code, of_seed = TYPES[x.dtype], seed_tensor(seed)
    of_bias = code if bias is None else TYPES[bias.dtype]
    y = torch.full_like(x, torch.nan)
    kernels("merak_bias_dropout_add", code, x, bias, of_bias, residual, p, of_seed, y, rows, width)
    grad_x = torch.full_like(x, torch.nan)
    parts = torch.full((kernels.count("merak_residual_parts", code, rows, width), width), torch.nan)
    grad_bias = None if bias is None else torch.full((width,), torch.nan, dtype=x.dtype)
    name = "merak_bias_dropout_add_backward"
    kernels(
        name,
        code,
        grad,
        p,
        of_seed,
        grad_x,
        None if bias is None else parts,
        grad_bias,
        rows,
        width,
    )
    return y, grad_x, grad_bias


def compare(kernels, x, bias, residual, p=0.0, seed=None, run=run):
    rows, width = x.shape
    grad = numbers(x.dtype, rows, width, seed=9)
    y, grad_x, grad_bias = run(kernels, x, bias, residual, p, seed, grad)
    factor = torch.ones(rows, width, dtype=torch.float64)
    if seed is not None:
        factor = kept(seed % (1 << 64), rows * width, p).view(rows, width) / (1 - p)
    inner = x.double() + (0 if bias is None else bias.double())
    rest = 0 if residual is None else residual.double()
    near(y, inner * factor + rest, inner.abs() * factor + abs(rest) + x.double().abs() * factor)
    near(grad_x, grad.double() * factor, grad.double().abs() * factor)
    if bias is not None:
        near(
            grad_bias,
            (grad.double() * factor).sum(0),
            (grad.double().abs() * factor).sum(0),
            8 + rows,
        )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("seed", [None, 3, -1])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_bias_dropout_add(kernels, rows, width, seed, with_bias, dtype):
    x, bias, residual = (
        numbers(dtype, rows, width),
        numbers(dtype, width, seed=1),
        numbers(dtype, rows, width, seed=2),
    )
    compare(
        kernels, x, bias if with_bias else None, residual, p=0.0 if seed is None else 0.3, seed=seed
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_without_a_residual_or_aligned_addresses_and_with_a_wide_bias(kernels, dtype):
    x, residual = shifted(numbers(dtype, 5, 520)), shifted(numbers(dtype, 5, 520, seed=1))
    compare(kernels, x, None, None, 0.5, 11)
    compare(kernels, x, numbers(torch.float32, 520, seed=2), residual, 0.5, 11)
    compare(kernels, x, None, residual)


def test_the_mask_depends_on_place_alone(kernels):
    """Not on the shape, the type, the bias or the alignment: replays and other layouts
    must agree.
    """
    found = []
    for dtype in TYPES:
        for rows, width in ((6, 35), (210, 1), (2, 105)):
            x, bias, y = torch.ones(rows, width, dtype=dtype), torch.zeros(width, dtype=dtype), None
            for of_bias in (None, bias):
                y = torch.empty_like(x)
                code = TYPES[dtype]
                kernels(
                    "merak_bias_dropout_add",
                    code,
                    x,
                    of_bias,
                    code,
                    None,
                    0.4,
                    seed_tensor(5),
                    y,
                    rows,
                    width,
                )
                found.append(y.flatten() != 0)
    assert all(torch.equal(mask, kept(5, 210, 0.4)) for mask in found)


def test_the_share_that_is_kept(kernels):
    """Four standard deviations of a binomial; neighbours, pairs and seeds are independent."""
    count = 1 << 18

    def mask(seed, p):
        y = torch.empty(count)
        kernels(
            "merak_bias_dropout_add",
            0,
            torch.ones(count),
            None,
            0,
            None,
            p,
            seed_tensor(seed),
            y,
            1,
            count,
        )
        return y != 0

    for p in (0.01, 0.1, 0.5, 0.9):
        assert abs(mask(1, p).double().mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / count)
    a, b = mask(1, 0.5), mask(2, 0.5)
    for other in (b, a.roll(1), a.roll(2), a.roll(64)):
        assert abs((a == other).double().mean() - 0.5) < 4 * 0.5 / math.sqrt(count)


def test_the_ends_of_the_range(kernels):
    """p = 0 keeps all; p = 1 drops all, whatever it is, and leaves the residual."""
    x, residual, y = (
        torch.tensor([[1.0, torch.nan, torch.inf]]),
        torch.tensor([[5.0, 6.0, 7.0]]),
        torch.empty(1, 3),
    )
    kernels("merak_bias_dropout_add", 0, x, None, 0, residual, 1.0, seed_tensor(1), y, 1, 3)
    assert torch.equal(y, residual)
    compare(kernels, numbers(torch.float32, 5, 8), None, None, 0.0, 7)
    for p in (-0.1, 1.5, torch.nan):
        with pytest.raises(LaunchError):
            kernels("merak_bias_dropout_add", 0, x, None, 0, residual, p, seed_tensor(1), y, 1, 3)


def test_nothing_to_do(kernels):
    grad_bias, empty = torch.full((5,), torch.nan), torch.empty(0, 5)
    kernels("merak_bias_dropout_add_backward", 0, empty, 0.0, None, empty, empty, grad_bias, 0, 5)
    assert grad_bias.count_nonzero() == 0
