"""Models with adapters (peft): adapters are saved in peft's format; the base model is read from its
directory.

peft is never imported here: if a model has adapters, peft is in ``sys.modules``.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..checkpoint import in_place
from ..checkpoint.files import disk_errors
from ..checkpoint.hf_gather import Gather
from ..checkpoint.shard import Shard
from ..errors import ConfigError
from ..parallel.agree import broadcast_json, together
from .user_model import take
from .withheld import is_withheld, name_of

_REMEDY = "Check the output directory, its permissions and its free space"
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def low_rank_factors(model: nn.Module) -> list[str]:
    """The names of the factors A and B of LoRA, in the order of the parameters."""
    layers: Any = sys.modules.get("peft.tuners.lora.layer")
    factors: set[int] = set()
    kinds: tuple[type, ...] = () if layers is None else (layers.Linear, layers.Embedding)
    in_four_bits = getattr(sys.modules.get("peft.tuners.lora.bnb"), "Linear4bit", None)
    if in_four_bits is not None:
        kinds += (in_four_bits,)
    for module in model.modules():
        if isinstance(module, kinds):
            own: Any = module
            pairs = (own.lora_A, own.lora_B, own.lora_embedding_A, own.lora_embedding_B)
            factors |= {id(p) for each in pairs for p in each.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in factors]


def name_before(name: str) -> str:
    """The name that a parameter of a ``PeftModel`` had before peft wrapped its module."""
    return _WRAPPED.sub("", name)


def save_adapters(
    directory: Path,
    model: nn.Module,
    shards: Sequence[Shard],
    trained: Iterable[str],
    group: dist.ProcessGroup | None,
    processing_class: Any = None,
) -> None:
    """Write what peft's ``model.save_pretrained`` writes: the trained weights and their config,
    without the base model.

    model:   a ``PeftModel``. The first rank's is given the values that it lacks and that peft
             saves.
    shards:  of all its parameters, on every rank; empty if the model has its values.
    trained: the names of the trained parameters; empty if the model has its values.

    Collective over ``group``. Raises CheckpointError on every rank if the files cannot be written.
    """
    gather = Gather(shards, {}, group, "cpu")
    with together(group, "cpu"):
        missing = (
            [*dict.fromkeys([*trained, *_withheld(model, gather.shapes)])] if gather.first else []
        )
    for name in broadcast_json(missing, group, "cpu"):
        values = gather(name, tuple((0, extent) for extent in gather.shapes[name]))
        if gather.first:
            take(model, {name: values})
    with together(group, "cpu"), disk_errors(directory, _REMEDY):
        if gather.first:
            try:
                fresh = in_place.begin(directory)
                model.save_pretrained(fresh)  # type: ignore[operator]
                if processing_class is not None:
                    processing_class.save_pretrained(fresh)
                in_place.publish(directory)
            finally:
                in_place.abandon(directory)


def _withheld(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The withheld parameters that peft would write, such as the base model's embeddings of a
    larger vocabulary.

    names: returned where peft computes with withheld values.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted: Any = model
            state_of = sys.modules["peft"].get_peft_model_state_dict
            states = [state_of(model, adapter_name=name) for name in adapted.peft_config]
    except ConfigError:
        return list(names)
    return [name_of(value) for state in states for value in state.values() if is_withheld(value)]
