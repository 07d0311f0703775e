"""AdamW whose moments are stored in bf16: fp32 arithmetic, rounded to nearest where they are stored,
to the bit.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_merak.config import OptimizerConfig
from megatron_merak.errors import ConfigError
from megatron_merak.ops import PROBLEMS
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer, ShardedState
from megatron_merak.parallel.upper_halves import upper_halves

RATE, DECAY = 1e-2, 0.1
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
PLAIN = OptimizerConfig(
    lr=RATE, clip_grad=0.0, adam_beta1=BETA1, adam_beta2=BETA2, adam_eps=EPS, weight_decay=DECAY
)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STORED = [pair for pair in product(TYPES, TYPES) if pair != ("fp32", "fp32")]
STEPS = 6
COMPILED = pytest.mark.skipif(
    bool(PROBLEMS["_ops_cpu"]), reason="torch's kernel rounds the ends of vectors otherwise"
)


def stored_as(first, second):
    return replace(
        PLAIN, use_precision_aware_optimizer=True, exp_avg_dtype=first, exp_avg_sq_dtype=second
    )


def made(config, dtype=torch.float32, **sharding):
    entries = [BufferEntry("w", (37, 11), 0), BufferEntry("b", (11,), 0)]
    buffer = ParameterBuffer([entries], dtype, "cpu", **sharding)
    if not sharding:
        generator = torch.Generator().manual_seed(1)
        for name in buffer.slots:
            value = buffer.parameter(name)
            value.copy_(torch.randn(value.shape, generator=generator))
    return AdamW(buffer, config)


def fill(optimizer, step):
    generator = torch.Generator().manual_seed(100 + step)
    for name in optimizer.buffer.slots:
        grad = optimizer.buffer.grad(name)
        grad.copy_(torch.randn(grad.shape, generator=generator))


def fused(a, b, c):
    """a * b + c of fp32 numbers, rounded once."""
    return (a.double() * b.double() + c.double()).float()


def single(value):
    return torch.tensor(value, dtype=torch.float32)


def step_of_formula(master, first, second, grad, step):
    """One step in fp32 of moments [n] in any type; returns the new values and exact moments."""
    first = first.float()
    second = second.float()
    moment = fused(single(1 - BETA1), grad - first, first)
    square = fused(single(1 - BETA2) * grad, grad, second * single(BETA2))
    # torch's own root of fp32 numbers is off by a last bit at times
    exact = square.double().sqrt().float()
    root = exact / single(math.sqrt(1 - BETA2**step)) + single(EPS)
    kept = master * single(1 - RATE * DECAY)
    return kept + single(-RATE / (1 - BETA1**step)) * moment / root, moment, square


@COMPILED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "second"), [("fp32", "fp32"), *STORED])
def test_steps_are_those_of_the_formula(first, second, dtype):
    optimizer = made(stored_as(first, second), dtype)
    buffer = optimizer.buffer
    master = optimizer.master.clone()
    moments = [
        torch.zeros(buffer.size, dtype=TYPES[first]),
        torch.zeros(buffer.size, dtype=TYPES[second]),
    ]
    for step in range(1, STEPS + 1):
        fill(optimizer, step)
        optimizer.step([(RATE, DECAY)])
        master, *exact = step_of_formula(master, *moments, buffer.main_grad, step)
        moments = [x.to(kept.dtype) for x, kept in zip(exact, moments, strict=True)]
        assert torch.equal(optimizer.master, master), step
        assert torch.equal(buffer.data, master.to(dtype)), step
        for found, wanted in zip((optimizer.exp_avg, optimizer.exp_avg_sq), moments, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), step


@pytest.mark.parametrize(("first", "second"), STORED)
def test_one_step_rounds_the_moments_of_fp32_and_the_next_differs(first, second):
    """The first step computes with zeros, so that only what is stored differs."""
    plain = made(PLAIN)
    rounding = made(stored_as(first, second))
    for optimizer in (plain, rounding):
        fill(optimizer, 1)
        optimizer.step([(RATE, DECAY)])
    assert torch.equal(plain.buffer.data, rounding.buffer.data)
    for kind, exact in plain.state().items():
        found = rounding.state()[kind]
        assert torch.equal(found, exact.to(found.dtype))
    for optimizer in (plain, rounding):
        fill(optimizer, 2)
        optimizer.step([(RATE, DECAY)])
    assert not torch.equal(plain.buffer.data, rounding.buffer.data)


@pytest.mark.parametrize(("first", "second"), [("fp32", "fp32"), *STORED])
def test_plans_count_what_is_allocated(first, second):
    config = stored_as(first, second)
    optimizer = made(config)
    moments = (optimizer.exp_avg, optimizer.exp_avg_sq)
    assert sum(each.nbytes for each in moments) == config.state_bytes * optimizer.buffer.size
    assert config.state_bytes == sum(each.element_size() for each in moments)


def test_the_switch_alone_changes_nothing():
    assert replace(PLAIN, use_precision_aware_optimizer=True).state_bytes == PLAIN.state_bytes
    state = made(replace(PLAIN, use_precision_aware_optimizer=True)).state()
    assert {each.dtype for each in state.values()} == {torch.float32}


def test_a_shard_has_moments_of_what_it_owns():
    for sharding in (ShardedState.OPTIMIZER, ShardedState.GRADIENTS, ShardedState.PARAMETERS):
        optimizer = made(stored_as("bf16", "bf16"), shards=2, shard=1, sharding=sharding)
        assert optimizer.exp_avg.shape == (optimizer.buffer.owned_size,)
        assert optimizer.exp_avg.dtype == optimizer.exp_avg_sq.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["exp_avg_dtype", "exp_avg_sq_dtype"])
@pytest.mark.parametrize("value", ["fp16", "fp8"])
def test_types_that_need_a_scale_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{value}: is a choice of Megatron-LM .* Use bf16"):
        replace(PLAIN, use_precision_aware_optimizer=True, **{name: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exp_avg_sq_dtype": "bf16", "adam_beta2": 0.999}, ["--exp-avg-sq-dtype bf16"]),
        ({"exp_avg_sq_dtype": "bf16", "adam_beta2": 0.996}, []),
        ({"exp_avg_dtype": "bf16", "adam_beta2": 0.999}, []),
        ({"exp_avg_dtype": "bf16", "adam_beta1": 0.997}, ["--exp-avg-dtype bf16"]),
    ],
)
def test_a_moment_that_cannot_fall_is_named(changes, named):
    lines = replace(PLAIN, use_precision_aware_optimizer=True, **changes).stuck_moments()
    assert [line.partition(" with ")[0] for line in lines] == named


@pytest.mark.parametrize(("beta", "falls"), [(0.999, False), (0.99, True)])
def test_a_second_moment_of_bf16_falls_by_large_enough_steps_only(beta, falls):
    optimizer = made(replace(stored_as("fp32", "bf16"), adam_beta2=beta))
    fill(optimizer, 1)
    optimizer.step([(RATE, DECAY)])
    before = optimizer.exp_avg_sq.clone()
    optimizer.buffer.main_grad.zero_()
    for _ in range(20):
        optimizer.step([(RATE, DECAY)])
    held = before > 0
    assert bool((optimizer.exp_avg_sq < before)[held].all()) == falls
    assert torch.equal(optimizer.exp_avg_sq, before) != falls


def test_upper_halves_are_bf16_numbers_in_memory_of_fp32():
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.zeros(9, 20)[2:7, 3:10]
    exact.copy_(values)
    for view, wanted in ((exact, values), (exact.t(), values.t()), (exact[3, 4], values[3, 4])):
        halves = upper_halves(view)
        assert halves.dtype == torch.bfloat16 and torch.equal(halves, wanted)
    others = torch.arange(35).view(5, 7).bfloat16()
    upper_halves(exact.t()).copy_(others.t())
    assert torch.equal(exact, others.float())
