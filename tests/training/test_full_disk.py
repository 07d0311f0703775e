"""Whole jobs on a full disk, and with a directory that somebody removes under them: no step is
lost.
"""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint import full_disk
from megatron_merak.config import HFConfig
from megatron_merak.errors import FullDiskError
from megatron_merak.parallel.interruption import Interrupted
from megatron_merak.training.job import Job
from tests.ranks import RankFailure, run_ranks
from tests.small_disk import fill, small_disk
from tests.training.jobs import job

pytestmark = pytest.mark.long

FLAGS = (
    "--train-iters 4 --save-interval 2 --lr-decay-style constant --pipeline-model-parallel-size 2"
)


@pytest.fixture
def small(tmp_path):
    with small_disk(tmp_path / "small", 8) as place:
        yield place


@pytest.fixture(params=["", "--async-save"])
def flags(request):
    return f"{FLAGS} {request.param}"


def _disturbed(rank: int, world: int, flags: str, event: str, place: Path) -> str:
    """A job to which something happens before it saves iteration 4."""
    save = Job.save
    full_disk.FIRST_PAUSE = 0.3

    def spoiled(self):
        if self.trainer.iteration == 4:
            if self.saves_behind is not None:
                self.saves_behind.behind.finish()
            if rank == 0:
                if event == "removed":
                    shutil.rmtree(place)
                else:
                    ballast = fill(place.parent)
                if event == "room":
                    threading.Timer(2.0, ballast.unlink).start()
            if event == "signal" and rank == 1:
                threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            dist.barrier()
        return save(self)

    Job.save = spoiled
    return job(rank, world, flags)


def _weights(place: Path, iteration: int) -> dict:
    files = sorted((place / f"iter_{iteration:07d}").glob("model-*.safetensors"))
    return {(file.name, name): value for file in files for name, value in load_file(file).items()}


def _equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_a_job_waits_for_space(small, tmp_path, flags):
    run_ranks(job, 2, f"{FLAGS} --save {tmp_path}/whole")
    place = small / "run"
    told = run_ranks(
        _disturbed, 2, f"{flags} --save {place} --metrics {small}/metrics", "room", place
    )[1]
    assert (
        "Nothing is lost yet: the run waits for space" in told and "(--on-full-disk wait)" in told
    )
    assert "there is space again: saved after a wait of" in told
    assert _equal(_weights(place, 4), _weights(tmp_path / "whole", 4))


def test_a_job_that_does_not_wait_ends_with_what_was_missing(small, flags):
    place = small / "run"
    with pytest.raises(RankFailure) as caught:
        run_ranks(_disturbed, 2, f"{flags} --save {place} --on-full-disk stop", "full", place)
    assert isinstance(caught.value.__cause__, FullDiskError)
    assert "bytes are needed and" in str(caught.value.__cause__)
    assert _weights(place, 2) and not list(place.glob("*.new"))


def test_a_signal_ends_the_wait(small, flags):
    place = small / "run"
    with pytest.raises(RankFailure) as caught:
        run_ranks(_disturbed, 2, f"{flags} --save {place}", "signal", place)
    error = caught.value.__cause__
    assert isinstance(error, Interrupted) and error.status == 143
    assert "interrupted by SIGTERM while it waited for space, so nothing was saved" in error.text
    assert _weights(place, 2)


def test_a_removed_directory_is_made_anew(tmp_path, flags):
    place = tmp_path / "run"
    run_ranks(job, 2, f"{FLAGS} --save {tmp_path}/whole")
    told = run_ranks(_disturbed, 2, f"{flags} --save {place}", "removed", place)[1]
    assert f"{place} was removed under the run, with all checkpoints in it: it is made anew" in told
    assert _equal(_weights(place, 4), _weights(tmp_path / "whole", 4))
    assert (place / "config.yaml").is_file()
    assert (
        "loaded the checkpoint of iteration 4"
        in run_ranks(job, 2, f"{flags} --load {place} --save {place}")[1]
    )


def _exported(rank: int, world: int, flags: str, small: Path) -> str:
    """A job of a HuggingFace model whose disk is full when it writes the model at the end."""
    finish = Job.close
    full_disk.FIRST_PAUSE = 0.3

    def spoiled(self):
        if rank == 0:
            threading.Timer(2.0, fill(small).unlink).start()
        dist.barrier()
        finish(self)

    Job.close = spoiled
    return job(rank, world, flags, HFConfig)


def test_the_model_at_the_end_waits_for_space(small, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(
        tmp_path / "model"
    )
    flags = f"--model {tmp_path}/model --train-iters 1 --save-hf {small}/out --pipeline-model-parallel-size 2"
    told = run_ranks(_exported, 2, flags, small)[1]
    assert "output directory" in told and "there is space again: saved after a wait of" in told
    LlamaForCausalLM.from_pretrained(small / "out")
