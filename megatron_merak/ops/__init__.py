"""The operations that models are made of.

Each is a plain function of tensors with a PyTorch implementation that runs on every device; where a compiled kernel is
loaded, it takes its place behind the same signature.
"""

from .activation import gated, gelu_tanh, swiglu
from .attention import attention, causal_attention
from .cross_entropy import linear_cross_entropy
from .linear import WeightGradientSink, embedding, embedding_part, linear
from .load import load
from .norm import layer_norm, rms_norm
from .residual import bias_dropout_add
from .rotary import rotary, rotary_angles

__all__ = [
    "WeightGradientSink",
    "attention",
    "bias_dropout_add",
    "causal_attention",
    "embedding",
    "embedding_part",
    "gated",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "swiglu",
]

PROBLEMS = load()
"""Compiled library -> why it serves nothing here; "" when it does."""
