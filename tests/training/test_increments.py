"""--save-increment-interval: any step of a run is recovered from the checkpoint before it, bit for bit."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_merak.checkpoint.directory import directory_of, read_manifest
from megatron_merak.checkpoint.stored import read_stored
from megatron_merak.config import Config, RunConfig
from megatron_merak.training.job import Job
from tests.ranks import run_ranks
from tests.training.jobs import job

STEPS = 7
FLAGS = f"--train-iters {STEPS} --save-increment-interval 2 --save-interval 5"
ZERO1 = "--use-distributed-optimizer"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params"
# the first two steps overflow
FP16 = "--fp16 --initial-loss-scale 1e38 --hysteresis 1 --loss-scale-window 3"
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


NATIVE = [
    pytest.param(1, "", 1, "", id="one rank"),
    pytest.param(2, f"{ZERO1} --bf16", 2, f"{ZERO1} --bf16", id="bf16, ZeRO-1"),
    pytest.param(2, ZERO3, 1, "", id="ZeRO-3, on one rank"),
    pytest.param(2, f"{FP16} --tensor-model-parallel-size 2", 1, FP16, id="fp16 that skips"),
    *(
        pytest.param(*values, marks=pytest.mark.long, id=name)
        for name, values in {
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
            "Lion": (2, f"{ZERO1} --optimizer lion", 1, "--optimizer lion"),
            "SGD": (2, f"{ZERO3} --optimizer sgd", 2, "--optimizer sgd"),
        }.items()
    ),
]


@pytest.mark.parametrize("ranks, flags, then, others", NATIVE)
def test_each_step_is_recovered(tmp_path, ranks, flags, then, others):
    run = tmp_path / "run"
    told = run_ranks(_every_state, ranks, f"{FLAGS} {flags} --save {run}", tmp_path / "all")[-1]
    assert "increments of 5 steps" in told and "increments of 2 steps" in told
    loads = f"{FLAGS} {others} --load {run} --save {tmp_path}/other"
    steps = [1, 2, 3, 4, 6]
    told = run_ranks(_recovered, then, loads, steps, tmp_path / "recovered")[-1]
    assert "iteration 0 from" in told[0] and "repeated 1 update from increments" in told[0]
    assert "iteration 0 from" in told[3] and "repeated 4 updates from increments" in told[3]
    assert "iteration 5 from" in told[4] and "repeated 1 update from increments" in told[4]
    _check(tmp_path / "all", tmp_path / "recovered", steps)
    if "--fp16" in flags:
        assert _state(tmp_path / "recovered", 4)["skipped_iterations"] > 0
