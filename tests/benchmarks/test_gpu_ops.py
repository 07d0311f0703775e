"""The benchmark of GPU operations on a CPU: both sides do the same work, and bytes are counted as
by hand.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_cases  # noqa: E402
import gpu_ops  # noqa: E402

from megatron_merak.ops.schemas import SCHEMAS  # noqa: E402


def test_every_operation_is_compared_on_a_gpu():
    assert {case.op for case in gpu_cases.CASES} | set(gpu_cases.MORE) == set(SCHEMAS)


def test_every_case_does_the_work_of_plain_pytorch():
    registered = [case for case in gpu_cases.CASES if case.registered]
    assert len(registered) >= 10 and gpu_ops.check().count("\n| ") == len(registered)


def test_a_difference_is_seen():
    case = gpu_cases.Case(
        "sum_of_squares", "", lambda make: (make.wide(9),), lambda x: x.double().sum()
    )
    assert (
        gpu_ops.difference(case, gpu_cases.Inputs(gpu_cases.TINY, torch.device("cpu")))
        > gpu_ops.TOLERANCE
    )


# By hand: tokens 16, hidden 16, ffn 24, vocabulary 40, sequence 8, 2 heads, 100 parameters;
# statistics are fp32.
@pytest.mark.parametrize(
    ("op", "moved"),
    [
        ("rms_norm", 2 * (16 * 16 + 16 + 16 * 16) + 4 * 16),
        ("gated", 3 * 2 * 16 * 24),
        # of 64 scores of a head 36 are on or below the diagonal
        ("masked_softmax", 2 * 2 * 8 * 8 + 2 * 2 * 36),
        ("cross_entropy_stats", 2 * 16 * 40 + 8 * 16 + 4 * 16 * 3),
        ("adamw_", 100 * (3 * 8 + 4 + 2 * 2)),
        ("accumulate_", 100 * (8 + 2)),
        ("cast_", 100 * (4 + 2)),
        ("sum_of_squares", 100 * 4 + 8),
    ],
)
def test_bytes(op, moved):
    case = next(case for case in gpu_cases.CASES if case.op == op)
    if not case.registered:
        pytest.skip(f"{op} has no twin yet")
    arguments = case.make(gpu_cases.Inputs(gpu_cases.TINY, torch.device("cpu")))
    assert case.moved(arguments, case.ours(*arguments)) == moved
