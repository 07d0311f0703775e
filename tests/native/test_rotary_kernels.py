"""The CUDA kernel of the rotary embedding, on the CPU, against rotations in float64."""

import ctypes

import pytest
import torch

from tests.native.shim import NEEDED, TYPES, LaunchError, load, near, shifted

pytestmark = NEEDED


@pytest.fixture(scope="module")
def kernels():
    return load("rotary")


def numbers(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def angles(dtype, length, half):
    of = torch.arange(length).outer(10.0 ** -torch.arange(half)).double() + 0.1
    return of.cos().to(dtype)[:, None], of.sin().to(dtype)[:, None]


def turned(x, cos, sin, interleaved):
    """In float64; cos and sin [s, 1, r / 2]."""
    x, cos, sin, half = x.double(), cos.double(), sin.double(), cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def rotate(kernels, x, cos, sin, interleaved=False, inverse=False, y=None):
    """x and y [b, s, n, d] of any strides but the last; cos and sin [s, 1, r / 2]."""
    y = torch.full(x.shape, torch.nan, dtype=x.dtype) if y is None else y
    array = ctypes.c_int64 * 3
    arrays = (
        array(*x.shape[:3]),
        array(*x.stride()[:3]),
        array(0, cos.stride(0), 0),
        array(*y.stride()[:3]),
    )
    kernels(
        "merak_rotary", TYPES[x.dtype], x, cos, sin, TYPES[cos.dtype], y, 3, *(ctypes.addressof(a) for a in arrays),
        x.shape[3], 2 * cos.shape[-1], interleaved, inverse,
    )  # fmt: skip
    return y


def compare(kernels, x, cos, sin, interleaved, inverse, run=rotate):
    found = run(kernels, x, cos, sin, interleaved, inverse)
    truth = turned(x, cos, -sin if inverse else sin, interleaved)
    near(
        found,
        truth,
        turned(x.abs(), cos.abs(), sin.abs(), interleaved).abs()
        + x.double().abs().amax(-1, keepdim=True),
    )
    passed = x[..., 2 * cos.shape[-1] :]
    assert torch.equal(found[..., 2 * cos.shape[-1] :], passed)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("features", "rotated"), [(64, 64), (128, 32), (80, 20), (7, 6), (5, 0), (2, 2), (256, 256)]
)
def test_rotary(kernels, features, rotated, interleaved, inverse, dtype):
    x = numbers(dtype, 2, 5, 3, features)
    compare(kernels, x, *angles(dtype, 5, rotated // 2), interleaved, inverse)
    compare(kernels, x, *angles(torch.float32, 5, rotated // 2), interleaved, inverse)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_views_of_a_fused_tensor(kernels, interleaved, dtype):
    """Query heads beside keys and values, batch and sequence exchanged, and addresses that are not
    aligned.
    """
    fused = numbers(dtype, 5, 2, 6, 64).transpose(0, 1)
    cos, sin = angles(dtype, 5, 32)
    for x in (
        fused[:, :, 1:4],
        fused[..., :32],
        fused[..., 1:34],
        shifted(numbers(dtype, 2, 5, 3, 64)),
    ):
        half = x.shape[-1] // 2
        compare(kernels, x, cos[..., :half], sin[..., :half], interleaved, False)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_in_place_and_into_a_part_of_another_tensor(kernels, interleaved, dtype):
    fused, (cos, sin) = numbers(dtype, 2, 5, 6, 64), angles(torch.float32, 5, 16)
    expected = rotate(kernels, fused[:, :, 1:4], cos, sin, interleaved)
    into = torch.full(fused.shape, torch.nan, dtype=dtype)
    for x, y in ((fused[:, :, 1:4], into[:, :, 3:]), (fused[:, :, 1:4],) * 2):
        others = y._base[:, :, [0, 5 if y is x else 2]].nan_to_num()
        assert torch.equal(rotate(kernels, x, cos, sin, interleaved, y=y), expected)
        assert torch.equal(y._base[:, :, [0, 5 if y is x else 2]].nan_to_num(), others)


def test_the_inverse_turns_back(kernels):
    x, (cos, sin) = numbers(torch.float32, 2, 50, 3, 64), angles(torch.float32, 50, 32)
    for interleaved in (False, True):
        back = rotate(
            kernels, rotate(kernels, x, cos, sin, interleaved), cos, sin, interleaved, inverse=True
        )
        near(back, x.double(), x.double().abs().amax(-1, keepdim=True))


def test_sizes_that_cannot_be_are_refused(kernels):
    x, (cos, sin) = numbers(torch.float32, 2, 5, 3, 6), angles(torch.float32, 5, 4)
    with pytest.raises(LaunchError):
        rotate(kernels, x, cos, sin)
    y = rotate(kernels, x[:0], *angles(torch.float32, 5, 3))
    assert y.shape == (0, 5, 3, 6)
