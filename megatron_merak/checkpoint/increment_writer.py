"""Writing increments: a file per rank and step, then the manifest over some steps, which makes them durable."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.checkpoint.increments import (
    META,
    Increments,
    Layout,
    StepRecord,
    directory_of_run,
    kind_of,
)
from megatron_merak.checkpoint.save import SAVE_REMEDY, complete, write_file
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.durable import sync_directory
from megatron_merak.errors import CheckpointError
from megatron_merak.parallel.agree import broadcast_json, gather_json, together


class IncrementWriter:
    """Writes the steps of one run. Collective over ``group``; a failed call may be repeated.

    root:   has the checkpoints.
    run:    the name of the run, equal on every rank.
    base:   iteration and save_id of the checkpoint that the run began at.
    layout: where tensors are among what this rank writes.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        base: tuple[int, str],
        layout: Layout,
        group: dist.ProcessGroup | None,
    ):
        self.root = root
        self.run = run
        self.base = base
        self._group = group
        self._rank = 0 if group is None else dist.get_rank(group)
        self._increments = Increments(directory_of_run(root, run))
        self._layout = {}
        for name, placed in layout.items():
            self._layout[name] = [dataclasses.asdict(each) for each in placed]
        self._first: int | None = None  # of the steps that are not sealed
        self._files: dict[str, Any] = {}
        self._tensors: dict[str, dict[str, Any]] = {}

    def write_step(self, iteration: int, shards: Sequence[Shard]) -> None:
        """Write what this rank has of a step: its part of the gradient, unless it was skipped, and
        what else is in no update.

        Raises `CheckpointError` on every rank.
        """
        first = iteration if self._first is None else self._first
        kind = kind_of(iteration)
        fresh = self._increments.names(first).fresh
        needed = sum(shard.tensor.nbytes for shard in shards)
        if self._first is None:
            counted = sum(gather_json(needed, self._group, "cpu"))
            with together(self._group, "cpu"), disk_errors(fresh, SAVE_REMEDY):
                if self._rank == 0:
                    self._begin(first, counted)
        file = f"{kind}-rank-{self._rank:05d}.safetensors"
        with together(self._group, "cpu"), disk_errors(fresh, SAVE_REMEDY, needed):
            if not fresh.is_dir():
                reason = "it was removed while it was written, or not all hosts share it"
                raise CheckpointError("increment", fresh, reason, SAVE_REMEDY)
            metadata = {"format": "pt", "save_id": self._save_id(first)}
            metadata["iteration"] = str(iteration)
            files, entries = write_file(fresh, file, kind, shards, metadata)
        self._files |= files
        if entries:
            self._tensors[kind] = entries
        self._first = first

    def seal(self, records: Sequence[StepRecord], meta: Mapping[str, Any]) -> Path:
        """Complete the directory of the steps written since the last call, and return it.

        records: of these steps, in order.
        meta:    what a checkpoint behind the last of them would say.

        Raises `CheckpointError` on every rank.
        """
        first = self._first
        assert first is not None and records[0].iteration == first, "these steps are not written"
        fresh = self._increments.names(first).fresh
        with together(self._group, "cpu"), disk_errors(fresh, SAVE_REMEDY):
            sync_directory(fresh)
        report = {"files": self._files, "tensors": self._tensors, "layout": self._layout}
        reports = gather_json(report, self._group, "cpu")
        with together(self._group, "cpu"), disk_errors(fresh, SAVE_REMEDY):
            if self._rank == 0:
                about = {
                    "run": self.run,
                    "base": self.base,
                    "steps": [dataclasses.asdict(record) for record in records],
                    "layout": {key: each for one in reports for key, each in one["layout"].items()},
                }
                whole = {**meta, **records[-1].counters(), META: about}
                complete(fresh, first, self._save_id(first), reports, whole)
                self._increments.publish(first)
        self.forget()
        return self._increments.names(first).plain

    def forget(self) -> None:
        """Leave out the steps that are not sealed."""
        self._first = None
        self._files = {}
        self._tensors = {}

    def is_gone(self) -> bool:
        """Return whether the directory was removed, on every rank."""
        first = self._first
        place = self._increments.root if first is None else self._increments.names(first).fresh
        return broadcast_json(not (self.root.is_dir() and place.is_dir()), self._group, "cpu")

    def _begin(self, first: int, counted: int) -> None:
        if not self.root.is_dir():
            reason = "it was removed under the run"
            raise CheckpointError("checkpoint directory", self.root, reason, SAVE_REMEDY)
        self._increments.begin(first, counted)

    def _save_id(self, first: int) -> str:
        return f"{self.run}-{first}"
