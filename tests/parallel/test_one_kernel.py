"""Attention as one kernel on an emulated GPU: its FLOPs are the planner's, its values and gradients
are unchanged.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak import ops
from megatron_merak.cluster import Device
from megatron_merak.parallel.emulated_kernels import ChargedKernels
from megatron_merak.planner.attention import causal_more, masked_more

FLOPS = Device("flops", 2.0, 1.0, 1e30, 0, 1.0)  # an fp32 operation takes a second
BYTES = Device("bytes", 1e30, 1e30, 1.0, 0, 1.0)  # a byte takes a second


def heads(length: int, groups: int = 4, seed: int = 0):
    torch.manual_seed(seed)
    shapes = ((2, length, 4, 8), (2, length, groups, 8), (2, length, groups, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def causal(query, key, value, dropout: float):
    return ops.causal_attention(query, key, value, dropout)


def masked(query, key, value, dropout: float):
    seen = (torch.arange(query.shape[1]) < query.shape[1] - 3).view(1, 1, 1, -1)
    return ops.attention(*(x.transpose(1, 2) for x in (query, key, value)), seen, dropout)


def both_ways(device: Device, run, operands, dropout: float) -> tuple[float, float]:
    """What forward and backward are charged."""
    times: list[float] = []
    with ChargedKernels(device, times.append):
        out = run(*operands, dropout)
        ahead = len(times)
        out.backward(torch.ones_like(out))
    return sum(times[:ahead]), sum(times[ahead:])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("length", [100, 200, 600])
def test_the_planner_counts_the_flops_that_run(length, dropout, fused):
    device, scores = replace(FLOPS, fused_attention=fused), 4 * 2 * 4 * length**2 * 8
    for run, flops, more in ((causal, scores // 2, causal_more), (masked, scores, masked_more)):
        ahead, behind = more(flops, length, fused, dropout > 0)
        found = both_ways(device, run, heads(length), dropout)
        assert found == pytest.approx((flops + ahead, 2 * flops + behind), rel=1e-6), run.__name__


def test_one_kernel_reads_its_operands_and_writes_its_results():
    size = 4 * 2 * 100 * 4 * 8
    statistics = 4 * 2 * 100 * 4
    ahead, behind = both_ways(BYTES, causal, heads(100), 0.0)
    assert ahead == pytest.approx(4 * size + statistics)
    assert behind >= 8 * size + statistics  # and what hands the gradients on
    starts = both_ways(replace(FLOPS, float32_flops=1e30, dispatch=1.0), causal, heads(100), 0.0)
    assert starts[0] == 1.0


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("run", [causal, masked])
def test_values_and_gradients_are_the_same_bits(run, dropout, groups):
    found = []
    for charged in (None, FLOPS):
        operands = heads(100, groups)
        torch.manual_seed(1)
        with ChargedKernels(charged, lambda seconds: None) if charged else torch.enable_grad():
            out = run(*operands, dropout)
            out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in operands)])
    assert all(torch.equal(plain, timed) for plain, timed in zip(*found, strict=True))


@pytest.mark.parametrize("starts", [(0, 48), (16, 32)])
def test_chunks_of_causal_attention_are_priced_by_what_they_see(starts):
    query, key, value = (x.transpose(1, 2) for x in heads(64))
    own = query[:, :, :32]
    scores = ops.row(ops.causal_chunks).scores(own, key, value, starts)
    seen = sum(16 * start + 16 * 16 // 2 for start in starts)
    assert scores.flops == 4 * 2 * 4 * seen * 8
    ahead, behind = both_ways(
        FLOPS, lambda *given: ops.causal_chunks(*given[:3], starts), (own, key, value), 0.0
    )
    assert (ahead, behind) == pytest.approx((scores.flops, 2.5 * scores.flops))
