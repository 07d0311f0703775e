"""What --load holds is looked at before anything is planned: its manifest says whether the run can
go on from it.

Only the newest checkpoint is looked at, or that of --ckpt-step; no tensor is read. What loads it
later passes over damaged ones, and looks once more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..checkpoint.directory import Iterations, read_manifest
from ..checkpoint.files import disk_errors
from ..checkpoint.foreign import foreign
from ..checkpoint.hf_files import has_weights
from ..checkpoint.increments import runs_of
from ..checkpoint.load import requested_directory
from ..config import Config, RunConfig
from ..errors import CheckpointError
from ..parallel.agree import together
from ..stages.saved_run import SavedRun
from .changes import check_run


def check_load(
    config: RunConfig, model: Mapping[str, Any] | None, group: dist.ProcessGroup | None
) -> None:
    """Raise CheckpointError on every rank if --load has no checkpoint where one is needed, or that
    of another model or seed. Collective.

    model: see ``TrainedModel.settings``.
    group: all ranks; the first one reads.
    """
    load = config.checkpoint.load
    if load is None:
        return
    with together(group, "cpu"), disk_errors(Path(load), "Check --load"):
        if group is None or dist.get_rank(group) == 0:
            directory = _directory(config, Path(load))
            if directory is not None:
                meta = read_manifest(directory)[1].meta
                check_run(config, SavedRun.read(meta, load), model)


def absent(load: str) -> CheckpointError:
    """Return the error of a directory without a checkpoint, under --exit-on-missing-checkpoint."""
    remedy = "Name a directory that holds one, or leave out --exit-on-missing-checkpoint"
    return CheckpointError("--load", load, "it has no complete checkpoint", remedy)


def _refuse_foreign(config: RunConfig, root: Path) -> None:
    """Raise CheckpointError for a directory in which the run would find nothing, and start anew."""
    other = foreign(root, "--load")
    if other is not None:
        raise other
    # weights of --model may lie where a captured model's run saves
    if isinstance(config, Config) and has_weights(root):
        reason = "it has a HuggingFace model, and no checkpoint"
        remedy = "Convert it with merak-convert first, and add --finetune"
        raise CheckpointError("--load", root, reason, remedy)


def _directory(config: RunConfig, root: Path) -> Path | None:
    """Return the checkpoint that will be loaded; None: there is none, or a step behind one."""
    options = config.checkpoint
    iterations = Iterations(root)
    if options.ckpt_step is not None:
        if iterations.locate(options.ckpt_step) is None and runs_of(root):
            return None  # increments may reach it
        return requested_directory(iterations, options.ckpt_step)
    faults: list[CheckpointError] = []
    newest = next(iterations.candidates(faults), None)
    if newest is None:
        _refuse_foreign(config, root)
    if newest is None and faults:
        raise faults[0]
    if newest is None and options.exit_on_missing_checkpoint:
        raise absent(str(options.load))
    return newest
