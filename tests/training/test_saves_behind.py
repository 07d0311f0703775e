"""--async-save: the checkpoints of a run that waits for them, written while it trains on."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint import full_disk, save
from megatron_merak.checkpoint.directory import directory_of, read_manifest, verify
from megatron_merak.config import HFConfig
from megatron_merak.errors import FullDiskError
from megatron_merak.parallel.interruption import Interrupted
from megatron_merak.training import saves_behind
from megatron_merak.training.trainer import Trainer
from tests.ranks import RankFailure, run_ranks
from tests.training.jobs import job

FLAGS = "--train-iters 4 --save-interval 1 --lr-decay-style constant"
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, ""),
        pytest.param(2, SHARDED, marks=pytest.mark.long),
        pytest.param(2, "--pipeline-model-parallel-size 2 --bf16", marks=pytest.mark.long),
        pytest.param(4, f"--tensor-model-parallel-size 2 {SHARDED}", marks=pytest.mark.long),
    ],
)
def test_they_are_the_checkpoints_of_a_run_that_waits(tmp_path, ranks, flags):
    plain, behind = tmp_path / "plain", tmp_path / "behind"
    run_ranks(job, ranks, f"{FLAGS} {flags} --save {plain}")
    told = run_ranks(job, ranks, f"{FLAGS} {flags} --save {behind} --async-save")[-1]
    assert told.count("beside training, which waited") == 4
    _compare(plain, behind, range(1, 5))
    more = f"{FLAGS} {flags} --train-iters 5 --load {behind} --save {behind} --async-save"
    assert "loaded the checkpoint of iteration 4" in run_ranks(job, ranks, more)[-1]
    verify(directory_of(behind, 5))


def _compare(plain: Path, behind: Path, iterations: range) -> None:
    for iteration in iterations:
        verify(directory_of(behind, iteration))
        one, other = (
            read_manifest(directory_of(place, iteration))[1].tensors for place in (plain, behind)
        )
        assert one == other  # shapes, parts and the digest of every tensor


@pytest.mark.long
def test_a_huggingface_model_too(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(
        tmp_path / "model"
    )
    flags = f"{FLAGS} --model {tmp_path}/model {SHARDED}"
    run_ranks(job, 2, f"{flags} --save {tmp_path}/plain", HFConfig)
    run_ranks(job, 2, f"{flags} --save {tmp_path}/behind --async-save", HFConfig)
    _compare(tmp_path / "plain", tmp_path / "behind", range(1, 5))


def _slow(rank: int, world: int, flags: str) -> tuple[str, list[str]]:
    """A job whose second checkpoint takes as long as its third step and more; what happened, in
    order.
    """
    write, step = saves_behind.write, Trainer.step
    events = []

    def slow(root, iteration, *rest, **settings):
        if iteration == 2:
            end = time.monotonic() + 60
            while "step 3" not in events and time.monotonic() < end:
                time.sleep(0.01)
        path = write(root, iteration, *rest, **settings)
        events.append(f"saved {iteration}")
        return path

    def told(self, batches):
        result = step(self, batches)
        events.append(f"step {self.iteration}")
        return result

    saves_behind.write, Trainer.step = slow, told
    return job(rank, world, flags), events


def test_training_goes_on_while_a_checkpoint_is_written_and_waits_for_the_next(tmp_path):
    flags = f"{FLAGS} --save-interval 2 --save {tmp_path}/run --async-save"
    for _, events in run_ranks(_slow, 2, flags):
        assert events.index("step 3") < events.index("saved 2") < events.index("saved 4")


def test_old_ones_are_removed(tmp_path):
    flags = f"{FLAGS} --save-retain-interval 4 --save {tmp_path}/run --async-save"
    run_ranks(job, 1, flags)
    assert [path.name for path in tmp_path.glob("run/iter_*")] == ["iter_0000004"]


def _stopped(rank: int, world: int, flags: str) -> str:
    """A job that gets a signal in its second step."""
    step = Trainer.step

    def interrupted(self, batches):
        if self.iteration == 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batches)

    Trainer.step = interrupted
    return job(rank, world, flags)


def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path):
    with pytest.raises(RankFailure) as caught:
        run_ranks(_stopped, 2, f"{FLAGS} --save-interval 100 --save {tmp_path}/run --async-save")
    error = caught.value.__cause__
    assert isinstance(error, Interrupted) and error.status == 143
    iteration = max(int(path.name[5:]) for path in tmp_path.glob("run/iter_*"))
    assert iteration in (2, 3)
    verify(directory_of(tmp_path / "run", iteration))


def _robbed(rank: int, world: int, flags: str, place: Path) -> str:
    """A job whose directory is removed while its second checkpoint is written."""
    sync = save.sync_directory
    left = [1]

    def robbed(directory):
        if rank == 0 and directory.name == "iter_0000002.new" and left:
            left.pop()
            shutil.rmtree(place)
        sync(directory)

    save.sync_directory = robbed
    return job(rank, world, flags)


def test_a_directory_that_is_removed_meanwhile_is_made_anew(tmp_path):
    place = tmp_path / "run"
    told = run_ranks(_robbed, 2, f"{FLAGS} --save {place} --async-save", place)[1]
    assert f"{place} was removed under the run, with all checkpoints in it: it is made anew" in told
    assert (place / "config.yaml").is_file()
    assert sorted(path.name[-1] for path in place.glob("iter_*")) == ["2", "3", "4"]


def _failing(rank: int, world: int, flags: str) -> str:
    """A job whose second checkpoint cannot be written by one rank."""
    write = saves_behind.write

    def fails(root, iteration, shards, meta, group, device):
        if iteration == 2 and rank == world - 1:
            shards = {"Not a kind": shards["model"]}
        return write(root, iteration, shards, meta, group, device)

    saves_behind.write = fails
    return job(rank, world, flags)


def test_a_failure_ends_the_run_at_the_next_checkpoint(tmp_path):
    with pytest.raises(RankFailure) as caught:
        run_ranks(_failing, 1, f"{FLAGS} --save {tmp_path}/run --async-save")
    assert "Not a kind" in str(caught.value)
    assert [path.name for path in tmp_path.glob("run/iter_*")] == ["iter_0000001"]


def _failing_rank(rank: int, world: int, flags: str) -> str:
    """A job whose last rank fails in training while the threads of all wait for space."""
    step = Trainer.step
    waits = threading.Event()
    full_disk.FIRST_PAUSE = 0.2

    def full(root, *rest, **settings):
        waits.set()
        raise FullDiskError("directory", root, "no space", "Make some")

    def fails(self, batches):
        if self.iteration == 1 and rank == world - 1:
            assert waits.wait(60)
            raise KeyError("of one rank")
        return step(self, batches)

    saves_behind.write, Trainer.step = full, fails
    return job(rank, world, flags)


@pytest.mark.long
def test_a_rank_that_fails_while_threads_wait_for_space_ends_at_once(tmp_path):
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(_failing_rank, 2, f"{FLAGS} --save {tmp_path}/run --async-save", timeout=100.0)
    assert isinstance(caught.value.__cause__, KeyError) and time.monotonic() - began < 60
    assert "the run ends, and waits for space no longer" in str(caught.value)
