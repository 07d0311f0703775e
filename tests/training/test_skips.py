"""Steps whose gradient is not finite: a few are skipped, many end the run by name, and nothing
finite is lost.
"""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_merak.errors import NumericsError
from megatron_merak.optimizer.loss_scale import LossScaler, scaler_of_torch
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.training.skips import SkippedSteps
from tests.ranks import run_ranks


def _buffer(*names: str) -> ParameterBuffer:
    return ParameterBuffer([[BufferEntry(name, (3,), 0)] for name in names], torch.float32, "cpu")


def test_the_count_begins_anew_with_each_step_that_is_made():
    buffer = _buffer("a", "b", "c")
    skips = SkippedSteps(3, buffer, None)
    for skipped in (True, True, False, True, True):
        skips.count(skipped)
    buffer.grad("b")[1] = math.nan
    buffer.grad("a")[:] = math.inf
    with pytest.raises(
        NumericsError,
        match=r"--max-consecutive-skipped-steps 3: .* pass b, a \(2 of 3 parameters\)",
    ):
        skips.count(True)


def test_steps_that_a_lower_loss_scale_may_save_do_not_count():
    buffer = _buffer("a", "b")
    buffer.grad("b")[0] = math.inf
    scaler = LossScaler(16.0, 2.0, 100, 2, setting="--min-loss-scale")
    skips = SkippedSteps(2, buffer, None, scaler=scaler)
    told = r"--max-consecutive-skipped-steps 2: .* at a loss scale of 2.0: "
    told += r".* b \(1 of 2 parameters\).* --min-loss-scale"
    for _ in range(4):  # forgiven at 16, lowered to 8, 4, 2
        scaler.update(True)
        skips.count(True)
    assert scaler.scale == 2.0 and skips.in_a_row == 0
    scaler.update(True)
    skips.count(True)
    scaler.update(True)
    with pytest.raises(NumericsError, match=told):
        skips.count(True)
    fixed = LossScaler(1024.0, setting="--loss-scale")
    fixed.update(True)
    with pytest.raises(NumericsError, match=r"at a loss scale of 1024.0: .* a lower --loss-scale"):
        SkippedSteps(1, buffer, None, scaler=fixed).count(True)
    torchs = scaler_of_torch()
    torchs.scale = 2.0
    skips = SkippedSteps(1, buffer, None, scaler=torchs)
    torchs.update(True)
    skips.count(True)
    torchs.update(True)
    with pytest.raises(NumericsError, match=r"at a loss scale of 0.5: "):
        skips.count(True)


def _staged(rank: int, world: int) -> str:
    buffer = _buffer(*(["wte", "h.0.a"], ["h.0.a", "h.1", "head"])[rank])
    for name in (["wte", "h.0.a"], ["h.0.a", "h.1"])[rank]:
        buffer.grad(name).fill_(math.nan)
    with pytest.raises(NumericsError) as caught:
        SkippedSteps(1, buffer, dist.group.WORLD).count(True)
    return str(caught.value)


def test_every_rank_names_the_module_where_the_backward_pass_met_it_first():
    one, other = run_ranks(_staged, 2)
    assert one == other and "pass h.1, h.0.a, wte (3 of 4 parameters)" in one
