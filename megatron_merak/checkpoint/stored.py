"""The tensors of a checkpoint, read one part at a time, without a job or a layout."""

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_merak.checkpoint.directory import Iterations, iteration_of, read_manifest
from megatron_merak.checkpoint.files import DTYPE_NAMES, verify_tensors
from megatron_merak.checkpoint.hf import Source
from megatron_merak.checkpoint.load import copy_parts
from megatron_merak.checkpoint.manifest import BUFFER, MODEL, Manifest
from megatron_merak.checkpoint.shard import Intervals, Shard, local_shape
from megatron_merak.errors import CheckpointError


def read_stored(
    directory: Path,
    manifest: Manifest,
    kind: str,
    name: str,
    dim: int | None = None,
    intervals: Intervals = (),
) -> torch.Tensor:
    """Return a tensor of a checkpoint, joined from its parts, or the part of it at ``intervals``
    along ``dim``.

    directory: the complete checkpoint (``iter_N``).
    manifest:  that of the directory.
    kind:      "model", "exp_avg" ...
    name:      as it was saved.

    Raises DamagedError for files that are not those of the manifest; bytes are not compared with
    digests.
    """
    entry = manifest.tensors[kind][name]
    shape = local_shape(entry.shape, dim, intervals)
    values = torch.empty(shape, dtype=DTYPE_NAMES[entry.dtype])
    shard = Shard(name, entry.shape, dim, intervals, tensor=values)
    copy_parts(directory, manifest, {kind: [shard]})
    return values


class StoredSource(Source):
    """The weights of one checkpoint directory (``iter_N``), under the names they were saved with.

    directory: the complete checkpoint.
    rename:    from a saved tensor name to the name used here.
    kind:      which of its state: the weights with the buffers, or one of the optimizer's.

    Raises DamagedError if the manifest or a byte of the state is damaged.
    """

    def __init__(self, directory: Path, rename: Callable[[str], str] = str, kind: str = MODEL):
        self.directory = directory
        self.manifest = read_manifest(directory)[1]
        kinds = [kind]
        if kind == MODEL and BUFFER in self.manifest.tensors:
            kinds.append(BUFFER)
        files = self.manifest.files_of(kinds)
        for file in sorted(files):
            verify_tensors(
                directory / file, self.manifest.files[file], files[file], self.manifest.save_id
            )
        self._names = {}
        self._tensors = {}
        for each in kinds:
            for name, entry in self.manifest.tensors[each].items():
                dtype = DTYPE_NAMES[entry.dtype]
                self._names[rename(name)] = (each, name)
                self._tensors[rename(name)] = torch.empty(entry.shape, dtype=dtype, device="meta")

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        kind, stored = self._names[name]
        return read_stored(
            self.directory, self.manifest, kind, stored, dim=dim, intervals=intervals
        )

    def place(self, name: str) -> tuple:
        kind, stored = self._names[name]
        parts = self.manifest.tensors[kind][stored].parts
        return (parts[0].file, name)


def chosen(path: Path, iteration: int | None) -> Path:
    """Return the directory of a checkpoint: ``path`` itself if it is one, else the newest one in it
    or that of ``iteration``.

    Raises CheckpointError if there is none.
    """
    remedy = "Give a --save directory or an iter_N directory of merak-pretrain or merak-pretrain-hf"
    if iteration_of(path) >= 0:
        read_manifest(path)
        return path
    faults: list[CheckpointError] = []
    complete = list(Iterations(path).candidates(faults))
    candidates = [each for each in complete if iteration in (None, iteration_of(each))]
    if candidates:
        return candidates[0]
    if faults:
        raise faults[0]
    if complete:
        known = ", ".join(str(iteration_of(each)) for each in complete)
        raise CheckpointError(
            "--ckpt-step", iteration, f"{path} has {known}", "Give one of these, or leave it out"
        )
    raise CheckpointError("checkpoint directory", path, "it has no complete checkpoint", remedy)
