"""Each conjugate pair with integers that one can add by hand, forward and backward."""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tests.ranks import run_ranks


def both_ways(fn, x, upstream, group):
    x = x.clone().requires_grad_()
    out = fn(x, group)
    out.backward(upstream)
    return out.detach().tolist(), x.grad.tolist()


def run_pairs(rank, world_size):
    group, n = dist.group.WORLD, world_size
    mine = torch.tensor([[rank + 1.0, 10.0 * (rank + 1)]])
    whole = torch.arange(2.0 * n).unsqueeze(0)
    kept = mine.clone()
    results = {
        "copy": both_ways(copy_to_tensor_model_parallel_region, mine, mine, group),
        "reduce": both_ways(reduce_from_tensor_model_parallel_region, mine, mine, group),
        "scatter": both_ways(scatter_to_tensor_model_parallel_region, whole, mine, group),
        "gather": both_ways(gather_from_tensor_model_parallel_region, mine, whole, group),
    }
    assert torch.equal(mine, kept), "an all-reduce wrote into its input"
    return results


@pytest.mark.parametrize("n", [2, 4])
def test_conjugate_pairs(n):
    total = [[n * (n + 1) / 2, 10 * n * (n + 1) / 2]]
    every = [[value for rank in range(n) for value in (rank + 1.0, 10.0 * (rank + 1))]]
    for rank, results in enumerate(run_ranks(run_pairs, n)):
        mine, slice_ = [[rank + 1.0, 10.0 * (rank + 1)]], [[2.0 * rank, 2.0 * rank + 1]]
        assert results["copy"] == (mine, total)
        assert results["reduce"] == (total, mine)
        assert results["scatter"] == (slice_, every)
        assert results["gather"] == (every, slice_)


def run_strided(rank, world_size):
    """A transposed input: what leaves must be the values, not the memory order."""
    x = torch.arange(6.0).view(2, 3).t() + 100 * rank
    return [
        reduce_from_tensor_model_parallel_region(x, dist.group.WORLD).tolist(),
        gather_from_tensor_model_parallel_region(x, dist.group.WORLD).tolist(),
    ]


def test_strided_inputs():
    for reduced, gathered in run_ranks(run_strided, 2):
        assert reduced == [[100, 106], [102, 108], [104, 110]]
        assert gathered == [[0, 3, 100, 103], [1, 4, 101, 104], [2, 5, 102, 105]]


@pytest.mark.parametrize(
    "fn",
    [
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        scatter_to_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
    ],
)
def test_alone_each_is_the_identity(fn):
    x = torch.randn(3)
    assert fn(x, None) is x
    assert (group_size(None), group_rank(None)) == (1, 0)
