"""Which quantized models train: adapters over frozen weights in 4 bits of bitsandbytes."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..graph.capture.four_bit import four_bit_layers, four_bit_weights
from .adapters import has_adapters

_PLAIN = "Load it without quantization_config, and frozen under adapters with "
_PLAIN += "dtype=torch.bfloat16: 2 bytes a weight"


def check_quantized(model: nn.Module) -> None:
    """Raise ConfigError for a model whose weights are quantized in another way than by bitsandbytes
    to 4 bits, or that has no adapters to train.
    """
    layers = four_bit_layers(model)
    for module in model.modules():
        if getattr(module, "is_quantized", False) is not True:
            continue
        kind = getattr(module, "quantization_method", "a library")
        kind = getattr(kind, "value", kind)
        if layers and getattr(module, "is_loaded_in_4bit", False):
            continue
        reason = f"its weights are quantized by {kind}"
        if kind == "bitsandbytes":
            reason += " to 8 bits" if getattr(module, "is_loaded_in_8bit", False) else ""
        reason += ", and weights are multiplied in float32 or 16 bits, or held in 4 bits by "
        reason += "load_in_4bit of bitsandbytes"
        raise ConfigError("model", type(module).__name__, reason, _PLAIN)
    library: Any = sys.modules.get("bitsandbytes")
    for name, module in model.named_modules() if library is not None else ():
        if isinstance(module, library.nn.Linear8bitLt):
            reason = "it is a Linear8bitLt, and no layer of 8 bits is computed"
            raise ConfigError("module", name, reason, _PLAIN)
    if layers:
        _check_layers(model, layers)


def _check_layers(model: nn.Module, layers: Mapping[str, Any]) -> None:
    library: Any = sys.modules["bitsandbytes"]
    for name, module in layers.items():
        if type(module).forward is not library.nn.Linear4bit.forward:
            reason = f"{type(module).__name__} has a forward of its own"
            raise ConfigError("4-bit weight", name, reason, "Use Linear4bit itself")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, library.nn.Params4bit) and name not in layers:
            reason = "it is in 4 bits outside of a Linear4bit"
            remedy = "Leave its module out with llm_int8_skip_modules"
            raise ConfigError("parameter", name, reason, remedy)
    four_bit_weights(model)
    if not has_adapters(model):
        reason = "its weights are in 4 bits, and there is no adapter to train"
        remedy = "Give it one: peft.get_peft_model(model, LoraConfig(...))"
        raise ConfigError("model", type(model).__name__, reason, remedy)
