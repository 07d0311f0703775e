"""Runs of the scripts in fp16: an overflow on any rank is a step that no rank makes, and what
follows from one.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak.config import OptimizerConfig, TrainConfig
from megatron_merak.config.checks import check_precision
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.stages.saved_run import SavedRun
from tests.engines import gpt_trainer, gradient_step
from tests.parity.batches import replica_batch
from tests.parity.cases import Case
from tests.parity.rig import disturb, mesh_of, new_trainer
from tests.parity.test_resume import state
from tests.ranks import run_ranks


def _overflows_once(trainer, rank):
    """Let one element of a gradient of ``rank`` overflow in the next step, before replicas add
    theirs up.
    """
    parameters, finish = trainer.model.parameters, trainer.model.parameters.finish_step

    def finish_step():
        parameters.finish_step = finish
        if trainer.mesh.rank == rank:
            name = next(reversed(trainer.model.buffer.slots))
            trainer.model.buffer.grad(name).view(-1)[0] = torch.inf
        finish()

    parameters.finish_step = finish_step


def _one_overflow(rank, world_size, case):
    trainer = new_trainer(case, mesh_of(case, rank))
    scaler, found = trainer.optimizer.scaler, []
    for step in range(world_size + 1):
        before, moved = [tensor.clone() for tensor in state(trainer)], trainer.optimizer.steps
        if step < world_size:
            _overflows_once(trainer, step)
        report = trainer.step(replica_batch(case, step, trainer.mesh.dp_rank))
        same = all(map(torch.equal, state(trainer), before))
        found.append(
            (
                report.skipped,
                same,
                trainer.optimizer.steps - moved,
                report.loss_scale,
                report.learning_rate,
            )
        )
        assert report.loss_scale == scaler.scale
    return found, trainer.skipped_iterations, trainer.iteration, trainer.skipped_samples


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", tp=2, pp=2, dtype="fp16", early=False),
        pytest.param(Case("llama", tp=2, dp=2, dtype="fp16", early=False), marks=pytest.mark.long),
        pytest.param(
            Case("llama", tp=2, dp=2, dtype="fp16", early=False, sharding="optim"),
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_an_overflow_on_any_one_rank_is_a_step_that_no_rank_makes(case):
    for found, skipped, iterations, samples in run_ranks(
        _one_overflow, case.world, case, timeout=150
    ):
        rate = found[0][-1]
        # forgiven once, then halved; the rate does not move
        assert found[:-1] == [(True, True, 0, scale, rate) for scale in (256.0, 128.0, 64.0, 32.0)]
        assert found[-1] == (False, False, 1, 32.0, rate)
        assert (skipped, iterations) == (4, 5) and samples > 0


def test_schedules_wait_for_skipped_steps_and_a_resumed_run_does_too(tmp_path):
    case = Case("llama", dtype="fp16")
    trainer = new_trainer(case, mesh_of(case))
    rates = []
    for step in range(3):
        if step == 1:
            _overflows_once(trainer, 0)
        rates.append(trainer.step(replica_batch(case, step, 0)).learning_rate)
    assert rates == [rate_behind(case, made) for made in (0, 1, 1)]
    trainer.save(tmp_path)
    other = new_trainer(case, mesh_of(case))
    other.load(tmp_path)
    assert (
        (other.skipped_iterations, other.iteration)
        == (1, 3)
        == (trainer.skipped_iterations, trainer.iteration)
    )
    assert other.skipped_samples == trainer.skipped_samples > 0
    assert other.rates()[0][0] == rate_behind(case, 2)
    train = replace(other.config.train, train_iters=None, train_samples=10 * other.skipped_samples)
    other.config = replace(other.config, train=train)
    sampled = other.rates()[0][0]
    other.consumed_samples, other.skipped_samples = (
        other.consumed_samples - other.skipped_samples,
        0,
    )
    assert other.rates()[0][0] == sampled, "so it is in a run given in samples"


def rate_behind(case, made):
    trainer = new_trainer(case, mesh_of(case))
    trainer.iteration = made
    return trainer.rates()[0][0]


def test_a_checkpoint_without_a_scale_starts_one(tmp_path):
    old, case = Case("llama", dtype="bf16"), Case("llama", dtype="fp16")
    trainer = new_trainer(old, mesh_of(old))
    trainer.step(replica_batch(old, 0, 0))
    trainer.save(tmp_path)
    other, lines = new_trainer(case, mesh_of(case)), []
    other.optimizer.scaler.scale = 4.0
    other.load(tmp_path, say=lines.append)
    assert other.optimizer.scaler.scale == 2.0**8 and other.optimizer.steps == 1
    assert "--fp16 on (it was off)" in lines[0] and "--bf16 off (it was on)" in lines[0]
    assert torch.equal(other.optimizer.master, trainer.optimizer.master), "masters are fp32 in both"
    assert not other.step(replica_batch(case, 1, 0)).skipped


def test_a_state_that_makes_no_sense_is_refused():
    meta = {"iteration": 1, "consumed_samples": 1, "optimizer_steps": 1}
    meta |= {"config": {name: {} for name in ("model", "train", "optimizer", "data")}}
    old = SavedRun.read(meta, "here")
    assert (old.loss_scale, old.skipped_iterations, old.skipped_samples) == (None, 0, 0)
    for name, value in (("loss_scale", {"scale": -1}), ("loss_scale", 3), ("skipped_samples", -1)):
        with pytest.raises(CheckpointError, match=f"{name}, .* is "):
            SavedRun.read(meta | {name: value}, "here")


def _gradients(case, **flags):
    config = case.config()
    config = replace(
        config, train=replace(config.train, **flags), optimizer=OptimizerConfig(lr=1e-3)
    )
    trainer = gpt_trainer(config, make_plan(config, 1), mesh_of(case))
    disturb(trainer)
    loss = gradient_step(trainer, replica_batch(case, 0, 0))
    return loss, trainer.model.buffer.main_grad.clone()


def test_the_scale_saves_small_gradients_and_changes_no_other():
    case = Case("gpt2", dtype="fp16")
    (loss, plain), (same, scaled), (_, more) = (
        _gradients(case, initial_loss_scale=scale) for scale in (1.0, 2.0**12, 2.0**14)
    )
    assert loss == same
    lost = (plain == 0).sum() - (scaled == 0).sum()
    assert lost > 0, "without a larger scale some gradients are too small for fp16"
    torch.testing.assert_close(plain, scaled, rtol=0, atol=1e-4)
    torch.testing.assert_close(scaled, more, rtol=0, atol=1e-5)


REFUSED = [
    ({"fp16": True, "bf16": True}, "--fp16 True: contradicts --bf16"),
    ({"loss_scale": 8.0}, "--loss-scale 8.0: has no effect without --fp16"),
    ({"bf16": True, "hysteresis": 3}, "--hysteresis 3: has no effect without --fp16"),
    ({"initial_loss_scale": 8.0}, "--initial-loss-scale 8.0: has no effect without --fp16"),
    (
        {"fp16": True, "loss_scale": 8.0, "loss_scale_window": 5},
        "--loss-scale-window 5.0: has no effect with --loss-scale",
    ),
    (
        {"fp16": True, "min_loss_scale": 8.0, "initial_loss_scale": 4.0},
        "--min-loss-scale 8.0: exceeds --initial-loss",
    ),
]


@pytest.mark.parametrize("flags, message", REFUSED)
def test_flags_that_contradict_each_other(flags, message):
    with pytest.raises(ConfigError, match=message):
        check_precision(TrainConfig(micro_batch_size=1, **flags))


def test_flags_that_go_together():
    for flags in (
        {},
        {"fp16": True},
        {"fp16": True, "loss_scale": 0, "hysteresis": 4},
        {"bf16": True, "hysteresis": 2},
    ):
        check_precision(TrainConfig(micro_batch_size=1, **flags))
