"""--save-increment-interval: any step of a run is recovered from the checkpoint before it, bit for bit."""

import os
import re
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint import full_disk, increment_writer
from megatron_merak.checkpoint.directory import directory_of, read_manifest, verify
from megatron_merak.checkpoint.increments import read_increment, runs_of, verify_increment
from megatron_merak.checkpoint.recoverable import furthest
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.checkpoint.stored import read_stored
from megatron_merak.config import Config, HFConfig, RunConfig
from megatron_merak.errors import CheckpointError, DamagedError, FullDiskError
from megatron_merak.parallel.interruption import Interrupted
from megatron_merak.stages.gpt_model import GPTModel
from megatron_merak.training.job import Job
from megatron_merak.training.trainer import Trainer
from tests.choice import later
from tests.ranks import RankFailure, run_ranks
from tests.small_disk import fill, small_disk
from tests.training.jobs import job

STEPS = 7
FLAGS = f"--train-iters {STEPS} --save-increment-interval 2 --save-interval 5"
ZERO1 = "--use-distributed-optimizer"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
# the first two steps overflow
MIXTURE = """--num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01 --swiglu
    --disable-bias-linear --normalization RMSNorm"""
EP2 = "--expert-model-parallel-size 2"
FP16 = "--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 3"
HALVES = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
COUNTERS = ("iteration", "consumed_samples", "skipped_iterations", "skipped_samples")
SAVED = (*COUNTERS, "optimizer_steps", "loss_scale")


def _every_state(
    rank: int, world: int, flags: str, place: Path, config: type[RunConfig] = Config
) -> str:
    """A job that writes the state behind each of its steps to ``place``, too."""
    step = Job.train_step

    def saved(self, *arguments, **options):
        step(self, *arguments, **options)
        self.trainer.save(place)

    Job.train_step = saved
    return job(rank, world, flags, config)


def _recovered(
    rank: int,
    world: int,
    flags: str,
    steps: Sequence[int],
    place: Path,
    config: type[RunConfig] = Config,
) -> list[str]:
    """Jobs that load one step each and do nothing but write that state to ``place``."""
    Job._train = lambda self, interruption: self.trainer.save(place)
    return [job(rank, world, f"{flags} --ckpt-step {step}", config) for step in steps]


def _state(place: Path, iteration: int) -> dict:
    directory = directory_of(place, iteration)
    manifest = read_manifest(directory)[1]
    state = {name: manifest.meta[name] for name in SAVED}
    for kind, names in manifest.tensors.items():
        for name in names:
            state[f"{kind}/{name}"] = read_stored(directory, manifest, kind, name)
    return state


def _differ(one: dict, other: dict) -> list[str]:
    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if not (
            value.equal(other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        )
    ]


def _check(place: Path, other: Path, steps: Sequence[int]) -> None:
    for step in steps:
        assert not _differ(_state(place, step), _state(other, step)), step


GPTS = [
    pytest.param(1, "", 1, "", id="one rank"),
    pytest.param(2, f"{ZERO1} --bf16", 2, f"{ZERO1} --bf16", id="bf16, ZeRO-1"),
    *(
        later(*values, name=name)
        for name, values in {
            "ZeRO-3, on one rank": (2, ZERO3, 1, ""),
            "fp16 that skips": (2, f"{FP16} --tensor-model-parallel-size 2", 1, FP16),
            "no sharding, on ZeRO-2": (2, "--bf16", 2, f"{ZERO2} --bf16"),
            "ZeRO-2, on tensor parallel": (2, ZERO2, 2, "--tensor-model-parallel-size 2"),
            "stages, on ZeRO-1": (2, "--pipeline-model-parallel-size 2", 2, ZERO1),
            "tied stages": (
                2,
                "--pipeline-model-parallel-size 2 --bf16 --vocab-size 61",
                1,
                "--bf16 --vocab-size 61",
            ),
            "instances": (
                4,
                f"{ZERO1} --num-distributed-optimizer-instances 2 --bf16 --micro-batch-size 1",
                2,
                f"{ZERO3} --bf16 --micro-batch-size 1",
            ),
            "tensor and data parallel, on stages": (
                4,
                f"--tensor-model-parallel-size 2 {ZERO3} --swiglu --normalization RMSNorm",
                2,
                "--pipeline-model-parallel-size 2 --swiglu --normalization RMSNorm",
            ),
            "experts of replicas, on one rank": (2, f"{MIXTURE} {EP2}", 1, MIXTURE),
            "experts of replicas that shard": (
                4,
                f"{MIXTURE} {EP2} {ZERO3} --micro-batch-size 1",
                2,
                f"{MIXTURE} {EP2} {ZERO1} --micro-batch-size 1",
            ),
            "Lion": (2, f"{ZERO1} --optimizer lion", 1, "--optimizer lion"),
            "SGD": (2, f"{ZERO3} --optimizer sgd", 2, "--optimizer sgd"),
            "moments of bf16": (2, f"{ZERO1} --bf16 {HALVES}", 1, f"--bf16 {HALVES}"),
        }.items()
    ),
]


@pytest.mark.parametrize("ranks, flags, then, others", GPTS)
def test_each_step_is_recovered(tmp_path, ranks, flags, then, others):
    run = tmp_path / "run"
    told = run_ranks(_every_state, ranks, f"{FLAGS} {flags} --save {run}", tmp_path / "all")[-1]
    assert "saved increments of 5 steps" in told and "increments of 2 steps" in told
    for path in run.glob("increments_*/*"):
        increment = read_increment(path)
        for each in increment.records:
            assert len(increment.files(each.iteration)) == (0 if each.square is None else ranks)
    loads = f"{FLAGS} {others} --load {run} --save {tmp_path}/other"
    steps = [1, 2, 3, 4, 6]
    told = run_ranks(_recovered, then, loads, steps, tmp_path / "recovered")[-1]
    for text, checkpoint, count, step in (
        (told[0], 0, "1 update", 1),
        (told[3], 0, "4 updates", 4),
        (told[4], 5, "1 update", 6),
    ):
        assert f"repeated {count} from increments in" in text
        assert f"iteration {checkpoint} from {run}, and the steps to iteration {step}" in text
    _check(tmp_path / "all", tmp_path / "recovered", steps)
    if "--fp16" in flags:
        assert _state(tmp_path / "recovered", 4)["skipped_iterations"] == 2


def _with_statistics() -> None:
    """Let the GPT have a buffer that each forward changes, as batch norms have."""

    def running(self) -> list[Shard]:
        if not hasattr(self, "statistics"):
            self.statistics = torch.zeros(3)
        owner = self.mesh.rank == 0
        return [Shard("norm.running_mean", (3,), None, (), self.statistics, owner)]

    def backward(self, batches):
        self.running_state()[0].tensor.add_(torch.arange(3.0))
        return inner(self, batches)

    inner = GPTModel.backward
    GPTModel.running_state = running
    GPTModel.backward = backward


def _every_state_with_statistics(rank: int, world: int, flags: str, place: Path) -> str:
    _with_statistics()
    return _every_state(rank, world, flags, place)


def _recovered_with_statistics(
    rank: int, world: int, flags: str, steps: Sequence[int], place: Path
) -> list[str]:
    _with_statistics()
    return _recovered(rank, world, flags, steps, place)


@pytest.mark.long
def test_what_forwards_change_is_recovered_too(tmp_path):
    flags = f"{FLAGS} {FP16}"
    run_ranks(_every_state_with_statistics, 2, f"{flags} --save {tmp_path}/run", tmp_path / "all")
    loads = f"{flags} --load {tmp_path}/run --save {tmp_path}/other"
    # the second step is skipped, which the forward does not know
    run_ranks(_recovered_with_statistics, 1, loads, [2, 4], tmp_path / "recovered")
    _check(tmp_path / "all", tmp_path / "recovered", [2, 4])
    statistics = _state(tmp_path / "recovered", 2)["model/norm.running_mean"]
    assert statistics.tolist() == [0.0, 2.0, 4.0]


LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, flags, then, others",
    [
        pytest.param(2, f"{ZERO1} --bf16", 1, "--bf16", id="ZeRO-1, on one rank"),
        pytest.param(
            2,
            f"{ZERO3} --tensor-model-parallel-size 1",
            2,
            "--tensor-model-parallel-size 2",
            id="ZeRO-3, on tensor parallel",
            marks=pytest.mark.long,
        ),
        pytest.param(
            4,
            "--tensor-model-parallel-size 2 --context-parallel-size 2 --bf16",
            2,
            "--pipeline-model-parallel-size 2 --bf16",
            id="tensor and context parallel, on stages",
            marks=pytest.mark.long,
        ),
    ],
)
def test_each_step_of_a_huggingface_model_is_recovered(tmp_path, ranks, flags, then, others):
    config = LlamaConfig(**LLAMA, num_attention_heads=4, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = f"--model {tmp_path}/model"
    run = f"{FLAGS} {flags} {model} --save {tmp_path}/run"
    run_ranks(_every_state, ranks, run, tmp_path / "all", HFConfig)
    loads = f"{FLAGS} {others} {model} --load {tmp_path}/run --save {tmp_path}/other"
    steps = [2, 4, 6]
    run_ranks(_recovered, then, loads, steps, tmp_path / "recovered", HFConfig)
    _check(tmp_path / "all", tmp_path / "recovered", steps)


CONSTANT = "--lr-decay-style constant"


def _lose(run: Path, *checkpoints: int) -> None:
    """Remove checkpoints, as if the run had been killed before."""
    for iteration in checkpoints:
        shutil.rmtree(directory_of(run, iteration))


def _copied(run: Path, place: Path) -> Path:
    return shutil.copytree(run, place)


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """A run of seven steps of which the first checkpoint is left, and the states behind all."""
    place = tmp_path_factory.mktemp("increments")
    flags = f"{FLAGS} {CONSTANT} --train-iters 9"
    run_ranks(_every_state, 1, f"{flags} --save {place}/whole", place / "all")
    flags = f"{FLAGS} {CONSTANT}"
    run_ranks(job, 1, f"{flags} --save {place}/run")
    _lose(place / "run", 5, 7)
    return place


def test_a_run_goes_on_from_what_was_recovered(tmp_path, lost):
    run = _copied(lost / "run", tmp_path / "run")
    flags = f"{FLAGS} {CONSTANT} --train-iters 9 --load {run} --save {run}"
    [told] = run_ranks(job, 1, flags)
    assert "loaded the checkpoint of iteration 0" in told and "repeated 7 updates" in told
    assert "increments follow a checkpoint of the state that the run begins with" in told
    _check(lost / "all", run, [7, 9])
    assert len(runs_of(run)) == 2
    _lose(run, 9)
    run_ranks(_recovered, 1, flags, [8], tmp_path / "recovered")
    _check(lost / "all", tmp_path / "recovered", [8])


def _killed(rank: int, world: int, flags: str) -> str:
    """A job that is killed while it computes its seventh step."""
    step = Trainer.step

    def killed(self, batches):
        if self.iteration == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batches)

    Trainer.step = killed
    return job(rank, world, flags)


def test_a_run_that_is_killed_loses_no_more_steps_than_are_written_together(tmp_path):
    run = tmp_path / "run"
    flags = f"{CONSTANT} --train-iters 9 {ZERO1} --bf16 --save-interval 50"
    run_ranks(job, 2, f"{flags} --save {tmp_path}/whole")
    flags += f" --save-increment-interval 2 --save {run} --load {run}"
    with pytest.raises(RankFailure):
        run_ranks(_killed, 2, flags)
    assert furthest(run) in (4, 6)
    told = run_ranks(job, 2, flags)[-1]
    assert "repeated" in told and "and the steps to iteration" in told
    _check(tmp_path / "whole", run, [9])


def test_a_run_follows_a_checkpoint_that_is_there(tmp_path, lost):
    run = _copied(lost / "run", tmp_path / "run")
    flags = f"{FLAGS} {CONSTANT} --load {run} --save {run} --ckpt-step 0 --exit-interval 3"
    [told] = run_ranks(job, 1, flags)
    assert "increments follow" not in told and "also holds iteration 7, where a resume" in told
    assert [path.name for path in sorted(run.glob("iter_*"))] == ["iter_0000000", "iter_0000003"]
    _lose(run, 3)
    assert furthest(run) == 7  # of the other run
    newest = max(runs_of(run), key=os.path.getmtime)
    _copied(newest, tmp_path / "alone" / newest.name)
    _copied(directory_of(run, 0), directory_of(tmp_path / "alone", 0))
    assert furthest(tmp_path / "alone") == 3


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_damage_costs_the_steps_behind_it_and_is_told(tmp_path, lost):
    run = _copied(lost / "run", tmp_path / "run")
    [file] = run.glob("increments_*/*/step_0000004-*")
    _flip(file)
    flags = f"{FLAGS} {CONSTANT} --load {run} --save {tmp_path}/other"
    with pytest.raises(RankFailure) as caught:
        run_ranks(_recovered, 1, flags, [5], tmp_path / "recovered")
    assert isinstance(caught.value.__cause__, DamagedError)
    told = run_ranks(_last, 1, flags, tmp_path / "recovered")[0]
    assert "the state of iteration 3 was loaded" in told and "step_0000004-rank-00000" in told
    assert "repeated 3 updates" in told
    _check(lost / "all", tmp_path / "recovered", [3])


def _last(rank: int, world: int, flags: str, place: Path) -> str:
    """A job that does nothing but write the state that it begins with."""
    Job._train = lambda self, interruption: self.trainer.save(place)
    return job(rank, world, flags)


def test_a_damaged_checkpoint_is_replaced_by_the_steps_to_it(tmp_path, lost):
    run = _copied(lost / "run", tmp_path / "run")
    shutil.copytree(directory_of(lost / "all", 7), directory_of(run, 7))
    _flip(directory_of(run, 7) / "exp_avg-rank-00000.safetensors")
    told = run_ranks(
        _last, 1, f"{FLAGS} {CONSTANT} --load {run} --save {run}", tmp_path / "recovered"
    )[0]
    assert "Something damaged was passed over" in told and "iter_0000007/exp_avg" in told
    assert "repeated 7 updates" in told
    _check(lost / "all", tmp_path / "recovered", [7])


def test_a_run_with_other_settings_repeats_steps_as_they_were(tmp_path, lost):
    given = f"{FLAGS} {CONSTANT} --load {lost}/run --save {tmp_path}/run"
    given += " --clip-grad 0.01 --adam-beta1 0.5 --adam-beta2 0.5 --adam-eps 1e-3 --lr 1e-3"
    run_ranks(_recovered, 1, given, [6], tmp_path / "recovered")
    _check(lost / "all", tmp_path / "recovered", [6])


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--decoupled-lr 1e-3", "--decoupled-lr 0.001: .* other parameter groups"),
        ("--bf16", "precision bfloat16: .* iteration 0 were made with float32"),
        (HALVES, "--exp-avg-dtype bf16: .* iteration 0 were made with fp32"),
        ("--finetune", "no complete checkpoint of iteration 6"),
        ("--no-load-optim", "no complete checkpoint of iteration 6"),
    ],
)
def test_a_run_that_would_repeat_steps_otherwise_is_refused(tmp_path, lost, flags, text):
    given = f"{FLAGS} {CONSTANT} --load {lost}/run --save {tmp_path}/run --ckpt-step 6 {flags}"
    with pytest.raises(RankFailure) as caught:
        run_ranks(job, 1, given)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert re.search(text, str(caught.value.__cause__))


def test_steps_are_not_repeated_with_other_settings_that_an_optimizer_was_made_with(tmp_path):
    given = "--train-iters 3 --optimizer sgd --save-interval 50 --save-increment-interval 1"
    run_ranks(job, 1, f"{given} --save {tmp_path}/run")
    again = f"{given} --load {tmp_path}/run --save {tmp_path}/run --ckpt-step 2"
    with pytest.raises(RankFailure) as caught:
        run_ranks(job, 1, f"{again} --sgd-momentum 0.5")
    assert "--sgd-momentum 0.5: the steps behind iteration 0 were made with 0.9" in str(
        caught.value
    )


def test_they_go_with_old_checkpoints_and_beside_saves_that_are_not_waited_for(tmp_path):
    run = tmp_path / "run"
    flags = "--train-iters 8 --save-increment-interval 2 --save-interval 3 --async-save"
    [told] = run_ranks(job, 1, f"{flags} --save-retain-interval 6 --save {run}")
    assert told.count("beside training, which waited") == 4
    assert [path.name[-1] for path in sorted(run.glob("iter_*"))] == ["0", "6", "8"]
    assert not [*run.glob("increments_*/*")]


def _stopped(rank: int, world: int, flags: str) -> str:
    """A job that gets a signal in its fourth step."""
    step = Trainer.step

    def interrupted(self, batches):
        if self.iteration == 3 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    Trainer.step = interrupted
    return job(rank, world, flags)


def test_a_signal_ends_the_run_with_a_checkpoint_and_the_steps_to_it(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RankFailure) as caught:
        run_ranks(
            _stopped, 2, f"{FLAGS} --save-interval 50 --save-increment-interval 9 --save {run}"
        )
    assert isinstance(caught.value.__cause__, Interrupted)
    last = max(int(path.name[5:]) for path in run.glob("iter_*"))
    assert last in (4, 5)
    verify(directory_of(run, last))
    [steps] = run.glob("increments_*/*")
    verify_increment(steps)
    _lose(run, last)
    assert furthest(run) == last


def _robbed(rank: int, world: int, flags: str, place: Path) -> str:
    """A job whose directory is removed while its third step is written."""
    write = increment_writer.write_file

    def robbed(fresh, file, *rest):
        if file.startswith("step_0000003-rank-00000"):
            shutil.rmtree(place)
        return write(fresh, file, *rest)

    increment_writer.write_file = robbed
    return job(rank, world, flags)


def test_a_directory_that_is_removed_has_increments_from_the_next_checkpoint_on(tmp_path):
    run = tmp_path / "run"
    told = run_ranks(_robbed, 2, f"{FLAGS} {CONSTANT} --save {run}", run)[-1]
    assert "there are no increments until the next checkpoint" in told
    assert [path.name[-1] for path in sorted(run.glob("iter_*"))] == ["5", "7"]
    assert [path.name[-1] for path in run.glob("increments_*/*")] == ["6"]


def _disturbed(rank: int, world: int, flags: str, event: str, place: Path) -> str:
    """A job whose disk is full when it writes its third step."""
    full_disk.FIRST_PAUSE = 0.3
    write = increment_writer.write_file
    ballast = []

    def full(fresh, file, *rest):
        if file.startswith("step_0000003-rank-00000") and not ballast:
            ballast.append(fill(place))
            if event == "room":
                threading.Timer(2.0, ballast[0].unlink).start()
            if event == "signal":
                threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        return write(fresh, file, *rest)

    increment_writer.write_file = full
    return job(rank, world, flags)


@pytest.mark.long
@pytest.mark.parametrize("event", ["room", "stop", "signal"])
def test_a_full_disk(tmp_path, event):
    with small_disk(tmp_path / "small", 8) as place:
        flags = f"{FLAGS} --save {place}/run --on-full-disk {'stop' if event == 'stop' else 'wait'}"
        if event == "room":
            told = run_ranks(_disturbed, 2, flags, event, place)[-1]
            assert "there is space again: saved after a wait of" in told
            assert furthest(place / "run") == STEPS
            _lose(place / "run", 5, 7)
            assert furthest(place / "run") == STEPS
            return
        with pytest.raises(RankFailure) as caught:
            run_ranks(_disturbed, 2, flags, event, place)
        kind = FullDiskError if event == "stop" else Interrupted
        assert isinstance(caught.value.__cause__, kind)
        assert furthest(place / "run") == 2
