"""Build the model that a HuggingFace directory describes, without memory for its parameters and
without the network.
"""

import math
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_merak.checkpoint.hf_files import read_json
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.graph.capture.empty import init_empty_weights

CONFIG = "config.json"
GENERATION = "generation_config.json"

_MOST_MODULES = 1 << 14
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
# Names of fields that are numbers of modules.
_COUNT = re.compile(r"layers?$|blocks?$|experts?$|depths?$|stages?$")

# What numbers with names like these have to be, for a model of any type to compute anything with
# them.
_DOMAINS: tuple[tuple[re.Pattern[str], Callable[[float], bool], str], ...] = (
    (re.compile(r"eps$|epsilon$"), lambda value: 0 <= value < math.inf, "at least 0"),
    (
        re.compile(
            r"^((local_|global_)?rope_theta|rotary_emb_base|rotary_base|rope_local_base_freq)$"
        ),
        lambda value: 0 < value < math.inf,
        "above 0",
    ),
    (
        re.compile(r"^(num_attention_heads|n_heads?|hidden_size|d_model|n_embd|vocab_size)$"),
        lambda value: 1 <= value < math.inf,
        "at least 1",
    ),
    (
        re.compile(
            r"^(num_key_value_heads|head_dim|intermediate_size|n_inner|d_ff|ffn_dim|max_position_embeddings|n_positions"
            r"|initializer_range|init_std)$"
        ),
        lambda value: 0 <= value < math.inf,
        "at least 0",
    ),
    (
        re.compile(r"(dropout|pdrop)(_prob|_rate|_p)?$"),
        lambda value: 0 <= value <= 1,
        "from 0 to 1",
    ),
)

# given to the model's class, not to its config
_BUILD = ("dtype", "attn_implementation", "experts_implementation")


def build_empty(
    directory: Path,
    auto_class: type | None,
    trust_remote_code: bool,
    overrides: dict[str, Any],
    stored_as: torch.dtype | None = None,
) -> nn.Module:
    """Return the model of ``directory`` (or a config file) under `init_empty_weights`, with its
    generation config.

    overrides: fields of the config, and the dtype and implementations to build with.
    stored_as: the dtype if neither they nor the config name one.

    Parameters that transformers keeps in fp32 are fp32. Raises `CheckpointError` for a config that
    cannot be read, is of an unknown type, is quantized, or names its own code without
    ``trust_remote_code``; `ConfigError` for an override that the config does not have.
    """
    import transformers

    build = {name: overrides.pop(name) for name in _BUILD if overrides.get(name) is not None}
    config = _config(directory, trust_remote_code, overrides)
    if build.get("dtype", config.dtype) is None:
        build["dtype"] = stored_as
    kind: Any = auto_class or _class_of(config, directory, trust_remote_code)
    with init_empty_weights():
        try:
            if hasattr(kind, "from_config"):
                model = kind.from_config(config, trust_remote_code=trust_remote_code, **build)
            else:
                model = kind._from_config(config, **build)
        except Exception as error:
            reason = (
                f"{kind.__name__} cannot be built from its config ({type(error).__name__}: {error})"
            )
            remedy = "Check config.json, or name another auto_class"
            raise CheckpointError("model directory", directory, reason, remedy) from error
        _keep_in_fp32(model)
    if (directory / GENERATION).is_file() and model.can_generate():
        text = read_json(directory / GENERATION)
        model.generation_config = transformers.GenerationConfig.from_dict(text)
    return model


def _keep_in_fp32(model: Any) -> None:
    """Keep modules in fp32 as ``from_pretrained`` does for classes that require it in a 16-bit
    model.
    """
    patterns = list(model._get_dtype_plan(model.dtype))
    if not patterns:
        return
    pattern = re.compile("|".join(f"({each})".replace("*", ".*") for each in patterns))
    with torch.no_grad():
        for name, tensor in list(model.named_parameters()):
            if pattern.search(name) and tensor.dtype != torch.float32:
                _put(model, name, nn.Parameter(tensor.float(), requires_grad=tensor.requires_grad))
        for name, buffer in list(model.named_buffers()):
            if pattern.search(name) and buffer.is_floating_point():
                _put(model, name, buffer.float())


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, value)


_GIVE = "Give a directory that save_pretrained of transformers wrote, or its config.json"


def _config(directory: Path, trust_remote_code: bool, overrides: dict[str, Any]):
    from transformers import AutoConfig

    if not directory.exists():
        remedy = "Give the path of a local directory or config file; nothing is downloaded"
        raise CheckpointError("model directory", directory, "it does not exist", remedy)
    file = directory if directory.is_file() else directory / CONFIG
    if not os.path.lexists(file):
        raise CheckpointError("model directory", directory, f"it has no {CONFIG}", _GIVE)
    text = read_json(file)
    _check_type(directory, file, text, trust_remote_code)
    _check_values(file, text)
    if text.get("quantization_config"):
        reason = "its weights are quantized, and training needs floating-point weights"
        raise CheckpointError(
            "model directory", directory, reason, "Use the model from which it was quantized"
        )
    try:
        config, unknown = AutoConfig.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            return_unused_kwargs=True,
            **overrides,
        )
    except Exception as error:
        reason = f"it is no {text.get('model_type')} config ({type(error).__name__}: {error})"
        raise CheckpointError("config", file, reason, "Copy the model directory again") from error
    if unknown:
        near = get_close_matches(sorted(unknown)[0], dir(config), 1)
        remedy = f"Did you mean {near[0]}" if near else "Use a field of config.json"
        raise ConfigError(
            "config field", sorted(unknown)[0], f"{type(config).__name__} has no such field", remedy
        )
    return config


def _check_type(directory: Path, file: Path, text: dict[str, Any], trust_remote_code: bool) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = text.get("model_type")
    own_code = text.get("auto_map")
    if not isinstance(kind, str | None):
        raise CheckpointError(
            "config", directory, f"its model_type is {str(kind)[:60]!r}", "Copy the directory again"
        )
    if kind in CONFIG_MAPPING or (own_code and trust_remote_code):
        return
    if own_code:
        reason = f"its type {kind} is unknown to transformers, and it has its own code"
        remedy = "Read that code, then allow it with --trust-remote-code (trust_remote_code=True)"
        raise CheckpointError("model directory", directory, reason, remedy)
    if not isinstance(kind, str):
        raise CheckpointError("config", file, "it has no model_type", _GIVE)
    near = get_close_matches(kind, list(CONFIG_MAPPING), 1, 0.0)
    remedy = f"The nearest known type is {near[0]}" if near else "Install a newer transformers"
    raise CheckpointError(
        "model type", kind, "this version of transformers does not know it", remedy
    )


def _check_values(file: Path, text: dict[str, Any]) -> None:
    """Refuse values that would take long to build, and numbers with which a model computes nothing
    but NaN.
    """
    names = text.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        reason = f"its architectures are {str(names)[:60]!r}, not a list of class names"
        raise CheckpointError("config", file, reason, "Copy the model directory again")
    pending = [("", text)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(name, each) for each in value]
        elif type(value) is int and (
            value > _MOST_MODULES and _COUNT.search(name) or value < 0 and name in _LAYERS
        ):
            reason = f"its {name} is {value}, and a model has between 0 and {_MOST_MODULES}"
            raise CheckpointError("config", file, reason, "Copy the model directory again")
        elif type(value) in (int, float):
            _check_domain(file, name, value)


def _check_domain(file: Path, name: str, value: float) -> None:
    reason = f"its {name} is {value}"
    if math.isnan(value):
        raise CheckpointError("config", file, reason, "Give a number")
    for pattern, holds, words in _DOMAINS:
        if pattern.search(name) and not holds(value):
            raise CheckpointError("config", file, reason, f"Give a finite number {words}")


def _class_of(config, directory: Path, trust_remote_code: bool) -> type:
    """Return the class that the config names, else the first head of its type, else the
    bare model.
    """
    import transformers

    for name in config.architectures or ():
        candidate = getattr(transformers, name, None)
        if isinstance(candidate, type) and hasattr(candidate, "_from_config"):
            return candidate
    autos = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModel,
    )
    own = getattr(config, "auto_map", None) or {}
    for auto in autos:
        if type(config) in auto._model_mapping or (trust_remote_code and auto.__name__ in own):
            return auto
    reason = f"its type {config.model_type} has no class that can be trained"
    raise CheckpointError("model directory", directory, reason, "Name one with auto_class")
