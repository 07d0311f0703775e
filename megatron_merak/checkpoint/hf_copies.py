"""Copies of a model that a thread writes as a HuggingFace directory while training goes on.

Whatever looks at the live model runs in `copy_hf`, while training waits: transformers' rules for its
names, its configuration, its tokenizer. What remains for the thread is bytes and shards.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_merak.checkpoint.behind import Staging
from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.checkpoint.hf_gather import Gather
from megatron_merak.checkpoint.hf_save import (
    LARGEST_FILE,
    FilesOfModel,
    buffers_of,
    write_config,
)
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.durable import check_free
from megatron_merak.parallel.agree import together

_REMEDY = "Check the output directory, its permissions and its free space"
_TEMPORARY = "Check TMPDIR, its permissions and its free space"
_KIND = "of the HuggingFace directory"


@dataclass(frozen=True)
class HFCopies:
    """What becomes a HuggingFace directory.

    small:   contents of files by path, on the first rank.
    weights: which files have which weights; None: none beside ``small``.
    shards:  this rank's copies.
    buffers: copies of the model's buffers.
    """

    small: Mapping[str, bytes]
    weights: FilesOfModel | None = None
    shards: Sequence[Shard] = ()
    buffers: Mapping[str, torch.Tensor] | None = None

    def write(self, directory: Path, group: dist.ProcessGroup | None) -> None:
        """Write the files into an existing directory, for the unit over it to sync. Collective.

        group: of the thread that writes.

        Raises `CheckpointError` on every rank.
        """
        first = group is None or dist.get_rank(group) == 0
        needed = 0 if self.weights is None else self.weights.nbytes
        needed += sum(map(len, self.small.values()))
        with together(group, "cpu"), disk_errors(directory, _REMEDY):
            if first:
                check_free(
                    directory, needed, "output directory", "Free some space, or save elsewhere"
                )
                for name, content in self.small.items():
                    path = directory / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
        if self.weights is None:
            return
        gather = Gather(self.shards, self.buffers or {}, group, "cpu")
        self.weights.write(directory, gather, group, "cpu")
        with together(group, "cpu"), disk_errors(directory, _REMEDY):
            if first:
                self.weights.write_index(directory)


def copy_hf(
    model: nn.Module,
    shards: Sequence[Shard],
    staging: Staging,
    group: dist.ProcessGroup | None,
    processing_class: Any = None,
) -> HFCopies:
    """Return copies of what `save_hf` would write now, which stay until the next call. Collective.

    model, shards, group, processing_class: as for `save_hf`.
    staging:                                where copies of weights lie.

    Raises `CheckpointError` on every rank.
    """
    buffers = buffers_of(model)
    gather = Gather(shards, buffers, group, "cpu")
    with together(group, "cpu"):
        weights = FilesOfModel.of(model, gather, LARGEST_FILE)
    small: dict[str, bytes] = {}
    with together(group, "cpu"), disk_errors(Path(tempfile.gettempdir()), _TEMPORARY):
        if gather.first:
            small = rendered(
                lambda place: write_config(place, model, gather.dtypes, processing_class)
            )
    copied = staging.fetched(_KIND, shards)
    kept = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
    return HFCopies(small, weights, copied, kept if gather.first else {})


def rendered(write: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the files, by path, that ``write`` writes into a directory, which is a temporary
    one.
    """
    with tempfile.TemporaryDirectory(prefix="merak-") as name:
        place = Path(name)
        write(place)
        return read_all(place)


def read_all(place: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, by path."""
    paths = sorted(path for path in place.rglob("*") if path.is_file())
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in paths}
