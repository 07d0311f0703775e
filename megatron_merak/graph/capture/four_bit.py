"""Linear layers of bitsandbytes with weights in 4 bits: how these are stored, and what stands for
such a layer while a model is traced.

bitsandbytes is never imported here: if a model has such a layer, it is in ``sys.modules``.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from megatron_merak.errors import ConfigError, TraceError
from megatron_merak.graph.ir.aliases import changing
from megatron_merak.graph.ir.nodes import is_op
from megatron_merak.ops.four_bit import NESTED_BLOCK, FourBit

KINDS = ("nf4", "fp4")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """Return the ``Linear4bit`` layers of a model by the names of their weights."""
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        return {}
    return {
        f"{path}.weight".removeprefix("."): module
        for path, module in model.named_modules()
        if isinstance(module, library.nn.Linear4bit)
    }


def four_bit_weights(model: nn.Module) -> dict[str, FourBit]:
    """Return how the weights of a model that are in 4 bits are stored, by name.

    Raises ConfigError for one that is not stored as bitsandbytes stores it for training.
    """
    return {name: _format(name, module) for name, module in four_bit_layers(model).items()}


def _format(name: str, module: Any) -> FourBit:
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        reason = "it has no values in 4 bits yet"
        raise _refused(name, reason, "Move the model to its device first, which makes them")
    if getattr(state, "packing_format_for_cpu", False):
        reason = "an evaluation on the CPU has packed it anew, with scales rounded to bfloat16"
        raise _refused(name, reason, "Load the model again, and train it before it is evaluated")
    features = (module.out_features, module.in_features)
    if state.quant_type not in KINDS or tuple(state.shape) != features:
        reason = f"it is {state.quant_type} of shape {tuple(state.shape)}"
        raise _refused(name, reason, f"Use nf4 or fp4 of shape {features}")
    if features[1] % state.blocksize:
        reason = f"its {features[1]} inputs are no multiple of {state.blocksize}: blocks go on "
        reason += "across rows, of which bitsandbytes makes other values on CPUs than on GPUs"
        raise _refused(name, reason, "Leave its layer out with llm_int8_skip_modules")
    if state.dtype not in _DTYPES:
        raise _refused(name, f"it was {state.dtype}", "Quantize a model in float32 or 16 bits")
    if state.nested and state.state2.blocksize != NESTED_BLOCK:
        reason = f"{state.state2.blocksize} of its scales share one, and {NESTED_BLOCK} are known"
        raise _refused(name, reason, "Use bnb_4bit_use_double_quant as transformers does")
    rows, columns = features
    return FourBit(
        state.quant_type,
        state.blocksize,
        rows,
        columns,
        dtype=str(state.dtype).removeprefix("torch."),
        nested=bool(state.nested),
    )


def _refused(name: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError("4-bit weight", name, reason, remedy)


class _FrozenLinear(nn.Module):
    """Stands for a ``Linear4bit``, whose attributes it has: a linear layer with a frozen weight.

    The result has the dtype of the input.
    """

    compute_dtype: torch.dtype | None
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        if self.compute_dtype is None and x.dtype != dtype:
            reason = f"its input is {str(x.dtype).removeprefix('torch.')}, and the layer says none"
            remedy = "Set bnb_4bit_compute_dtype"
            raise TraceError("compute_dtype of Linear4bit", None, reason, remedy)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight, bias).to(x.dtype)


def described(
    model: nn.Module, casts: Mapping[str, torch.dtype]
) -> Iterator[tuple[nn.Parameter, tuple[int, int], torch.dtype]]:
    """Yield, for each weight in 4 bits, the shape and the dtype with which it is traced.

    casts: dtypes of what the run computes in another dtype than the layer says.
    """
    layers = four_bit_layers(model)
    for name, how in four_bit_weights(model).items():
        own = layers[name].compute_dtype or getattr(torch, how.dtype)
        yield layers[name].weight, how.shape, casts.get(name, own)


def states(model: nn.Module) -> Iterator[object]:
    """Yield what the layers know of their weights' storage, which a fake model does without."""
    for module in four_bit_layers(model).values():
        yield module.quant_state
        yield module.weight.quant_state


def stand_in(fake: nn.Module) -> None:
    """Let the ``Linear4bit`` layers of a fake model be linear layers with the weights that
    ``described`` yields.
    """
    for module in four_bit_layers(fake).values():
        module.__class__ = _FrozenLinear


def drop_copies(graph: Graph, weights: Mapping[str, FourBit]) -> None:
    """Erase the copies that peft makes of results of layers in 4 bits, since nothing writes to
    these: the sum with an adapter is in the product then.
    """
    written = changing(graph)
    for node in graph.find_nodes(op="get_attr"):
        for layer in node.users if node.target in weights else ():
            for copied in [user for user in layer.users if is_op(user, "clone")]:
                if layer not in written and copied not in written and not copied.kwargs:
                    copied.replace_all_uses_with(layer)
                    graph.erase_node(copied)


def check_readers(graph: Graph, weights: Mapping[str, FourBit]) -> None:
    """Raise TraceError for a weight in 4 bits that something else than a linear layer reads."""
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in weights:
            continue
        for user in node.users:
            if not is_op(user, "linear") or user.args[1] is not node or user.args[0] is node:
                reason = f"{user.name} reads its values, and it is in 4 bits for products alone"
                remedy = "Use plain LoRA, or load the model without quantization_config"
                raise TraceError("4-bit weight", str(node.target), reason, remedy)
