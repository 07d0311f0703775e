"""LoRA adapters, as peft saves them: merged into the weights of a state, a tensor at a time."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..checkpoint.hf import Source
from ..checkpoint.hf_files import read_json
from ..checkpoint.shard import Intervals
from ..errors import CheckpointError, DamagedError
from .model import empty_model
from .state import WEIGHTS, PortableState

CONFIG = "adapter_config.json"
_FILE = "adapter_model.safetensors"
_BEFORE = "base_model.model."
# of what is multiplied: A first, then B
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
# a module of the model inside one of peft
_WRAPPED = ".base_layer."
_MERGE = "Merge it with peft's merge_and_unload, and convert what that saves"
_COPY = "Copy the adapter's directory again"


@dataclass(frozen=True)
class LowRank:
    """What is added to a weight: ``scale * second @ first``, transposed where the weight is.

    first:     (rank, in).
    second:    (out, rank).
    embedding: whether the weight is that of an embedding.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale: float
    transposed: bool
    embedding: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        shape = (self.second.shape[0], self.first.shape[1])
        return shape[::-1] if self.transposed else shape

    def add_to(self, values: torch.Tensor) -> torch.Tensor:
        """Return a weight with it added, rounded as peft does: halves are multiplied in fp32."""
        product = self.second.float() @ self.first.float() * self.scale
        added = (product.T if self.transposed else product).to(self.second.dtype)
        # a bf16 weight and an fp32 product are rounded once, but those of embeddings one by one
        return (values + (added.to(values.dtype) if self.embedding else added)).to(values.dtype)


@dataclass(frozen=True)
class Adapter:
    """An adapter in memory, under the names of the model's weights.

    added:    what is added to a weight.
    replaced: weights that it has whole, such as biases, embeddings, and ``modules_to_save``.
    """

    directory: Path
    added: Mapping[str, LowRank]
    replaced: Mapping[str, torch.Tensor]


class MergedSource(Source):
    """Weights with an adapter merged into them. Raises CheckpointError for one of another model."""

    def __init__(self, source: Source, adapter: Adapter):
        self._source = source
        self._adapter = adapter
        self._last: tuple[str, torch.Tensor] | None = None
        self._tensors = {
            name: torch.empty(source.shape(name), dtype=source.dtype(name), device="meta")
            for name in source.names()
        }
        shapes = {name: each.shape for name, each in adapter.added.items()}
        shapes |= {name: tuple(each.shape) for name, each in adapter.replaced.items()}
        for name, shape in shapes.items():
            if name not in self._tensors:
                self._refuse(f"it changes {name}, which the model does not have")
            if shape != self.shape(name):
                self._refuse(f"{name} has shape {shape} in it, and {self.shape(name)} in the model")

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        """See `Source.read`; reads all of a tensor that the adapter changes."""
        adapter = self._adapter
        if name not in adapter.added and name not in adapter.replaced:
            return self._source.read(name, dim, intervals)
        if self._last is None or self._last[0] != name:
            self._last = (name, self._merged(name))
        whole = self._last[1]
        if dim is None:
            return whole.clone()
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in intervals], dim)

    def place(self, name: str) -> tuple:
        return self._source.place(name)

    def close(self) -> None:
        self._last = None
        self._source.close()

    def _merged(self, name: str) -> torch.Tensor:
        replaced = self._adapter.replaced.get(name)
        values = self._source.read(name) if replaced is None else replaced.to(self.dtype(name))
        added = self._adapter.added.get(name)
        return values if added is None else added.add_to(values)

    def _refuse(self, reason: str) -> None:
        remedy = "Give the model that the adapter was trained on"
        raise CheckpointError("--adapter", self._adapter.directory, reason, remedy)


def merge_adapter(state: PortableState, directory: Path) -> PortableState:
    """Return a state with an adapter merged into its weights, without optimizer state.

    directory: of `PeftModel.save_pretrained`, or a checkpoint of a trainer.

    Raises CheckpointError for an adapter of another model, of another kind than LoRA, or damaged.
    """
    adapter = read_adapter(directory, empty_model(state.config))
    merged = MergedSource(state.kinds[WEIGHTS], adapter)
    return dataclasses.replace(state, kinds={WEIGHTS: merged}, optimizer_steps=0, groups=())


def read_adapter(directory: Path, model: nn.Module) -> Adapter:
    """Return an adapter of a model. Raises CheckpointError."""
    for name in (CONFIG, _FILE):
        if not (directory / name).is_file():
            remedy = "Give a directory that save_pretrained of a PeftModel wrote"
            raise CheckpointError("--adapter", directory, f"{name} is not in it", remedy)
    settings = read_json(directory / CONFIG)
    _refuse_kinds(directory, settings)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    firsts: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}}
    embeddings: set[str] = set()
    replaced = {}
    for key, values in _stored(directory).items():
        if not values.isfinite().all():
            reason = f"{key} has values that are NaN or infinite"
            raise DamagedError("--adapter", directory, reason, _COPY)
        found = _FACTOR.fullmatch(key)
        name = key.removeprefix(_BEFORE).replace(_WRAPPED, ".")
        if not key.startswith(_BEFORE) or (found is None and name not in names):
            reason = f"it has {key}, which is neither a factor of LoRA nor a weight of the model"
            raise CheckpointError("--adapter", directory, reason, _MERGE)
        if found is None:
            replaced[name] = values
            continue
        module = found[1].removeprefix(_BEFORE)
        firsts[found[3]][module] = values
        if found[2]:
            embeddings.add(module)
    added = {}
    for module in sorted(firsts["A"].keys() | firsts["B"].keys()):
        first = firsts["A"].get(module)
        second = firsts["B"].get(module)
        if first is None or second is None or not _is_pair(first, second):
            reason = f"{module} has no two matrices of one rank in it"
            raise CheckpointError("--adapter", directory, reason, _MERGE)
        embedding = module in embeddings
        added[f"{module}.weight"] = LowRank(
            first=first,
            second=second,
            scale=_scale(directory, settings, module, rank=len(first)),
            transposed=embedding or _is_transposed(model, module),
            embedding=embedding,
        )
    if not added and not replaced:
        raise DamagedError("--adapter", directory, "it changes nothing", _COPY)
    return Adapter(directory, _canonical(model, added), _canonical(model, replaced))


def _is_pair(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dim() == second.dim() == 2 and 0 < first.shape[0] == second.shape[1]


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / _FILE
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedError("adapter file", os.fspath(path), str(error), _COPY) from error


def _refuse_kinds(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an adapter that is more than LoRA."""
    kind = settings.get("peft_type")
    others = ("use_dora", "target_parameters", "layer_replication", "alora_invocation_tokens")
    more = [name for name in others if settings.get(name)]
    if kind == "LORA" and not more:
        return
    reason = f"it is of kind {kind}" if kind != "LORA" else f"it has {more[0]}"
    raise CheckpointError("--adapter", directory, f"{reason}, which is not merged here", _MERGE)


def _is_transposed(model: nn.Module, module: str) -> bool:
    """Whether the weight of a module is (in, out)."""
    try:
        return isinstance(model.get_submodule(module), Conv1D)
    except AttributeError:
        # named when the weights are compared
        return False


def _scale(directory: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return what the product of a module's factors is multiplied by. Raises DamagedError."""
    patterns = settings.get("alpha_pattern") or {}
    try:
        named = (each for each in patterns if re.match(rf"(.*\.)?({each})$", module))
        found = next(named, None)
        alpha = settings["lora_alpha"] if found is None else patterns[found]
        return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, re.error) as error:
        reason = f"{CONFIG} has no lora_alpha and alpha_pattern that can be read ({error})"
        raise DamagedError("--adapter", directory, reason, _COPY) from error


def _canonical(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under the first names of tied weights."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    return {
        first[id(every[name])] if name in every else name: value for name, value in values.items()
    }
