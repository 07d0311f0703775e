"""Models with adapters (peft): what is trained is saved as peft saves it, and the base is read from where it is.

peft is never imported here: a model that has adapters has imported it.
"""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..checkpoint.files import disk_errors, sync_directory
from ..checkpoint.hf import give
from ..checkpoint.hf_gather import Gather
from ..checkpoint.shard import Shard
from ..parallel.agree import together

_FRESH = ".being-written"
_REMEDY = "Check the output directory, its permissions and its free space"
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def has_adapters(model: nn.Module) -> bool:
    """Whether it is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def name_before(name: str) -> str:
    """The name that a parameter of a ``PeftModel`` had before peft wrapped the module that holds it."""
    return _WRAPPED.sub("", name)


def save_adapters(
    directory: Path,
    model: nn.Module,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
    processing_class: Any = None,
) -> None:
    """Write what ``model.save_pretrained`` of peft writes: its trained weights and their config, and no base.

    model: a ``PeftModel``; the first rank's gets the values of ``shards``, which are of its trained parameters, unless
    there are none because it has these values already. Collective over ``group``. Raises CheckpointError on every rank
    when the files cannot be written.
    """
    gather = Gather(shards, {}, group, "cpu")
    for name, shape in gather.shapes.items():
        values = gather(name, tuple((0, extent) for extent in shape))
        if gather.first:
            give(model, {name: values})
    fresh = directory / _FRESH
    with together(group, "cpu"), disk_errors(directory, _REMEDY):
        if gather.first:
            shutil.rmtree(fresh, ignore_errors=True)
            try:
                model.save_pretrained(fresh)  # type: ignore[operator]
                if processing_class is not None:
                    processing_class.save_pretrained(fresh)
                _publish(directory, fresh)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)


def _publish(directory: Path, fresh: Path) -> None:
    """Let the files of ``fresh`` take their names, weights last."""
    files = [path for path in sorted(fresh.rglob("*")) if path.is_file()]
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    for path in sorted(files, key=lambda path: path.suffix == ".safetensors"):
        target = directory / path.relative_to(fresh)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    sync_directory(directory)
