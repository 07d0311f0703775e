"""Training state on disk: crash-safe, checked, and independent of the layout of the ranks.

    save(root, iteration, shards, meta, group, device)    every rank writes its shards, the first one completes
    load(root, shards, group, device) -> meta              what overlaps is copied into the shards
    latest(root) -> iteration or None
    prune(root, keep_every) -> iterations removed

All are collective over ``group``, None for a single process; an error on one rank raises `CheckpointError` on all.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_merak.checkpoint.directory import Iterations, iteration_of
from megatron_merak.checkpoint.files import disk_errors
from megatron_merak.checkpoint.load import load
from megatron_merak.checkpoint.recoverable import passed
from megatron_merak.checkpoint.save import SAVE_REMEDY, save
from megatron_merak.checkpoint.shard import Shard, StateKind, Turn
from megatron_merak.errors import CheckpointError
from megatron_merak.parallel.agree import broadcast_json, together

__all__ = ["StateKind", "Shard", "Turn", "latest", "load", "prune", "save"]


def latest(
    root: Path | str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> int | None:
    """Return the newest iteration with a valid manifest, or None: what the group's first rank sees,
    on every rank.

    Raises `DamagedError` if there are checkpoints but none has a valid manifest: starting anew
    would lose them. The tracker file is not read: it may be missing, stale or ahead of a save that
    failed.
    """
    newest = None
    with together(group, device), disk_errors(Path(root), "Check --load"):
        if group is None or dist.get_rank(group) == 0:
            faults: list[CheckpointError] = []
            newest = next(map(iteration_of, Iterations(Path(root)).candidates(faults)), None)
            if newest is None and faults:
                raise faults[0]
    return broadcast_json(newest, group, device)


def prune(
    root: Path | str,
    keep_every: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    saved: int | None = None,
) -> list[int]:
    """Remove the complete checkpoints older than the newest whose iteration ``keep_every`` does not
    divide.

    This is Megatron's ``--save-retain-interval``. A damaged checkpoint (every byte is compared with
    its digest) does not count as the newest. Increments of steps up to the newest go too. Returns
    the iterations removed.

    saved: the iteration that the run has just saved; those after it are of an earlier run, do not
           count and stay.
    """
    removed: list[int] = []
    with together(group, device), disk_errors(Path(root), SAVE_REMEDY):
        if keep_every < 1:
            raise CheckpointError(
                "--save-retain-interval", keep_every, "it is not positive", "Give 1 or more"
            )
        if group is None or dist.get_rank(group) == 0:
            others = passed(Path(root), saved)
            removed = Iterations(Path(root)).remove_older(keep_every, saved, others)
    return broadcast_json(removed, group, device)
