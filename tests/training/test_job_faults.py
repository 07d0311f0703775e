"""Jobs that go wrong lose nothing: numbers that are not finite, damaged checkpoints, a second job,
a dead launcher.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from megatron_merak.checkpoint.lock import DirectoryLock
from megatron_merak.config import HFConfig
from megatron_merak.data.indexed_dataset import IndexedDatasetWriter
from megatron_merak.errors import CheckpointError, DataError, DirectoryLockedError, NumericsError
from megatron_merak.parallel import launch
from megatron_merak.stages.gpt_model import GPTModel
from tests.ranks import RankFailure, run_ranks
from tests.training.jobs import job

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def iterations(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def refused(kind: type[Exception], flags: str, ranks: int = 1) -> str:
    with pytest.raises(RankFailure) as caught:
        run_ranks(job, ranks, flags)
    assert isinstance(caught.value.__cause__, kind), caught.value
    return str(caught.value.__cause__)


def _with_nan(rank: int, world: int, flags: str, first: int) -> str:
    """A job in which one weight gradient is NaN from iteration ``first`` on."""
    backward = GPTModel.backward

    def spoiled(self, batches):
        loss = backward(self, batches)
        if self.iteration >= first:
            self.buffer.grad("transformer.h.1.mlp.c_fc.weight")[0] = math.nan
        return loss

    GPTModel.backward = spoiled
    return job(rank, world, flags)


def test_steps_skipped_in_a_row_end_the_run_and_leave_the_finite_checkpoints(tmp_path):
    flags = (
        f"--train-iters 50 --max-consecutive-skipped-steps 4 --save {tmp_path} --save-interval 2 "
    )
    with pytest.raises(RankFailure) as caught:
        run_ranks(_with_nan, 1, flags + "--save-retain-interval 4", 3)
    assert isinstance(caught.value.__cause__, NumericsError)
    message = str(caught.value.__cause__)
    assert "--max-consecutive-skipped-steps 4: so many steps in a row" in message
    assert "in the order of the backward pass transformer.h.1.mlp.c_fc.weight (1 of" in message
    assert iterations(tmp_path) == [4, 6]
    resumed = run_ranks(job, 1, f"--train-iters 8 --load {tmp_path}")[0]
    assert "loaded the checkpoint of iteration 6" in resumed and "lm loss" in resumed


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    flags = "--train-iters 50 --lr 3e38 --min-lr 3e38 --lr-decay-style constant --clip-grad 0 --weight-decay 10"
    message = refused(
        NumericsError, f"{flags} --save {tmp_path} --save-interval 1 --save-retain-interval 100", 2
    )
    assert "it has values that are not finite" in message
    assert not list(tmp_path.glob("*.new"))


def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 60}
    shape = LlamaConfig(**sizes, num_attention_heads=4).to_dict() | {
        "architectures": ["LlamaForCausalLM"]
    }
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    flags = "--train-iters 8 --lr 3e38 --min-lr 3e38 --lr-decay-style constant --clip-grad 0 --weight-decay 10"
    with pytest.raises(RankFailure) as caught:
        run_ranks(
            job, 1, f"--model {tmp_path}/shape.json {flags} --save-hf {tmp_path}/out", HFConfig
        )
    assert isinstance(caught.value.__cause__, NumericsError), caught.value
    assert list((tmp_path / "out").iterdir()) == []


def _own_data(rank: int, world: int, root: Path, length: int, others: range) -> str:
    """Each rank reads a copy of its own, as on hosts without a shared disk; some documents
    differ.
    """
    own = root / str(rank)
    own.mkdir()
    with IndexedDatasetWriter(own / "data", np.int32) as writer:
        for number in range(40):
            writer.add_document([(number + rank * (number in others)) % 59] * length)
    os.chdir(own)  # where the path, which is the same on all ranks, is another file
    flags = (
        "--tokenizer-type NullTokenizer --vocab-size 59 --data-path data --train-iters 1 --split 1"
    )
    return job(rank, world, f"{flags} --data-cache-path {root}/cache")


def test_ranks_that_read_different_copies_of_the_data_are_refused(tmp_path):
    reasons = {
        "rank 1 reads other train data than rank 0: fingerprint": (20, range(39, 40)),
        # The middle of a large file is in no fingerprint.
        "has other values on rank 1": (1500, range(15, 26)),
    }
    for reason, (length, others) in reasons.items():
        directory = tmp_path / str(length)
        directory.mkdir()
        with pytest.raises(RankFailure) as caught:
            run_ranks(_own_data, 2, directory, length, others)
        assert isinstance(caught.value.__cause__, DataError)
        assert reason in str(caught.value.__cause__)


def test_a_damaged_newest_checkpoint_costs_its_steps_and_not_the_job(tmp_path):
    flags = (
        f"--save {tmp_path}/c --metrics {tmp_path}/m --save-interval 2 --save-retain-interval 4 "
    )
    flags += "--lr-decay-style constant"
    run_ranks(job, 2, f"--train-iters 6 {flags}")
    file = tmp_path / "c" / "iter_0000006" / "exp_avg-rank-00001.safetensors"
    if not file.exists():
        file = next((tmp_path / "c" / "iter_0000006").glob("exp_avg-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told = run_ranks(job, 2, f"--train-iters 8 --load {tmp_path}/c {flags}")[1]
    assert (
        "A damaged checkpoint was passed over, and iteration 4 was loaded" in told
        and str(file) in told
    )
    rows = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    losses = [(row["iteration"], row["loss"]) for row in rows]
    assert [iteration for iteration, _ in losses] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    assert losses[4:6] == losses[6:8]
    assert iterations(tmp_path / "c") == [4, 8]
    told = run_ranks(job, 1, f"--train-iters 5 --load {tmp_path}/c --ckpt-step 4")[0]
    assert "also holds iteration 8, where a resume without --ckpt-step goes on" in told
    flags = f"--train-iters 3 --save-interval 1 --save-retain-interval 100 --load {tmp_path}/c --finetune"
    told = run_ranks(job, 1, f"{flags} --save {tmp_path}/c")[0]
    assert "already holds iteration 8 of an earlier run, where a resume goes on" in told
    assert iterations(tmp_path / "c") == [3, 4, 8]
    data[-1] ^= 2
    (tmp_path / "c" / "iter_0000008" / file.name).write_bytes(data)
    assert "tensor" in refused(
        CheckpointError, f"--train-iters 9 --load {tmp_path}/c --ckpt-step 8"
    )


def test_a_job_does_not_begin_anew_where_its_checkpoints_are_damaged(tmp_path):
    run_ranks(job, 1, f"--train-iters 1 --save {tmp_path}")
    (tmp_path / "iter_0000001" / "manifest.json").unlink()
    assert "it has no manifest.json" in refused(
        CheckpointError, f"--train-iters 2 --load {tmp_path}"
    )


def test_a_second_job_does_not_write_to_the_directory_of_the_first(tmp_path):
    with DirectoryLock(tmp_path):
        message = refused(DirectoryLockedError, f"--train-iters 1 --save {tmp_path}", 2)
    assert (
        f"directory {tmp_path}: on rank 0, another job writes to it: process {os.getpid()} on host"
        in message
    )
    run_ranks(job, 1, f"--train-iters 1 --save {tmp_path}")
    names = ["config.yaml", "iter_0000001", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


RANK = """
import os, sys, time
from megatron_merak.parallel.launch import launch
launch("gloo")
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
time.sleep(100)
"""


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    script, started = tmp_path / "rank.py", tmp_path / "started"
    script.write_text(RANK)
    started.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
        started,
    ]
    torchrun = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 100
        while (
            len(ranks := [int(name) for name in os.listdir(started)]) < 2
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while (left := [rank for rank in ranks if alive(rank)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(ranks) == 2 and not left
    finally:
        torchrun.kill()
        torchrun.wait()
        for rank in filter(alive, map(int, os.listdir(started))):
            os.kill(rank, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_rank_that_torchrun_did_not_start_outlives_its_parent(monkeypatch):
    def never():
        raise AssertionError("it was bound to its parent")

    monkeypatch.setattr(launch, "end_with_launcher", never)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch.launch("gloo") == launch.World(0, 1, torch.device("cpu"))


def _zeros(rank: int, world: int, *layouts: str) -> list[str]:
    flags = "--train-iters 1 --log-num-zeros-in-grad --untie-embeddings-and-output-weights"
    told = [job(rank, world, f"{flags} {layout}") for layout in layouts]
    return [number for text in told for number in re.findall(r"num zeros: (\d+)", text)]


def test_padding_of_the_vocabulary_is_no_zero_of_the_gradient():
    """Rows of tokens that do not occur have no gradient; rows that only padding adds do
    not count.
    """
    first, *alone = run_ranks(_zeros, 1, "--make-vocab-size-divisible-by 1", "")[0]
    layouts = (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--micro-batch-size 1",
    )
    together = run_ranks(_zeros, 2, *layouts)[-1]
    assert int(first) > 0 and alone + together == [first] * 4
