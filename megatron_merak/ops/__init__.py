"""The operations that models are made of.

Each is a plain function of tensors with a reference implementation in PyTorch that runs on every
device; a compiled kernel, where loaded, replaces it behind the same signature.
"""

from .activation import bias_gelu, gated, gated_halves, gelu_tanh, swiglu
from .adapted import adapted_linear, adapted_linears
from .attention import attention, causal_attention, causal_chunks
from .cross_entropy import (
    cross_entropy,
    cross_entropy_stats,
    linear_cross_entropy,
    linear_cross_entropy_stats,
    loss_of_stats,
)
from .documents import documents
from .flat import accumulate_, adamw_, add_rows_, cast_, sum_of_squares
from .four_bit import FourBit, matrices, places, stored_bytes
from .fp8 import BLOCK, MULTIPLE, fp8_linear, fp8_linears
from .grouped import add_products_, grouped_linear
from .heads import split_heads
from .linear import WeightGradientSink, adds_in_product, embedding, embedding_part, linear
from .linears import joined_linear, linears
from .load import load
from .moved import moved
from .norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .operations import OPERATIONS, Kept, Operation, Scores, row
from .recomputed import gated_grouped_linear, gated_linear, gelu_linear
from .residual import bias_dropout_add, dropout_of_parts
from .ring import ring_arrive, ring_end, ring_part, ring_pass_back
from .rotary import rotary, rotary_angles, rotary_frequencies, rotary_heads
from .rows import (
    inverse_order,
    permuted,
    placed,
    rows_by_expert,
    sums_of_rows,
    weighted_swiglu,
)
from .softmax import masked_softmax
from .unkept import UNKEPT

__all__ = [
    "BLOCK",
    "FourBit",
    "MULTIPLE",
    "OPERATIONS",
    "Kept",
    "Operation",
    "Scores",
    "UNKEPT",
    "WeightGradientSink",
    "accumulate_",
    "adamw_",
    "adapted_linear",
    "adapted_linears",
    "add_layer_norm",
    "add_products_",
    "add_rms_norm",
    "add_rows_",
    "adds_in_product",
    "attention",
    "bias_dropout_add",
    "bias_gelu",
    "cast_",
    "causal_attention",
    "causal_chunks",
    "documents",
    "dropout_of_parts",
    "cross_entropy",
    "cross_entropy_stats",
    "embedding",
    "embedding_part",
    "fp8_linear",
    "fp8_linears",
    "gated",
    "gated_grouped_linear",
    "gated_halves",
    "gated_linear",
    "gelu_linear",
    "gelu_tanh",
    "grouped_linear",
    "inverse_order",
    "joined_linear",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_stats",
    "linears",
    "loss_of_stats",
    "masked_softmax",
    "matrices",
    "moved",
    "permuted",
    "placed",
    "places",
    "ring_arrive",
    "ring_end",
    "ring_part",
    "ring_pass_back",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "rotary_frequencies",
    "rotary_heads",
    "row",
    "rows_by_expert",
    "split_heads",
    "stored_bytes",
    "sum_of_squares",
    "sums_of_rows",
    "swiglu",
    "weighted_swiglu",
]

PROBLEMS = load()
"""Compiled library -> why it serves nothing here; "" when it does."""
