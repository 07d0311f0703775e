"""Collectives between the regions of tensor parallelism, as functions of tensors; groups are
arguments. Layers made of them, with Megatron-LM's names, are in ``megatron.tensor_parallel``.
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import default_generator, derive_seed

__all__ = [
    "copy_to_tensor_model_parallel_region",
    "default_generator",
    "derive_seed",
    "gather_from_tensor_model_parallel_region",
    "group_rank",
    "group_size",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "vocab_parallel_cross_entropy",
]
