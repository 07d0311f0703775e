"""The arguments of a trainer that are settings of the command line, too: type here, default and
help from there.
"""

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from ...arguments import field_texts
from ...config import (
    CheckpointConfig,
    HFModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from ...config.settings import Section
from ...config.table import ROWS

_TEXTS: Mapping[type[Section], Mapping[str, str]] = MappingProxyType(
    {
        section: field_texts(section)
        for section in (
            CheckpointConfig,
            HFModelConfig,
            OptimizerConfig,
            ParallelConfig,
            TrainConfig,
        )
    }
)


def shared(section: type[Section], name: str, text: str = "") -> Any:
    """Return a field with the default and the help of the setting ``name`` of ``section``.

    text: the help, where an argument means something else than the flag.
    """
    row = section.__dataclass_fields__[name]
    flags = re.compile(r"--([a-z0-9-]+)")  # arguments are called like flags, with underscores
    help_text = text or flags.sub(lambda flag: flag[1].replace("-", "_"), _TEXTS[section][name])
    choices = row.metadata.get("choices")
    return field(
        default=row.default,
        metadata={"help": help_text + (f" Choices: {', '.join(choices)}." if choices else "")},
    )


@dataclass
class SharedArguments:
    """Fields of ``MerakArguments``."""

    tensor_model_parallel_size: int = shared(ParallelConfig, "tensor_model_parallel_size")
    context_parallel_size: int = shared(ParallelConfig, "context_parallel_size")
    cp_comm_type: str | None = shared(ParallelConfig, "cp_comm_type")
    pipeline_model_parallel_size: int = shared(ParallelConfig, "pipeline_model_parallel_size")
    rank_order: str | None = shared(ParallelConfig, "rank_order")
    plan: str | None = shared(ParallelConfig, "plan")
    parallel: str | None = shared(
        ParallelConfig,
        "parallel",
        "auto: search the degrees, micro-batch size, schedule, recomputation, overlap and sharding with "
        "which a step takes least time on the ranks of the job; its batch is "
        "per_device_train_batch_size x gradient_accumulation_steps x ranks. auto,tp=2,pp=4 pins some, "
        "as merak-plan search does, which shows the choice before (unset: as the arguments say).",
    )
    parallel_verify: int | None = shared(ParallelConfig, "parallel_verify")
    pipeline_schedule: str | None = shared(ParallelConfig, "pipeline_schedule")
    schedule_file: str | None = shared(ParallelConfig, "schedule_file")
    num_virtual_stages_per_pipeline_rank: int | None = shared(
        ParallelConfig, "num_virtual_stages_per_pipeline_rank"
    )
    sequence_parallel: bool = shared(ParallelConfig, "sequence_parallel")
    expert_model_parallel_size: int = shared(ParallelConfig, "expert_model_parallel_size")
    expert_tensor_parallel_size: int | None = shared(ParallelConfig, "expert_tensor_parallel_size")
    moe_expert_rank_capacity_factor: float | None = shared(
        ParallelConfig, "moe_expert_rank_capacity_factor"
    )
    preflight: bool = shared(
        ParallelConfig,
        "preflight",
        "When a trainer or an Engine is made let every rank exchange messages with the others, "
        "as merak-preflight does, and raise an error if a host or a link is slow, or output_dir is not "
        "the same on all hosts.",
    )
    tp_comm_overlap: str = shared(
        ParallelConfig,
        "tp_comm_overlap",
        "What overlaps tensor-parallel collectives; auto: the cost model chooses.",
    )
    recompute_method: str | None = shared(
        ParallelConfig,
        "recompute_method",
        "Which layers activation_checkpointing recomputes: all (unset), all in runs of "
        "recompute_num_layers (uniform), "
        "the first ones of each stage (block), by Merak's ratio rule (stage-aware), or as few as "
        "fit into "
        "device_memory_gb (capacity). With recompute_activations only capacity.",
    )
    recompute_num_layers: int | None = shared(ParallelConfig, "recompute_num_layers")
    compile_pointwise: bool = shared(ParallelConfig, "compile_pointwise")
    cpu_offloading: bool = shared(ParallelConfig, "cpu_offloading")
    cpu_offloading_num_layers: int = shared(ParallelConfig, "cpu_offloading_num_layers")
    cuda_graph_impl: str = shared(ParallelConfig, "cuda_graph_impl")
    cuda_graph_warmup_steps: int = shared(ParallelConfig, "cuda_graph_warmup_steps")
    offload_model_states: bool = shared(ParallelConfig, "offload_model_states")
    use_distributed_optimizer: bool = shared(ParallelConfig, "use_distributed_optimizer")
    data_parallel_sharding_strategy: str | None = shared(
        ParallelConfig,
        "data_parallel_sharding_strategy",
        "What is sharded over data-parallel ranks: nothing, optimizer state, also gradients, or "
        "also weights (unset: "
        "set by fsdp or deepspeed).",
    )
    grad_reduce_in_bf16: bool = shared(ParallelConfig, "grad_reduce_in_bf16")
    use_precision_aware_optimizer: bool = shared(OptimizerConfig, "use_precision_aware_optimizer")
    exp_avg_dtype: str = shared(OptimizerConfig, "exp_avg_dtype")
    exp_avg_sq_dtype: str = shared(OptimizerConfig, "exp_avg_sq_dtype")
    device_memory_gb: float | None = shared(ParallelConfig, "device_memory_gb")
    memory_reserve_gb: float | None = shared(ParallelConfig, "memory_reserve_gb")
    device_profile: str | None = shared(ParallelConfig, "device_profile")
    graph_sharding: str = shared(HFModelConfig, "graph_sharding")
    tensor_parallel_rules: str | None = shared(
        HFModelConfig,
        "tensor_parallel_rules",
        "How weights are sharded: 'lm_head.weight=replicate; *.up_proj.weight=column'.",
    )
    async_save: bool = shared(
        CheckpointConfig,
        "async_save",
        "Write checkpoints while training goes on: it waits while they are copied to memory of the "
        "host, as much as they have; on_save is called when they are complete.",
    )
    on_full_disk: str = shared(CheckpointConfig, "on_full_disk")
    fp8_recipe: str = shared(TrainConfig, "fp8_recipe")
    first_last_layers_bf16: bool = shared(TrainConfig, "first_last_layers_bf16")
    num_layers_at_start_in_bf16: int = shared(TrainConfig, "num_layers_at_start_in_bf16")
    num_layers_at_end_in_bf16: int = shared(TrainConfig, "num_layers_at_end_in_bf16")
    max_consecutive_skipped_steps: int = shared(TrainConfig, "max_consecutive_skipped_steps")
    fp32_matmul_precision: str = shared(
        TrainConfig,
        "fp32_matmul_precision",
        "Precision of fp32 matrix products, as in torch.set_float32_matmul_precision; auto: the "
        "script's setting, else "
        "on CPUs the fastest one that a probe finds exact.",
    )
    rerun_mode: str = shared(TrainConfig, "rerun_mode")
    check_for_spiky_loss: bool = shared(TrainConfig, "check_for_spiky_loss")
    check_for_large_grads: bool = shared(TrainConfig, "check_for_large_grads")
    no_check_for_nan_in_loss_and_grad: bool = shared(
        TrainConfig, "no_check_for_nan_in_loss_and_grad"
    )
    error_injection_rate: int = shared(TrainConfig, "error_injection_rate")
    error_injection_type: str = shared(TrainConfig, "error_injection_type")


# The settings, by name.
SHARED: Mapping[str, Field] = MappingProxyType(
    {each.name: ROWS[each.name] for each in fields(SharedArguments)}
)
