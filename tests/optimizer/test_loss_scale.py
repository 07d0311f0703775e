"""The loss scale moves as Megatron-LM's and as torch's, and steps at any scale are those without
one.
"""

import math
from random import Random

import pytest
import torch
from torch import nn

from megatron_merak.config import OptimizerConfig, TrainConfig
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.optimizer.loss_scale import LossScaler, is_state, scaler_of_run, scaler_of_torch
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from tests.ranks import run_ranks

# (initial, minimum, window, hysteresis), what happened in each step (x: overflow), the scale after
# it.
TABLE = [
    ((8, 1, 4, 2), ".xx....", (8, 8, 4, 4, 4, 4, 8)),
    ((8, 1, 4, 2), "xxxxxx", (8, 4, 2, 1, 1, 1)),  # what is used up is not forgiven again ...
    ((8, 1, 2, 2), "xx.x..x", (8, 4, 4, 2, 2, 4, 4)),  # ... until the scale has grown
    ((8, 1, 3, 2), "x..x...", (8, 8, 8, 4, 4, 4, 8)),  # an overflow starts the window anew
    ((8, 3, 9, 1), "xxx", (4, 3, 3)),
    ((6, 1, 1, 1), "..x", (12, 24, 12)),
]


@pytest.mark.parametrize("settings, steps, scales", TABLE)
def test_it_moves_as_megatrons(settings, steps, scales):
    scaler, found = LossScaler(*settings), []
    for step in steps:
        scaler.update(step == "x")
        found.append(scaler.scale)
    assert found == list(scales)


class Megatrons:
    """DynamicGradScaler of Megatron-LM, in its own words."""

    def __init__(self, initial_scale, min_scale, growth_interval, hysteresis):
        self.scale, self.min_scale = initial_scale, min_scale
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.growth_interval:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * 2.0


def overflows(seed):
    drawn = Random(seed)
    often = drawn.choice([0.05, 0.3, 0.7])
    return [drawn.random() < often for _ in range(120)]


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_moves_it_as_megatrons_and_torchs(seed):
    drawn = Random(seed)
    settings = (2.0 ** drawn.randrange(0, 8), 1.0, drawn.randrange(1, 9), drawn.randrange(1, 4))
    ours, theirs = LossScaler(*settings), Megatrons(*settings)
    torchs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=settings[2])
    alike = scaler_of_torch()
    alike.window = settings[2]
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.0)
    for overflowed in overflows(seed):
        ours.update(overflowed)
        theirs.update(overflowed)
        torchs.scale(torch.ones(()))
        weight.grad = torch.tensor([0.0, math.inf if overflowed else 1.0])
        torchs.step(optimizer)
        torchs.update()
        alike.update(overflowed)
        assert (ours.scale, alike.scale) == (theirs.scale, torchs.get_scale())


def test_torchs_defaults():
    torchs, ours = torch.amp.GradScaler("cpu"), scaler_of_torch()
    assert (ours.initial, ours.window) == (torchs.get_scale(), torchs.get_growth_interval())
    assert (torchs.get_growth_factor(), torchs.get_backoff_factor()) == (2.0, 0.5)


def test_flags_choose_the_scale():
    def chosen(**flags):
        return scaler_of_run(TrainConfig(micro_batch_size=1, **flags))

    plain = chosen(fp16=True)
    assert (plain.scale, plain.minimum, plain.window, plain.hysteresis) == (2.0**32, 1.0, 1000, 2)
    fixed = chosen(fp16=True, loss_scale=128)
    fixed.update(True)
    assert fixed.scale == 128.0 and fixed.scales and not fixed.dynamic and fixed.state() is None
    assert chosen(fp16=True, loss_scale=0).dynamic, "as in Megatron-LM"
    assert not chosen().scales and not chosen(bf16=True).scales


def test_a_scale_that_is_saved_goes_on():
    scaler, other = LossScaler(2.0**20, 1, 3, 2), LossScaler(2.0**10, 1, 3, 2)
    for overflowed in (False, True, True, False, False):
        scaler.update(overflowed)
    assert is_state(scaler.state())
    other.load(scaler.state())
    for overflowed in (False, True, True):
        scaler.update(overflowed)
        other.update(overflowed)
        assert other.state() == scaler.state()
    other.load(None)
    assert other.state() == LossScaler(2.0**10, 1, 3, 2).state()
    wrong = (
        {},
        5,
        {"scale": 0.0},
        {"scale": math.inf},
        {"scale": math.nan},
        {"scale": True},
        {"grown": -1},
    )
    for change in wrong:
        assert not is_state(
            {**scaler.state(), **change} if isinstance(change, dict) and change else change
        )


def test_it_stays_in_fp32():
    scaler = LossScaler(2.0**126, 1, 1, 1)
    for _ in range(5):
        scaler.update(False)
    assert scaler.scale == 2.0**127 and torch.tensor(scaler.scale).isfinite()


def _optimizer(scaler, group=None, dtype=torch.float16, rank=0):
    buffer = ParameterBuffer(
        [[BufferEntry("a", (7, 3), 0), BufferEntry("b", (5,), 1)]], dtype, "cpu"
    )
    generator = torch.Generator().manual_seed(rank)
    for name in buffer.slots:
        buffer.parameter(name).copy_(torch.randn(buffer.slots[name].shape, generator=generator))
    return AdamW(buffer, OptimizerConfig(lr=1e-2, clip_grad=0.5), group, scaler=scaler)


def _fill(optimizer, step, scale):
    generator = torch.Generator().manual_seed(50 + step)
    for name in optimizer.buffer.slots:
        grad = optimizer.buffer.grad(name)
        grad.copy_(scale * torch.randn(grad.shape, generator=generator))


def _state(optimizer):
    return [optimizer.buffer.data.clone(), *(value.clone() for value in optimizer.state().values())]


RATES = [(1e-2, 0.1), (1e-2, 0.0)]


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaled_gradient_makes_the_step_of_the_gradient(unscales):
    plain, scaled = _optimizer(None), _optimizer(LossScaler(2.0**24, 1, 2, 1))
    for step in range(6):
        _fill(plain, step, 1.0)
        _fill(scaled, step, scaled.begin())
        if unscales:
            scaled.unscale()
            assert torch.equal(scaled.buffer.main_grad, plain.buffer.main_grad)
        assert scaled.grad_norm() == plain.grad_norm()
        ours, theirs = scaled.step(RATES), plain.step(RATES)
        assert (ours.grad_norm, ours.skipped) == (theirs.grad_norm, theirs.skipped)
        assert theirs.loss_scale is None and ours.loss_scale == 2.0 ** (24 + (step + 1) // 2)
        assert all(map(torch.equal, _state(scaled), _state(plain)))


def _overflow(rank, world_size):
    group = torch.distributed.group.WORLD
    optimizer = _optimizer(LossScaler(64.0, 1, 9, 1), group, rank=rank)
    _fill(optimizer, 0, optimizer.begin())
    optimizer.step(RATES)
    found = []
    for bad in (math.inf, math.nan, -math.inf):
        before = _state(optimizer)
        _fill(optimizer, 1, optimizer.begin())
        if rank == 1:
            optimizer.buffer.grad("b")[2] = bad
        result = optimizer.step(RATES)
        same = all(map(torch.equal, _state(optimizer), before))
        found.append((result.skipped, result.loss_scale, same, optimizer.steps))
    return found


def test_an_overflow_on_one_rank_is_skipped_by_all():
    for found in run_ranks(_overflow, 2):
        assert found == [(True, scale, True, 1) for scale in (32.0, 16.0, 8.0)]
