"""Replicas that share the optimizer's state: what each one updates reaches all, whatever is asked
for first.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.config import OptimizerConfig
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.runtime.grads import GradientReducer
from megatron_merak.runtime.shards import ShardGatherer
from tests.ranks import run_ranks

CONFIG = OptimizerConfig(lr=1e-2, clip_grad=1.0)


def entries():
    weights = [
        [BufferEntry(f"layer.{i}.weight", (90, 110), 0), BufferEntry(f"layer.{i}.bias", (110,), 1)]
        for i in range(4)
    ]
    return [
        [BufferEntry("head", (7, 11), 0, counted=False, tied=True)],
        *weights,
        [BufferEntry("gate", (5,), 0, fp32=True)],
    ]


def steps(rank, world_size, dtype, sharded, overlap, in_bf16=False):
    """Parameters and state after three steps of gradients that are integers, and what the norms
    were.
    """
    group = dist.group.WORLD
    buffer = ParameterBuffer(
        entries(), dtype, "cpu", 12_000, *((world_size, rank) if sharded else (1, 0))
    )
    for name in buffer.slots:
        generator = torch.Generator().manual_seed(
            len(name) + ord(name[-1]) + ord(name[6 % len(name)])
        )
        buffer.parameter(name).copy_(torch.randn(buffer.slots[name].shape, generator=generator))
    buffer.refresh_master()
    reducer, gatherer = (
        GradientReducer(buffer, group, True, in_bf16=in_bf16),
        ShardGatherer(buffer, group, overlap),
    )
    optimizer = AdamW(buffer, CONFIG, None, group)
    norms = []
    for step in range(3):
        gatherer.wait(reversed(buffer.slots))
        assert not gatherer.pending
        reducer.start()
        for number, name in enumerate(sorted(buffer.slots)):
            grad = buffer.grad(name)
            grad.copy_(
                (torch.arange(grad.numel()).view(grad.shape) * (step + 1) + number + rank) % 7
            )
            reducer.ready(name)
        reducer.finish()
        norms.append(optimizer.step([(1e-2, 0.1), (1e-2, 0.0)]).grad_norm)
        gatherer.launch()
        assert gatherer.pending == (sharded and overlap)
    gatherer.finish()
    found = {name: buffer.parameter(name).clone() for name in sorted(buffer.slots)}
    for kind, state in optimizer.state().items():
        before = state.clone()
        flat = gatherer.full(state)
        found |= {
            f"{kind} {name}": buffer.view(flat, name).clone() for name in sorted(buffer.slots)
        }
        state.zero_()
        buffer.take(state, flat if sharded else before)
        assert torch.equal(state, before)
    return found, norms, buffer.owned_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_steps_are_those_of_replicas_that_have_all(world_size, dtype):
    expected, norms, _ = run_ranks(steps, world_size, dtype, False, True)[0]
    for overlap, in_bf16 in ((True, False), (False, True)) if world_size == 2 else ((True, False),):
        ranks = run_ranks(steps, world_size, dtype, True, overlap, in_bf16)
        for found, told, size in ranks:
            assert told == pytest.approx(norms, rel=1e-12) and found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
            assert size * world_size < 1.1 * sum(
                value.numel() for name, value in expected.items() if " " not in name
            )
