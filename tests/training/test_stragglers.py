"""--log-straggler names the rank that computes slowly, also where others wait for it inside an op."""

import re
import time
from unittest import mock

import pytest
import torch

from megatron_merak.plan import Grid
from megatron_merak.training.stragglers import compared, straggler_line
from tests.ranks import run_ranks
from tests.training.jobs import job

FLAGS = "--train-iters 6 --log-interval 3 --log-straggler --straggler-minmax-count 2"
LAYOUTS = {
    "sharded weights, tensor parallel": (
        "--tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads_params"
    ),
    "replicas": "--use-distributed-optimizer",
}


def slow(rank, size, flags, late):
    """A job whose rank ``late`` sleeps in each linear layer."""
    linear = torch.nn.functional.linear

    def sleeping(*arguments):
        time.sleep(0.02)
        return linear(*arguments)

    with mock.patch("torch.nn.functional.linear", sleeping if rank == late else linear):
        return job(rank, size, f"{FLAGS} {flags}")


@pytest.mark.parametrize(("layout", "size"), zip(LAYOUTS, (4, 2), strict=True))
def test_the_slow_rank_is_named(layout, size):
    late = size - 1
    printed = "".join(run_ranks(slow, size, LAYOUTS[layout], late))
    lines = [line for line in printed.splitlines() if line.startswith(" computing")]
    assert [line.split(" | ")[0] for line in lines] == [
        " computing at iteration 3",
        " computing at iteration 6",
    ]
    named = [re.search(r"slowest rank (\d)", line)[1] for line in lines]
    assert named == [str(late)] * 2, lines


def test_ranks_are_compared_with_those_of_their_stage():
    grid = Grid(dp=2, pp=2)
    times = compared([1.0, 1.0, 4.0, 8.0], grid)
    assert [(time.rank, round(time.relative, 3)) for time in times] == [
        (3, 1.333),
        (0, 1.0),
        (1, 1.0),
        (2, 0.667),
    ]
    assert straggler_line(7, times, grid, 1) == (
        " computing at iteration 7 | median 2500.0 ms of a step | slowest rank 3 (dp 1 pp 1): "
        "8000.0 ms, 1.33x | fastest rank 2 (dp 0 pp 1): 4000.0 ms, 0.67x |"
    )
