"""A full disk loses nothing: a save waits for space, or ends with an error that names bytes and
place.
"""

import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatron_merak.checkpoint import full_disk
from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.checkpoint.full_disk import Saving
from megatron_merak.checkpoint.lock import DirectoryLock
from megatron_merak.checkpoint.store import Shard, latest, load, save
from megatron_merak.errors import CheckpointError, DirectoryLockedError, FullDiskError
from megatron_merak.parallel.interruption import Interrupted
from tests.ranks import run_ranks
from tests.small_disk import fill, small_disk


@pytest.fixture
def small(tmp_path):
    with small_disk(tmp_path / "small", 4) as place:
        yield place


def _shards(value: float, rank: int = 0, world: int = 1) -> dict:
    rows = 128 // world
    spans = ((rank * rows, rank * rows + rows),)
    return {"model": [Shard("w", (128, 1024), 0, spans, torch.full((rows, 1024), value))]}


def _wait(rank: int, world: int, small: Path, case: str) -> tuple[str, list[str]]:
    """Save twice, the second time on a full disk."""
    group = dist.group.WORLD
    told: list[str] = []
    received = {"number": 0}
    full_disk.FIRST_PAUSE, full_disk.INTERVAL = 0.3, 0.5
    save(small, 1, _shards(1.0, rank, world), {}, group, "cpu")
    if rank == 0:
        ballast = fill(small)
        if case == "room":
            threading.Timer(2.5, ballast.unlink).start()
    if rank == world - 1 and case == "signal":
        threading.Timer(1.0, lambda: received.update(number=signal.SIGTERM)).start()
    dist.barrier()
    patience = 1.5 if case == "patience" else 60.0
    policy = "stop" if case == "stop" else "wait"
    saving = Saving(policy, group, told.append, lambda: received["number"], patience=patience)
    if rank == world - 1 and case == "gave up":
        threading.Timer(1.0, saving.give_up).start()
    try:
        saving.run(small, lambda: save(small, 2, _shards(2.0, rank, world), {}, group, "cpu"))
    except (FullDiskError, Interrupted) as error:
        return (
            f"{type(error).__name__} {error.text if isinstance(error, Interrupted) else error}",
            told,
        )
    return "saved", told


def test_a_save_waits_for_space_and_all_ranks_agree(small):
    for outcome, told in run_ranks(_wait, 2, small, "room"):
        assert outcome == "saved"
        first, *still, last = told
        assert f"checkpoint directory {small}: on rank 0, 1,572,864 bytes are needed and " in first
        assert (
            "Nothing is lost yet: the run waits for space" in first
            and "--on-full-disk wait" in first
        )
        assert still and all(
            line.startswith("the run still waits for space, for ") for line in still
        )
        assert last.startswith("there is space again: saved after a wait of ")
    shards = _shards(0.0)
    load(small, shards, None, "cpu", 2)
    assert (shards["model"][0].tensor == 2.0).all()


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "stop",
            "FullDiskError checkpoint directory .*: on rank 0, 1,572,864 bytes are needed and [0-9,]+ are free",
        ),
        (
            "patience",
            "FullDiskError checkpoint directory .* are free; the run waited for space for 2 s",
        ),
        (
            "gave up",
            "FullDiskError checkpoint directory .* are free; the run ends, and waits for space no longer",
        ),
        (
            "signal",
            "Interrupted interrupted by SIGTERM while it waited for space, so nothing was saved: checkpoint dir",
        ),
    ],
)
def test_a_save_that_does_not_wait_longer_leaves_the_checkpoint_before(case, told, small):
    outcomes = run_ranks(_wait, 2, small, case)
    for outcome, _ in outcomes:
        assert re.match(told, outcome), outcome
    (small / "ballast").unlink()
    assert latest(small) == 1 and not list(small.glob("*.new"))
    load(small, _shards(0.0), None, "cpu", 1)


def test_whatever_writes_into_a_full_disk_says_how_much_is_free(small):
    fill(small)
    words = Tokenizer(WordLevel({str(number): number for number in range(1000)}, unk_token="0"))
    writes = {
        "open": lambda: (small / "a").write_bytes(bytes(1 << 16)),
        "safetensors": lambda: save_file({"x": torch.zeros(1 << 16)}, small / "b"),
        "tokenizers": lambda: words.save(str(small / "c")),
    }
    for name, write in writes.items():
        with pytest.raises(FullDiskError) as caught, disk_errors(small, "Make room", 1 << 16):
            write()
        text = str(caught.value)
        assert "No space left on device" in text, name
        assert text.endswith("(65,536 bytes are needed, 0 bytes are free). Make room."), text


def test_a_directory_that_was_removed_is_made_anew_and_locked_again(tmp_path):
    root = tmp_path / "run"
    with DirectoryLock(root) as lock:
        assert not lock.confirm()
        shutil.rmtree(root)
        assert lock.confirm() and not lock.confirm()
        with pytest.raises(DirectoryLockedError):
            _take_elsewhere(root)
    assert not list(root.iterdir())


def _take_elsewhere(root: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            DirectoryLock(root)
        except DirectoryLockedError:
            os.write(write, b"locked")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    if os.read(read, 6) == b"locked":
        raise DirectoryLockedError("directory", root, "locked", "")


def test_a_directory_that_is_removed_while_it_is_written_is_written_again_once(tmp_path):
    root = tmp_path / "run"
    attempts = []

    def write(removals: int) -> str:
        root.mkdir(exist_ok=True)
        attempts.append(time.monotonic())
        if len(attempts) <= removals:
            shutil.rmtree(root)
        with disk_errors(root, "Look"):
            (root / "file").write_text("x")
        return "written"

    saving = Saving("wait", None, print)
    assert saving.run(root, lambda: write(1)) == "written" and len(attempts) == 2
    attempts.clear()
    with pytest.raises(CheckpointError, match="No such file or directory"):
        saving.run(root, lambda: write(5))
    assert len(attempts) == 2
