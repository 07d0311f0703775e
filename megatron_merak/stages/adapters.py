"""Models with adapters (peft): what is trained is saved as peft saves it, and the base is read from where it is.

peft is never imported here: a model that has adapters has imported it.
"""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..checkpoint.files import disk_errors, sync_directory
from ..checkpoint.hf_gather import Gather
from ..checkpoint.shard import Shard
from ..errors import ConfigError
from ..parallel.agree import broadcast_json, together
from .user_model import take
from .withheld import is_withheld, name_of

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
    trained: Iterable[str],
    group: dist.ProcessGroup | None,
    processing_class: Any = None,
) -> None:
    """Write what ``model.save_pretrained`` of peft writes: its trained weights and their config, and no base.

    model: a ``PeftModel``; the first rank's gets its parameters ``trained``, and those that peft saves with them
    and that are withheld, from ``shards``, of all its parameters; both are empty where it has them already. Collective
    over ``group``. Raises CheckpointError on every rank when the files cannot be written.
    """
    gather = Gather(shards, {}, group, "cpu")
    with together(group, "cpu"):
        wanted = [*dict.fromkeys([*trained, *_withheld(model, gather.shapes)])] if gather.first else []
    for name in broadcast_json(wanted, group, "cpu"):
        values = gather(name, tuple((0, extent) for extent in gather.shapes[name]))
        if gather.first:
            take(model, {name: values})
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


def _withheld(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The parameters without values that peft would write, such as a base's embeddings of a larger vocabulary; all
    ``names`` where it computes with some."""
    try:
        with warnings.catch_warnings(action="ignore"):
            told = [sys.modules["peft"].get_peft_model_state_dict(model, adapter_name=k) for k in model.peft_config]
    except ConfigError:
        return list(names)
    return [name_of(value) for state in told for value in state.values() if is_withheld(value)]
