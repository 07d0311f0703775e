"""Our own checkpoints as states: of merak-pretrain and merak-pretrain-hf, any layout, with AdamW's state."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.convert import write_kinds
from ..checkpoint.directory import read_manifest
from ..checkpoint.hf import Source
from ..checkpoint.manifest import BUFFER
from ..checkpoint.shard import Intervals
from ..checkpoint.stored import StoredSource, chosen
from ..config import ModelConfig
from ..errors import CheckpointError, ConfigError
from ..stages.parameter_groups import matrices_and_others
from ..stages.saved_run import SavedRun
from .model import empty_model, shapes_of
from .native import (
    Say,
    config_of_native,
    hf_name,
    native_name,
    native_of_config,
    native_of_saved,
)
from .state import MASTER, MOMENTS, WEIGHTS, PortableState, check_whole

_ADAMW = "AdamW"


def read_merak(
    directory: Path, iteration: int | None, optimizer: bool, say: Say
) -> tuple[PortableState, Path]:
    """Return the state in a checkpoint, and the directory of that.

    directory: that of --save, or of one checkpoint in it.
    iteration: which; None: the newest one.
    optimizer: whether to read AdamW's state, if there is any.
    say:       called with a line on what is left out.

    Every byte is compared with its digest. Raises CheckpointError, and ConfigError for a GPT of
    flags that transformers does not have.
    """
    path = chosen(directory, iteration)
    manifest = read_manifest(path)[1]
    saved = SavedRun.read(manifest.meta, path)
    config = _config_of(saved, path, say)
    kind = config.get("model_type", "")
    native = "model" not in saved.config["model"]

    def rename(name: str) -> str:
        return hf_name(name, kind) if native else name

    kinds: dict[str, Source] = {WEIGHTS: StoredSource(path, rename)}
    named = manifest.meta.get("optimizer", _ADAMW)
    if optimizer and MOMENTS[0] in manifest.tensors and named != _ADAMW:
        say(f"{path}: the state of {named} is left out, only AdamW's has a place elsewhere.")
    elif optimizer:
        for each in (*MOMENTS, MASTER):
            if each in manifest.tensors:
                kinds[each] = _InFloat(StoredSource(path, rename, each))
    with_state = len(kinds) > 1
    state = PortableState(
        kinds=kinds,
        config=config,
        iteration=saved.iteration,
        optimizer_steps=saved.optimizer_steps if with_state else 0,
        consumed_samples=saved.consumed_samples,
        groups=_groups(saved.config["optimizer"], kinds[MOMENTS[0]]) if with_state else (),
    )
    return state, path


def write_merak(state: PortableState, root: Path, say: Say) -> tuple[Path, ModelConfig | None]:
    """Write a checkpoint; return its directory, and the GPT of flags that it is of: None for a
    model that only merak-pretrain-hf trains.

    root: the directory in which it is made.
    say:  called with a line on settings that differ.

    Raises CheckpointError, and NumericsError for numbers that are not finite.
    """
    model: Any = empty_model(state.config)
    kind = model.config.model_type
    parameters = shapes_of(model)
    source = state.kinds[WEIGHTS]
    known = {*source.names()}
    for each, of_kind in state.kinds.items():
        check_whole(each, of_kind, parameters)
    native = None
    try:
        native = native_of_config(model.config, root, say)
    except ConfigError as error:
        say(f"For merak-pretrain-hf, as the GPT of flags is not this model: {error}")
    names = {name: native_name(name, kind) if native else name for name in parameters}
    buffers = {name: name for name in known if name in dict(model.named_buffers())}
    settings = {"model": kind} if native is None else dataclasses.asdict(native)
    sections = {"model": settings, "train": {}, "optimizer": {}, "data": {}}
    meta = {
        "consumed_samples": state.consumed_samples,
        "optimizer_steps": state.optimizer_steps,
        "config": sections,
        "data": None,
        "model": None if native is not None else dict(state.config),
    }
    kinds = {WEIGHTS: (source, names)}
    if buffers:
        kinds[BUFFER] = (source, buffers)
    for each in (*MOMENTS, MASTER) if state.has_optimizer else ():
        if each in state.kinds:
            kinds[each] = (state.kinds[each], names)
        elif each == MASTER and source.dtypes()[0] != torch.float32:
            kinds[each] = (_InFloat(source), names)
    path = write_kinds(kinds, root, state.iteration if state.has_optimizer else 0, meta)
    return path, native


def _groups(settings: Mapping[str, Any], moments: Source) -> list[dict[str, Any]]:
    """Return the parameter groups of a run, as torch's AdamW has them: matrices, which decay, and the
    rest. None for a checkpoint that does not say its run's settings.
    """
    needed = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay")
    if any(not isinstance(settings.get(name), int | float) for name in needed):
        return []
    parameters: tuple[list[str], list[str]] = ([], [])
    for name in moments.names():
        parameters[matrices_and_others(name, moments.shape(name))].append(name)
    return [
        {
            "params": names,
            "lr": settings["lr"],
            "betas": (settings["adam_beta1"], settings["adam_beta2"]),
            "eps": settings["adam_eps"],
            "weight_decay": decay,
        }
        for names, decay in zip(parameters, (settings["weight_decay"], 0.0), strict=True)
        if names
    ]


class _InFloat(Source):
    """Weights in fp32, for an optimizer state without."""

    def __init__(self, source: Source):
        self._source = source
        self._tensors = {
            name: torch.empty(source.shape(name), dtype=torch.float32, device="meta")
            for name in source.names()
        }

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        return self._source.read(name, dim, intervals).float()

    def place(self, name: str) -> tuple:
        return self._source.place(name)

    def close(self) -> None:
        self._source.close()


def _config_of(saved: SavedRun, path: Path, say: Say) -> dict[str, Any]:
    """Return the config.json of a checkpoint's model."""
    if "model" not in saved.config["model"]:
        native = native_of_saved(saved.config["model"])
        try:
            return config_of_native(native, say)
        except ConfigError as error:
            error.add_note(f"The checkpoint is {path}.")
            raise
    if saved.model is None:
        remedy = (
            "Resume it with merak-pretrain-hf --load, --train-iters at its iteration, and --save-hf"
        )
        reason = "it does not hold the config.json of its model"
        raise CheckpointError("checkpoint", path, reason, remedy)
    return dict(saved.model)
