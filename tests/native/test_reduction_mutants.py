"""Faults planted in the kernels of softmax, cross entropy and flat buffers: each must fail a check
of those kernels.
"""

import pytest
import torch

from tests.native import test_cross_entropy_kernels as cross_entropy
from tests.native import test_flat_kernels as flat
from tests.native import test_softmax_kernels as softmax
from tests.native.shim import NEEDED, LaunchError, load

pytestmark = [NEEDED, pytest.mark.compiles]
FP32, BF16 = torch.float32, torch.bfloat16
MASK = softmax.randn(2, 2, 1, 1200, seed=4) > 0.3


def softmax_checks(kernels):
    softmax.check(kernels, BF16, 40, causal=True)
    softmax.check(kernels, FP32, 1200, mask=MASK)
    softmax.check(kernels, FP32, 8196, causal=True, queries=2)
    softmax.test_extremes(kernels, 700)
    softmax.test_extremes(kernels, 2048)


def cross_entropy_checks(kernels):
    cross_entropy.test_statistics_of_any_width(kernels, BF16, 8203)
    cross_entropy.test_classes_at_minus_infinity_do_not_exist(kernels, 4096)
    cross_entropy.test_a_target_just_outside_a_shard_is_not_in_it(kernels)
    cross_entropy.test_shards_padding_and_smoothing(kernels, 120, 8, 71, 0.1)
    cross_entropy.test_exponentials_in_place(kernels, FP32, 4100, 4001)
    cross_entropy.test_a_row_without_gradient_is_zero_whatever_its_logits_are(kernels)


def flat_checks(kernels):
    flat.check_adamw(kernels, 1025)
    flat.test_moments_are_rounded_where_they_are_stored_and_nowhere_else(kernels, BF16, FP32)
    flat.test_the_decay_of_a_small_second_moment_is_not_lost(kernels)
    flat.test_sums_of_squares_are_those_of_fp64(kernels, BF16, 20001)
    flat.test_a_sum_of_squares_has_the_same_bits_at_any_address_and_does_not_overflow(kernels)
    flat.test_a_long_sum_of_squares_has_several_packs_for_each_thread(kernels)
    flat.test_scaled_copies_and_sums_round_once(kernels, FP32, BF16)
    flat.check_add_rows(kernels, 5, 23, 1032)
    flat.test_an_index_out_of_range_fails_the_launch(kernels, 4)
    flat.check_sums_of_rows(kernels, 5, 6, 1032)
    flat.test_a_place_out_of_range_fails_the_launch(kernels, 4)


CHECKS = {"softmax": softmax_checks, "cross_entropy": cross_entropy_checks, "flat": flat_checks}
MERGED = "    sum = sum * __expf(max - base) + other_sum * __expf(other_max - base);\n"

# fault -> (family, file, text, what stands there instead)
MUTANTS = {
    "maximum: no barrier before it is read": (
        "softmax",
        "softmax",
        "scratch[first + threadIdx.x / kWarp] = value;\n  __syncthreads();\n",
        "scratch[first + threadIdx.x / kWarp] = value;\n",
    ),
    "maximum: no barrier before its place is used again": (
        "softmax",
        "softmax",
        "scratch[first + lane] : -INFINITY);\n  __syncthreads();\n",
        "scratch[first + lane] : -INFINITY);\n",
    ),
    "diagonal one key too early": (
        "softmax",
        "softmax",
        "scores.keys - scores.queries + 1))",
        "scores.keys - scores.queries))",
    ),
    "mask turned round": (
        "softmax",
        "softmax",
        "scores.vector ? shown.at[i]",
        "scores.vector ? !shown.at[i]",
    ),
    "mask of another head": (
        "softmax",
        "softmax",
        "head * scores.mask_head",
        "batch * scores.mask_head",
    ),
    "-inf less -inf": ("softmax", "softmax", "maximum == -INFINITY ? 0.f : maximum", "maximum"),
    "a hidden row divided by zero": (
        "softmax",
        "softmax",
        "sum == 0.f ? 0.f : 1.f / sum",
        "1.f / sum",
    ),
    "running sums added as they are": ("softmax", "softmax", MERGED, "    sum += other_sum;\n"),
    "a running sum not rescaled": (
        "softmax",
        "softmax",
        "found = sum * __expf(max - base);",
        "found = sum;",
    ),
    "the last visible key left out": (
        "softmax",
        "softmax",
        "at + i < visible && (mask",
        "at + i + 1 < visible && (mask",
    ),
    "running sums: no barrier": (
        "cross_entropy",
        "softmax",
        "  __syncthreads();\n  own = RunningSum();",
        "  own = RunningSum();",
    ),
    "the last elements of a row left out": (
        "cross_entropy",
        "cross_entropy",
        "tail + thread})",
        "count})",
    ),
    "padding taken for the target's class": (
        "cross_entropy",
        "cross_entropy",
        "at < shard.classes ?",
        "at <= shard.classes ?",
    ),
    "padding in the gradient": (
        "cross_entropy",
        "cross_entropy",
        "if (i >= shard.classes) return 0.f;\n    const float found",
        "const float found",
    ),
    "smoothing over classes that do not exist": (
        "cross_entropy",
        "cross_entropy",
        "(x == -INFINITY ? 0.f : of_each)",
        "of_each",
    ),
    "a row without gradient computed": (
        "cross_entropy",
        "cross_entropy",
        "if (of_sum == 0.f && of_target == 0.f && of_each == 0.f) return",
        "if (false) return",
    ),
    "no sum at the target": ("cross_entropy", "cross_entropy", "i == chosen ? e - sum : e", "e"),
    "one less fp32 beta": ("flat", "flat", "how.rest2 * g * g", "(1.f - how.beta2) * g * g"),
    "a moment rounded before it is used": (
        "flat",
        "flat",
        "how.step * moment /",
        "how.step * widen(narrow<M>(moment)) /",
    ),
    "no correction of the second moment": (
        "flat",
        "flat",
        "* how.correction + how.eps",
        "+ how.eps",
    ),
    "partial sums: no barrier": (
        "flat",
        "flat",
        "scratch[threadIdx.x / kWarp] = value;\n  __syncthreads();\n",
        "scratch[threadIdx.x / kWarp] = value;\n",
    ),
    "squares counted again": ("flat", "flat", "at += LOADS * step", "at += step"),
    "squares in fp32": ("flat", "flat", "const double value = widen", "const float value = widen"),
    "a scale forgotten": ("flat", "flat", "scale * widen(values.at[i])", "widen(values.at[i])"),
    "equal rows added by each of them": (
        "flat",
        "flat",
        " || (first > 0 && index[first - 1] == row)",
        "",
    ),
    "rows in their own order": ("flat", "flat", "order[k + j] * width", "(k + j) * width"),
    "an index past the table": ("flat", "flat", "row >= table_rows", "row > table_rows"),
    "rows of the next token": ("flat", "flat", "wanted ? left : 0, vector", "left, vector"),
    "rows of the first token": ("flat", "flat", "places[token * k + first", "places[first"),
    "a place past the rows": ("flat", "flat", "place >= count", "place > count"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant):
    family, file, text, other = MUTANTS[mutant]
    kernels = load(family, {f"kernels/{file}.cuh": (text, other)})
    with pytest.raises((AssertionError, LaunchError, pytest.fail.Exception)):
        for seed in range(3):  # of the order in which warps run
            kernels.seed(seed)
            CHECKS[family](kernels)


@pytest.mark.parametrize("family", CHECKS)
def test_the_kernels_as_they_are_pass(family):
    CHECKS[family](load(family))
