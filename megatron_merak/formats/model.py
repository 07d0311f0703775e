"""The model that a config.json describes, without memory: its tensors' names and shapes."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.hf_build import build_empty
from ..errors import CheckpointError

CONFIG = "config.json"


def empty_model(config: Mapping[str, Any], dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model of a config, its parameters on no device. Raises CheckpointError."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / CONFIG).write_text(json.dumps(dict(config)), encoding="utf-8")
        return build_empty(Path(place), None, False, {"dtype": dtype})


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter; of a tied one under its first name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def config_beside(directory: Path, given: Path | None) -> dict[str, Any]:
    """Return the config.json of a model whose format has none: ``given``, or what lies in
    ``directory``.

    given: a config.json, or a directory with one.

    Raises CheckpointError where there is none, or it cannot be read.
    """
    path = directory / CONFIG
    if given is not None:
        path = given / CONFIG if given.is_dir() else given
    if not path.is_file():
        reason = f"there is no {CONFIG} in it, by which tensors are understood"
        remedy = "Name the model's config.json, or a directory with it, by --config"
        raise CheckpointError("checkpoint", directory if given is None else given, reason, remedy)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "--config", path, str(error), "Give a config.json of transformers"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            "--config", path, "it is not a JSON object", "Give a config.json of transformers"
        )
    return config
