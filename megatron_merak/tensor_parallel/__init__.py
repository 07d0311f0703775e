"""Tensor parallelism: layers that hold a shard, and the collectives between their regions. Groups
are arguments.
"""

from .cross_entropy import vocab_parallel_cross_entropy
from .layers import ColumnParallelLinear, ParallelLayer, RowParallelLinear, VocabParallelEmbedding
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import RngTracker, default_generator, derive_seed, model_parallel_seed
from .sequence import own_part

__all__ = [
    "ColumnParallelLinear",
    "ParallelLayer",
    "RngTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "default_generator",
    "derive_seed",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "group_rank",
    "group_size",
    "model_parallel_seed",
    "own_part",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "vocab_parallel_cross_entropy",
]
