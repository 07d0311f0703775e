"""Everything that writes what a later run reads, each as a value over an older one."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron_merak import durable
from megatron_merak.checkpoint import in_place, store
from megatron_merak.checkpoint.directories import Directories
from megatron_merak.checkpoint.directory import (
    TRACKER,
    Iterations,
    directory_of,
    iteration_of,
    read_manifest,
)
from megatron_merak.checkpoint.foreign import FORMAT
from megatron_merak.checkpoint.hf_files import INDEX, WEIGHTS
from megatron_merak.checkpoint.hf_save import save_hf
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.checkpoint.unit_directories import Units
from megatron_merak.data.files import atomic_writer
from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_merak.data.unfinished import Unfinished
from megatron_merak.errors import CheckpointError, DataError
from megatron_merak.formats.dcp_files import DcpFiles, DcpTensor, StoredChunk, write_dcp
from megatron_merak.formats.megatron_directory import replaced_checkpoint
from megatron_merak.hf_trainer.run.run_directory import RunDirectory, verify, write_text
from megatron_merak.parameter_server.layout import PieceLayout
from megatron_merak.parameter_server.piece import ServedPiece
from megatron_merak.parameter_server.snapshot import read_snapshot, snapshot_path, write_snapshot
from megatron_merak.report.run_files import RunFiles, starts_before
from megatron_merak.strict_json import parse
from megatron_merak.training.settings_file import NAME, store_settings
from tests.checkpoint import step_runs
from tests.config import make


@dataclass(frozen=True)
class Writer:
    """Something that writes a value over an older one.

    write:     of (directory, value).
    read:      returns the value in a directory, None for none; fails for a mixture.
    may_lack:  whether there may be none between the old and the new.
    repeats:   parts of paths that are synced again later, since parts of what is written keep the
               order by themselves.
    """

    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]
    may_lack: bool = False
    repeats: tuple[str, ...] = ()

    @property
    def has_old(self) -> bool:
        """Whether the old is there until the new is."""
        return not self.may_lack


LEFT = ("fresh", "old", "two")
AGAIN = (("checkpoint again", Iterations), ("unit again", Units))


def leave(root: Path, name: str, kind: type[Directories], left: str) -> None:
    """Leave what a kill leaves of the directory 5 that a writer wrote: under the name of a fresh one,
    of an old one, or under two.
    """
    WRITERS[name].write(root, 1)
    names = kind(root).names(5)
    if left == "two":
        shutil.copytree(names.plain, names.fresh)
    else:
        os.rename(names.plain, getattr(names, left))


def shards_of(value: int) -> dict[str, list[Shard]]:
    kinds = ("model", "exp_avg")
    return {kind: [Shard("w", (3, 4), None, (), torch.full((3, 4), value * 1.0))] for kind in kinds}


def _save(root: Path, iteration: int, value: int) -> None:
    meta = {"value": value}
    store.save(root, iteration, shards_of(value), meta, group=None, device="cpu")


def _save_and_prune(root: Path, value: int) -> None:
    _save(root, value, value)
    store.prune(root, 100)


def _read_checkpoint(root: Path) -> int | None:
    """What counts as complete must load."""
    faults: list[CheckpointError] = []
    values = []
    for path in Iterations(root).candidates(faults):
        shards = shards_of(-1)
        meta = store.load(root, shards, None, "cpu", iteration_of(path))
        assert all((parts[0].tensor == meta["value"]).all() for parts in shards.values()), "torn"
        values.append(meta["value"])
    assert not faults
    return values[0] if values else None


def _write_step(root: Path, value: int) -> None:
    """The first step is a checkpoint."""
    if value == 1:
        step_runs.checkpoint(root, 1)
        return
    base = (1, read_manifest(directory_of(root, 1))[1].save_id)
    step_runs.write_steps(step_runs.writer(root, base), [value])


def _write_step_and_prune(root: Path, value: int) -> None:
    """A checkpoint behind each step, which makes the step superfluous."""
    name = f"{value:016x}"
    if value > 1:
        base = (value - 1, read_manifest(directory_of(root, value - 1))[1].save_id)
        step_runs.write_steps(step_runs.writer(root, base, name), [value])
    step_runs.checkpoint(root, value, name)
    store.prune(root, 100)
    assert not [*root.glob("increments_*/steps_*")]


def _read_step(root: Path) -> int | None:
    if not (root.is_dir() and any(root.glob("iter_*"))):
        return None
    try:
        checkpoint, last, told = step_runs.best(root)
    except CheckpointError as error:
        assert "no complete checkpoint" in str(error)
        return None
    assert not told
    shards = {"model": [Shard("w", step_runs.SHAPE, None, (), torch.zeros(step_runs.SHAPE))]}
    store.load(root, shards, None, "cpu", checkpoint)
    return last


def _model(value: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _save_hf(root: Path, value: int) -> None:
    """One file for an even value, else two and an index."""
    model = _model(value)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shards = [Shard(name, tuple(t.shape), None, (), t) for name, t in tensors.items()]
    save_hf(root / "model", model, shards, max_shard_size=10_000 if value % 2 == 0 else 300)


def _read_hf(root: Path) -> int | None:
    directory = root / "model"
    names = {path.name for path in directory.glob("*.safetensors*") if path.exists()}
    if not names:
        return None
    if names.isdisjoint({WEIGHTS, WEIGHTS + INDEX}):
        return None
    if WEIGHTS in names:
        assert WEIGHTS + INDEX not in names
        names = {WEIGHTS}  # which is what programs open, whatever is beside it
    else:
        files = parse((directory / (WEIGHTS + INDEX)).read_text())["weight_map"].values()
        assert names == {WEIGHTS + INDEX, *files}
    tensors = {}
    for name in names - {WEIGHTS + INDEX}:
        tensors |= load_file(directory / name)
    assert tensors.keys() == dict(_model(0).named_parameters()).keys()
    values = {value for tensor in tensors.values() for value in tensor.flatten().tolist()}
    assert len(values) == 1, f"torn: {values}"
    return int(values.pop())


def _save_hf_without_links(root: Path, value: int) -> None:
    def refuse(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse)
        _save_hf(root, value)


IN_PLACE = ("config.json", "code/deep/code.py")


def _write_in_place(root: Path, value: int) -> None:
    fresh = in_place.begin(root / "model")
    for name in IN_PLACE:
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_text(str(value))
    in_place.publish(root / "model")


def _read_in_place(root: Path) -> int | None:
    paths = [root / "model" / name for name in IN_PLACE]
    values = {int(path.read_text()) if path.exists() else None for path in paths}
    assert len(values) == 1, f"torn: {values}"
    return values.pop()


def _write_unit(root: Path, step: int, value: int) -> RunDirectory:
    """A unit, and a note of somebody else's in the one before it."""
    directory = RunDirectory(str(root), None)
    before = next(directory.units.newest_first(), None)
    if before is not None and not any(root.rglob(f"note-{value - 1}*")):
        note = before / f"note-{value - 1}"
        note.write_text("mine")
        durable.sync_file(note)
        durable.sync_directory(before)
    with directory.writing(step) as fresh:
        (fresh / "sub").mkdir()
        (fresh / "sub" / "config.json").write_text(str(value))
        write_text(fresh, "state.json", str(value), None)
        _save(fresh / "training_state", 1, value)
    return directory


def _replace_unit(root: Path, value: int) -> None:
    _write_unit(root, 5, value).release()


def _rotate_units(root: Path, value: int) -> None:
    directory = _write_unit(root, 10 + value, value)
    directory.rotate(1, 10 + value, None)
    directory.release()


def _read_unit(root: Path) -> int | None:
    faults: list[CheckpointError] = []
    newest = None
    for path in Units(root).candidates(faults):
        verify(path, None)
        values = {int((path / name).read_text()) for name in ("sub/config.json", "state.json")}
        values.add(_read_checkpoint(path / "training_state"))
        assert len(values) == 1, f"torn: {values}"
        newest = newest or values.pop()
    assert not faults
    value = newest or 0
    notes = {note.name.partition(".")[0] for note in root.rglob("note-*")}
    written = {f"note-{earlier}" for earlier in range(1, value)}
    assert notes >= written, "a file of somebody else's is lost"
    return newest


LAYOUT = PieceLayout(
    30,
    "float32",
    ((0, 30, 0),),
    ((0, 30),),
    copies=(),
    betas=(0.9, 0.99),
    eps=1e-8,
    workers=1,
    sync=True,
    max_staleness=0,
)


def _write_snapshot(root: Path, value: int) -> None:
    piece = ServedPiece(LAYOUT)
    for tensor in piece.state.values():
        tensor.fill_(value)
    piece.version = value
    write_snapshot(snapshot_path(root / "servers", 1, 0), piece, {0: value}, "this job")


def _read_snapshot(root: Path) -> int | None:
    path = snapshot_path(root / "servers", 1, 0)
    if not path.exists():
        return None
    piece, _ = read_snapshot(path, LAYOUT, "this job")
    assert all((tensor == piece.version).all() for tensor in piece.state.values()), "torn"
    return piece.version


def _write_run(root: Path, value: int) -> None:
    plan = SimpleNamespace(to_json=lambda: "{}\n")
    RunFiles(root / "run", {"value": value}, plan).close()


def _read_run(root: Path) -> int | None:
    starts = starts_before(root / "run")
    return starts[-1]["value"] if starts else None


def _write_settings(root: Path, value: int) -> None:
    durable.make_directory(root)
    store_settings(make(train={"train_iters": value}), str(root))


def _read_settings(root: Path) -> int | None:
    path = root / NAME
    return int(path.read_text().partition("train_iters: ")[2].split()[0]) if path.exists() else None


def _write_store(root: Path, value: int) -> None:
    """A store of torch.distributed.checkpoint in a Megatron-LM directory."""
    chunk = StoredChunk((0,), (2,))
    whole = DcpTensor((2,), torch.float32, (chunk,))
    with replaced_checkpoint(root, 5) as (fresh, _):
        write_dcp(fresh, {"w": whole}, lambda *of: torch.full((2,), value * 1.0), {})
        with durable.replaced(fresh / FORMAT) as file:
            file.write(b"{}")


def _read_store(root: Path) -> int | None:
    directory = root / "iter_0000005"
    if not (directory / FORMAT).exists():
        assert not (root / TRACKER).exists()
        return None
    return int(DcpFiles(directory, allow_pickle=True).read("w")[0])


def _write_file(root: Path, value: int) -> None:
    durable.make_directory(root)
    with atomic_writer(root / "file") as file:
        file.write(str(value).encode())


def _read_file(root: Path) -> int | None:
    return int((root / "file").read_bytes()) if (root / "file").exists() else None


def _write_dataset(root: Path, value: int) -> None:
    with IndexedDatasetWriter(root / "data", np.int32) as writer:
        for length in range(1, 3 + value % 2):  # longer and shorter in turn
            writer.add_document([value] * length)


def _preprocess(root: Path, value: int) -> None:
    """What a run of preprocessing writes, sealed once in its middle."""
    durable.make_directory(root)
    work = Unfinished(str(root / "data"), [str(root / "data")], np.dtype("int32"), {"of": value})
    work.open(overwrite=True)
    for length in range(1, 3 + value % 2):
        work.add(0, np.full(length, value), np.array([length]))
        work.progress.documents += 1
        work.seal()
    work.publish()


def _read_dataset(root: Path) -> int | None:
    try:
        data = IndexedDataset(root / "data")
    except DataError:
        return None
    tokens = np.concatenate([data[number] for number in range(len(data))])
    assert len(data) == 2 + tokens[0] % 2 and len(set(tokens.tolist())) == 1, "torn"
    return int(tokens[0])


WRITERS = {
    "checkpoint": Writer(lambda root, value: _save(root, value, value), _read_checkpoint),
    "checkpoint again": Writer(lambda root, value: _save(root, 5, value), _read_checkpoint),
    "checkpoint, pruned": Writer(_save_and_prune, _read_checkpoint),
    "increment": Writer(_write_step, _read_step),
    "increment, pruned": Writer(_write_step_and_prune, _read_step),
    "HuggingFace directory": Writer(_save_hf, _read_hf, repeats=("/new/model",)),
    "HuggingFace, no links": Writer(
        _save_hf_without_links, _read_hf, may_lack=True, repeats=("/new/model", "run/model")
    ),
    "files in place": Writer(_write_in_place, _read_in_place, repeats=("run/model",)),
    "unit again": Writer(_replace_unit, _read_unit, repeats=(".new", "run/checkpoint-5")),
    "units, rotated": Writer(_rotate_units, _read_unit, repeats=(".new",)),
    "snapshot": Writer(_write_snapshot, _read_snapshot),
    "run directory": Writer(_write_run, _read_run, repeats=("run/run",)),
    "settings": Writer(_write_settings, _read_settings),
    "Megatron-LM directory": Writer(_write_store, _read_store, repeats=("/new",)),
    "data file": Writer(_write_file, _read_file),
    "preprocessing": Writer(_preprocess, _read_dataset, may_lack=True, repeats=(".unfinished",)),
    "data set": Writer(_write_dataset, _read_dataset, may_lack=True),
}
