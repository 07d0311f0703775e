"""What parallel layers are told of a model: the fields of Megatron-LM's ModelParallelConfig that
they read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

Initialise = Callable[[Tensor], object]

# Fields of Megatron-LM's configurations that ask for what these layers do not do.
_WITHOUT = {
    "cpu_offloading": "activations stay on the device",
    "tp_comm_overlap": "collectives are not overlapped with parts of a product",
}


@dataclass
class ModelParallelConfig:
    """Settings of parallel layers. Megatron-LM's own configurations may be given in its place.

    tensor_model_parallel_size:     ranks over which a layer is sharded.
    sequence_parallel:              between the layers each rank has its part of the sequence.
    expert_model_parallel_size:     ranks over which experts are divided.
    perform_initialization:         whether weights are initialised; else they are left as they are.
    use_cpu_initialization:         initialise the whole weight on the CPU, and take this rank's
                                    part: numbers do not depend on the number of ranks.
    params_dtype:                   of weights and biases.
    gradient_accumulation_fusion:   add weight gradients to ``weight.main_grad``.
    deterministic_mode:             look rows of the embedding up by an operation whose gradient
                                    is the same each time.
    defer_embedding_wgrad_compute:  keep the operands of weight gradients in the layer's buffers
                                    instead of computing them.
    wgrad_deferral_limit:           most operands that are kept; 0: all.
    pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, context_parallel_size,
    expert_tensor_parallel_size, fp16, bf16: as ``parallel_state`` and models have them; layers do
                                    not read them.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_model_parallel_size <= 1:
            raise ConfigError(
                "sequence_parallel",
                True,
                f"tensor_model_parallel_size is {self.tensor_model_parallel_size}",
                "Leave it out, or use more tensor-parallel ranks",
            )


def check(config: ModelParallelConfig) -> None:
    """Raise ConfigError for what a configuration of Megatron-LM asks for and is not here."""
    for name, reason in _WITHOUT.items():
        if getattr(config, name, False):
            raise ConfigError(name, getattr(config, name), reason, "Leave it out")
