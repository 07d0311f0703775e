"""The dtypes of a model's weights: which can be trained, and in which dtype a captured model
computes.
"""

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..errors import ConfigError, TraceError
from ..graph.capture.captured import Captured
from ..graph.capture.fake_model import Cast
from ..graph.capture.four_bit import four_bit_layers
from ..graph.capture.unlift import source_line
from ..graph.ir.nodes import op_name
from ..graph.ir.operators import facts
from .adapters import low_rank_factors
from .quantized import check_quantized

DTYPES = {  # by their names in plans
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HALVES = (torch.bfloat16, torch.float16)


def compute_dtype(model: nn.Module, bf16: bool, fp16: bool = False) -> str:
    """Return "float32", "bfloat16" or "float16": the dtype in which most of the model computes.

    It is that of the model's floating parameters unless ``bf16`` or ``fp16`` is set. Raises
    ConfigError, naming a parameter, for one in fp16 or fp64, and with ``fp16`` for one in bf16;
    with ``fp16`` frozen ones may be fp16; and for a model whose weights are quantized, but for
    adapters over weights in 4 bits of bitsandbytes.
    """
    check_quantized(model)
    allowed = (torch.float32,) if fp16 else (torch.float32, torch.bfloat16)
    for name, parameter in model.named_parameters():
        frozen = fp16 and not parameter.requires_grad and parameter.dtype == torch.float16
        if parameter.is_floating_point() and parameter.dtype not in allowed and not frozen:
            reason, remedy = _refusal(parameter.dtype, fp16)
            raise ConfigError("parameter", name, reason, remedy)
    return (
        "float16"
        if fp16
        else "bfloat16"
        if bf16 or torch.bfloat16 in floating_dtypes(model)
        else "float32"
    )


def _refusal(dtype: torch.dtype, fp16: bool) -> tuple[str, str]:
    """The reason why a weight of ``dtype`` cannot be trained, and the remedy."""
    reason = f"its dtype is {str(dtype).removeprefix('torch.')}"
    remedy = "Call model.float() before"
    if fp16 and dtype == torch.bfloat16:
        return (
            f"{reason}, and fp16=True is for models in float32",
            f"{remedy}, or set bf16=True instead",
        )
    reason += ", and weights train in float32 or bfloat16"
    if dtype == torch.float16:
        return (
            f"{reason}: updates are lost in float16",
            f"{remedy}, and set fp16=True to compute in float16",
        )
    return reason, "Call model.float() or model.to(torch.bfloat16) before"


def floating_dtypes(model: nn.Module) -> tuple[torch.dtype, ...]:
    """The floating dtypes of a model's parameters, in order of appearance."""
    return tuple(dict.fromkeys(p.dtype for p in model.parameters() if p.is_floating_point()))


def cast_of(model: nn.Module, dtype: torch.dtype, autocast: bool) -> Cast:
    """Return the dtype that a capture casts floating parameters to, None if they keep their own.

    dtype:    what the model computes in.
    autocast: whether it is asked for, and does not follow from the model's weights.

    Parameters keep their dtypes in a bf16 or fp16 model of which a part is fp32, except for
    adapters and weights in 4 bits where that is asked for: autocast, too, multiplies them in
    ``dtype``.
    """
    own = floating_dtypes(model)
    packed = four_bit_layers(model)
    if packed and not autocast and {*own} == {dtype}:
        return None  # a layer in 4 bits says in which dtype it computes
    if dtype not in HALVES or {*own} != {dtype, torch.float32}:
        return dtype
    factors = [*low_rank_factors(model), *packed] if autocast else []
    return dict.fromkeys(factors, dtype) or None


def check_operands(captured: Captured) -> None:
    """Raise TraceError if operands of an operation have different dtypes and it does not promote
    them.

    A capture does not raise for them: such an operation runs on fake tensors.
    """
    for node in captured.module.graph.nodes:
        name = op_name(node)
        known = facts(node)
        if not known.one_dtype and not known.normalizes:
            continue
        operands = node.args[:3] if name == "scaled_dot_product_attention" else node.all_input_nodes
        values = [
            x.meta["val"]
            for x in operands
            if isinstance(x, Node) and isinstance(x.meta.get("val"), Tensor)
        ]
        dtypes = list(dict.fromkeys(value.dtype for value in values if value.is_floating_point()))
        if len(dtypes) > 1 and (known.one_dtype or dtypes[0] == torch.float32):
            names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            reason = f"its operands are {names}, and {name} takes one dtype"
            remedy = (
                "Cast there in the model's code, or convert the model to one dtype: "
                "model.float() or model.to(...)"
            )
            raise TraceError("line", source_line(node), reason, remedy)
