"""Unexpected results: what counts as one, and whose fault it is when the step is computed again."""

import contextlib
import io
import math
from pathlib import Path

import pytest
import torch

from megatron_merak.errors import DoubtfulResultError, UnexpectedResultError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.runtime.executor import Executor
from megatron_merak.stages.unexpected import Checks, Judge
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks
from tests.training.jobs import job


def test_a_loss_is_spiky_from_ten_times_the_largest_of_the_first_hundred():
    judge = Judge(Checks(check_for_spiky_loss=True), finite=True)
    assert judge.rejection([1e6, math.nan], 1.0).text == "the loss of micro-batch 1 is nan"
    judge = Judge(Checks(check_for_spiky_loss=True), finite=True)
    for loss in range(100):
        assert judge.rejection([2 + loss / 100], 1.0) is None
    assert judge.rejection([29.8], 1.0) is None
    found = judge.rejection([3.0, 854.0], 1.0)
    assert found.text.startswith(
        "the loss of micro-batch 1 is 854, at least 10 times the largest of the first 100, 2.99"
    )
    assert not found.fatal and judge.rejection([-30.0], 1.0) is not None
    assert Judge(Checks(), finite=True).rejection([854.0], math.inf).fatal
    assert (
        Judge(Checks(no_check_for_nan_in_loss_and_grad=True), finite=True).rejection(
            [math.inf], math.nan
        )
        is None
    )
    large = Judge(Checks(check_for_large_grads=True), finite=False)
    assert [large.rejection([math.nan], 1.0) for _ in range(100)] == [None] * 100
    assert "norm of the gradient is 10," in large.rejection([], 10.0).text


def _spoiled(rank, world, flags, spoils):
    """Run a job in which a weight is wrong for as long as a run of the schedule takes; return what
    was told, and how it ended.

    spoils: called with (rank, step, number of the run in that step); returns the wrong value of a
            weight or None.
    """
    run, told, counts = Executor.run, io.StringIO(), {}

    def spoiled(self, batches, step, **others):
        counts[step] = counts.get(step, 0) + 1
        value = spoils(rank, step, counts[step])
        weights = next(iter(self.stages.values())).parameters.buffer.data
        before = weights[5].clone()
        weights[5] = before if value is None else value
        try:
            return run(self, batches, step, **others)
        finally:
            weights[5] = before

    Executor.run = spoiled
    error = None
    try:
        with contextlib.redirect_stderr(told):
            text = job(rank, world, flags)
    except (UnexpectedResultError, DoubtfulResultError) as caught:
        error, text = caught, ""
    finally:
        Executor.run = run
    losses = [
        line.partition("lm loss:")[2][:14] for line in text.splitlines() if "lm loss:" in line
    ]
    return (
        told.getvalue(),
        None if error is None else (type(error).__name__, str(error), error.status),
        losses,
    )


def test_a_loss_spike_is_told(capfd):
    flags = "--micro-batch-size 1 --global-batch-size 50 --train-iters 4 --check-for-spiky-loss"
    run = Executor.run

    def growing(self, batches, step, **others):
        if step == 3:
            self.stages[0].parameters.buffer.data.mul_(30.0)
        return run(self, batches, step, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "run", growing)
        job(0, 1, flags)
    told = capfd.readouterr().err
    assert (
        "step 4 on rank 0: the loss of micro-batch 0 is " in told
        and "at least 10 times the largest" in told
    )
    assert told.count("at least 10 times") == 1 and "step 3" not in told


@pytest.mark.long
def test_a_trainer_saves_the_last_sound_step(tmp_path):
    run = Executor.run
    runs = []

    def spoiled(self, batches, step, **others):
        result = run(self, batches, step, **others)
        if others.get("training", True) and step == 2:
            runs.append(step)
            if len(runs) == 1:
                losses = self.last.losses
                losses[0] = (losses[0][0], losses[0][1], torch.tensor(math.nan))
        return result

    settings = {
        "max_steps": 4,
        "save_steps": 9,
        "rerun_mode": "validate_results",
        "report_to": "none",
        "use_cpu": True,
    }
    trainer = MerakTrainer(
        tiny_llama(), MerakArguments(str(tmp_path), **settings), collate, samples(32)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "run", spoiled)
        with pytest.raises(
            UnexpectedResultError,
            match=r"rerun_mode validate_results: in step 3, rank 0 .* transient",
        ):
            trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"] and len(
        runs
    ) == 2
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def _transient(rank, step, run):
    return math.nan if (rank, step, run) == (1, 3, 1) else None


def _persistent(rank, step, run):
    return math.nan if (rank, step) == (1, 3) else None


def _everywhere(rank, step, run):
    return math.nan if step == 3 else None


def _never(rank, step, run):
    return None


def _faults(rank, world, directory):
    flags = "--train-iters 6 --log-interval 1 --rerun-mode validate_results"
    ended = [
        _spoiled(rank, world, f"{flags} --save {directory}/{spoils.__name__}", spoils)
        for spoils in (_transient, _persistent, _everywhere)
    ]
    inject = (
        "--train-iters 4 --log-interval 1 --error-injection-rate 1 --rerun-mode validate_results"
    )
    kinds = ("transient_error", "persistent_error", "correct_result")
    injected = [
        _spoiled(rank, world, f"{inject} --error-injection-type {kind}", _never) for kind in kinds
    ]
    plain = _spoiled(rank, world, "--train-iters 4 --log-interval 1", _never)
    twice = _spoiled(
        rank, world, "--train-iters 4 --log-interval 1 --rerun-mode report_stats", _never
    )
    return ended, injected, plain, twice


@pytest.mark.long
def test_a_fault_is_told_from_the_data_and_its_rank_is_named(tmp_path):
    first, second = run_ranks(_faults, 2, tmp_path, timeout=240.0)
    for rank, (ended, injected, plain, twice) in enumerate((first, second)):
        reasons = [error[1] for _, error, _ in ended]
        assert [error[0] for _, error, _ in ended] == ["UnexpectedResultError"] * 3
        assert [error[2] for _, error, _ in ended] == [17] * 3
        assert (
            "in step 4, rank 1 (" in reasons[0]
            and "computed other numbers the second time" in reasons[0]
        )
        assert (
            "rank 1 (" in reasons[1]
            and "rank 0 others from the same micro-batches: a persistent" in reasons[1]
        )
        assert "they are right, and due to the data" in reasons[2] and "the weight " in reasons[2]
        assert (
            "Start the job again" in reasons[0]
            or "start the job again without its host" in reasons[0]
        )
        for spoils in ("_transient", "_persistent", "_everywhere"):
            assert [path.name for path in Path(tmp_path, spoils).glob("iter_*")] == ["iter_0000003"]
        assert [error for _, error, _ in injected] == [None] * 3
        assert [losses for _, _, losses in injected] == [plain[2]] * 3 and twice[2] == plain[2]
        if rank == 0:
            assert "a transient fault" in injected[0][0] and "a persistent fault" in injected[1][0]
            assert "they are right" in injected[2][0] and "the run goes on" in injected[0][0]
            assert "results have differed by at most, relative: loss 0, norm" in twice[0]


def _alone(rank, world, directory):
    flags = f"--train-iters 6 --pipeline-model-parallel-size 2 --rerun-mode validate_results --save {directory}"
    return _spoiled(rank, world, flags, _everywhere), _spoiled(
        rank, world, flags.replace("--save", "--load"), _transient
    )


@pytest.mark.long
def test_without_another_replica_the_job_must_be_started_elsewhere(tmp_path):
    for (_, doubtful, _), (_, transient, _) in run_ranks(_alone, 2, tmp_path, timeout=120.0):
        assert doubtful[0] == "DoubtfulResultError" and doubtful[2] == 16
        assert (
            "no other replica can compute them" in doubtful[1] and "on other devices" in doubtful[1]
        )
        assert (
            "in step 4, rank 1 (" in transient[1]
            and "a transient fault" in transient[1]
            and transient[2] == 17
        )
