"""Attention whose tape does not keep keys and values that were gathered: the backward gets them
again from the sink.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .attention import attention, causal_chunks
from .linear import WeightGradientSink
from .moved import named


def _unkept(operation: Callable[..., Tensor], takes_sink: bool = False) -> Callable[..., Tensor]:
    def run(*args: Any, sink: WeightGradientSink | None = None, **options: Any) -> Tensor:
        if sink is None:
            return operation(*args, **options)
        if takes_sink:
            options["sink"] = sink
        with sink.unkept():
            return operation(*args, **options)

    return named(run, operation)


# operation that attends -> the same, with a sink
UNKEPT: Mapping[object, Callable[..., Tensor]] = MappingProxyType(
    {
        attention: _unkept(attention, takes_sink=True),
        causal_chunks: _unkept(causal_chunks),
        torch.ops.aten.scaled_dot_product_attention.default: _unkept(
            torch.ops.aten.scaled_dot_product_attention.default
        ),
    }
)
