"""Faults planted in the CUDA kernels: the ordinary comparisons must see each of them."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests.native import test_activation_kernels as activation
from tests.native import test_norm_kernels as norm
from tests.native import test_residual_kernels as residual
from tests.native import test_rotary_kernels as rotary
from tests.native.shim import NEEDED, LaunchError, load

pytestmark = [NEEDED, pytest.mark.compiles, pytest.mark.timeout(600)]


class Mutant(NamedTuple):
    """An edit of one file, and the comparison that sees it."""

    fault: str
    file: str
    old: str
    new: str
    check: Callable


def norms(rows, width, dtype=torch.float32, **kind):
    return lambda kernels: norm.compare(kernels, norm.case(dtype, rows, width, **kind))


def gated(kernels):
    x, up, grad = (activation.numbers(torch.bfloat16, 5, 1000, seed=i) for i in range(3))
    activation.compare_gated(kernels, "silu", x, up, grad)


def biased(rows, width, kind="gelu"):
    def check(kernels):
        x, grad = (activation.numbers(torch.float32, rows, width, seed=i) for i in range(2))
        activation.compare_biased(
            kernels, kind, x, activation.numbers(torch.float32, width, seed=2), grad
        )

    return check


def dropped(rows, width):
    def check(kernels):
        x, other = (residual.numbers(torch.bfloat16, rows, width, seed=i) for i in range(2))
        residual.compare(kernels, x, other[0].clone(), other, 0.3, 5)

    return check


def rotated(features, interleaved=False, inverse=False):
    def check(kernels):
        x = rotary.numbers(torch.float32, 2, 5, 3, features)
        rotary.compare(
            kernels, x, *rotary.angles(torch.float32, 5, features // 2), interleaved, inverse
        )

    return check


DEVICE, PACK = "include/merak/device.h", "include/merak/pack.h"
COLUMNS, NORM, ACTIVATION = "kernels/columns.cuh", "kernels/norm.cuh", "kernels/activation.cuh"
RESIDUAL, ROTARY = "kernels/residual.cuh", "kernels/rotary.cuh"

NORM_MUTANTS = [
    Mutant("no barrier before scratch is read", DEVICE,
           "  }\n  __syncthreads();\n#pragma", "  }\n#pragma", norms(5, 1000)),
    Mutant("no barrier before scratch is used again", DEVICE,
           "* K + k] : 0.f);\n  __syncthreads();\n", "* K + k] : 0.f);\n", norms(20, 8192, centred=True)),
    Mutant("a barrier that one warp skips", DEVICE,
           "if (warps == 1) return;", "if (warps == 1 || threadIdx.x < 32) return;", norms(3, 8192)),
    Mutant("two rows of a block share their sums", DEVICE,
           "first = threadIdx.y * warps", "first = 0", norms(5, 1000)),
    Mutant("a sum over half of the lanes", DEVICE,
           "bits > 0; bits /= 2) value +=", "bits > 1; bits /= 2) value +=", norms(5, 136)),
    Mutant("the last pack of a row is left out", NORM,
           "if (column < width) work", "if (column + N < width) work", norms(5, 136)),
    Mutant("what lies past a row counts in its variance", NORM,
           "centred && c + j >= width ? 0.f : ", "", norms(5, 1001, centred=True)),
    Mutant("partial sums are not cleared", NORM,
           "if constexpr (!kept)\n      share", "if constexpr (false)\n      share", norms(3, 8200)),
    Mutant("long rows forget the residual", NORM,
           "    from = sum;\n", "", norms(3, 8200, added=True)),
    Mutant("partial sums are read while they are written", COLUMNS,
           "= sum;\n  __syncthreads();", "= sum;", norms(9, 136)),
    Mutant("weight and bias share their sums", COLUMNS,
           "blockIdx.y * count * width + column", "column", norms(9, 136, centred=True)),
]  # fmt: skip

ACTIVATION_MUTANTS = [
    Mutant("rows are taken twice", COLUMNS,
           "return gridDim.y * blockDim.y;", "return blockDim.y;", biased(700, 1040)),
    Mutant("the element before the end is the last", PACK,
           "i < count ? from[i]", "i < count - 1 ? from[i]", biased(3, 7)),
    Mutant("NaN where a power of x overflows", ACTIVATION,
           "x > 16.f ? 16.f : (x < -16.f ? -16.f : x)", "x",
           lambda kernels: activation.test_far_from_zero_a_gate_is_open_or_shut(kernels, "gelu_tanh")),
    Mutant("a slope without its second term", ACTIVATION,
           "s + x * s * (1.f - s)}", "s}", gated),
]  # fmt: skip

RESIDUAL_MUTANTS = [
    Mutant("odd places take the wrong pair", RESIDUAL,
           "(j / 2 + 1) * step", "j / 2 * step", dropped(5, 7)),
    Mutant("what is kept is dropped", RESIDUAL,
           "bits[j] >= dropout.threshold", "bits[j] < dropout.threshold", dropped(5, 8)),
    Mutant("what is kept is not scaled", RESIDUAL,
           "values[j] * dropout.scale", "values[j]", dropped(5, 8)),
]  # fmt: skip

ROTARY_MUTANTS = [
    Mutant("the inverse turns on", ROTARY,
           "a.inverse ? -1.f : 1.f", "1.f", rotated(64, inverse=True)),
    Mutant("pairs take their neighbour's angle", ROTARY,
           "(a.sin, angles + c / 2,", "(a.sin, angles + c / 4,", rotated(64, interleaved=True)),
    Mutant("all heads are written to one place", ROTARY,
           "y += place * a.y_strides[d];", "",
           lambda kernels: rotary.test_heads_in_place_and_into_a_part_of_another_tensor(kernels, False, torch.float32)),
    Mutant("all positions take the first angle", ROTARY,
           "angles += place * a.angle_strides[d];", "", rotated(64)),
]  # fmt: skip

MUTANTS = [
    pytest.param(family, mutant, id=mutant.fault)
    for family, mutants in (
        ("norm", NORM_MUTANTS),
        ("activation", ACTIVATION_MUTANTS),
        ("residual", RESIDUAL_MUTANTS),
        ("rotary", ROTARY_MUTANTS),
    )
    for mutant in mutants
]


@pytest.mark.parametrize(("family", "mutant"), MUTANTS)
def test_a_fault_is_seen(family, mutant):
    mutant.check(load(family))
    with pytest.raises((AssertionError, LaunchError)):
        mutant.check(load(family, {mutant.file: (mutant.old, mutant.new)}))
