"""The keys of a DeepSpeed configuration: those that are read, those without effect, and those that
are refused.

Without effect are settings of when, in which pieces and through which memory data is transferred,
and of logging.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_OFF = (None, False)
QUANTISED = (
    "weights travel in the dtype of the model, gradients in fp32",
    "Leave it out, or set grad_reduce_in_bf16",
)
_MASTERS = ("weights and moments that are updated are kept in fp32", "Leave it out")
_PRECISION = ("bf16 and fp16 of MerakArguments decide what is computed in what", "Leave it out")
_ADDED = (
    "gradients are added up in fp32",
    "Leave it out; grad_reduce_in_bf16=True sends them in bf16",
)
_BOTH = (
    "it is what offload_optimizer and offload_param were called before",
    "Set these two, with device cpu, and stage 3",
)
_REPORTS = ("it is DeepSpeed's monitor", "Leave it out, and set report_to")
_DATA = (
    "samples are those of the dataset, in the order of the sampler",
    "Leave it out, and change the dataset",
)
_CHANGES = ("it changes the model", "Leave it out, and change the model")
_BATCHES = ("the plan fixes the batch sizes", "Leave it out, and set per_device_train_batch_size")
_PROFILES = (
    "nothing is profiled by DeepSpeed",
    "Leave it out, and use torch.profiler in a callback",
)
_PIPELINE = ("stages are cut by the plan", "Leave it out, and set pipeline_model_parallel_size")
_EXPERTS = (
    "experts are divided as an argument says",
    "Leave it out, and set expert_model_parallel_size",
)
_SERVES = ("it is for inference", "Leave it out")
_RECOMPUTES = (
    "units of the plan recompute",
    "Leave it out, and set activation_checkpointing of MerakArguments",
)
_COMPILES = ("the captured program is run by this library", "Leave it out")
_FILES = ("output_dir is one directory that all nodes see", "Leave it out")

Refusal = tuple[str, str]  # why, what to do


@dataclass(frozen=True)
class Keys:
    """The keys of one section.

    read:    handled elsewhere.
    free:    any value, without effect.
    neutral: key -> (values that request nothing, why others are refused, remedy).
    off:     sections that are refused unless they request nothing.
    """

    read: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[tuple[Any, ...], str, str]] = field(default_factory=dict)
    off: Mapping[str, Refusal] = field(default_factory=dict)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TOP = Keys(
    _names(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "gradient_clipping scheduler"
    ),
    _names(
        """steps_per_print wall_clock_breakdown memory_breakdown dump_state timers log_level disable_python_gc
        prescale_gradients gradient_predivide_factor disable_allgather sparse_gradients aio graph_harvesting
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer seq_parallel_communication_data_type
        use_data_before_expert_parallelism dataloader_drop_last"""
    ),
    {
        "bfloat16": ((None,), "transformers does not fill it in", "Call it bf16"),
        "communication_data_type": ((None, "fp32"), *_ADDED),
        "gradient_allreduce_op": (
            (None, "mean"),
            "replicas' gradients are averaged",
            "Leave it out",
        ),
    },
    {
        "amp": _PRECISION,
        "torch_autocast": _PRECISION,
        "activation_checkpointing": _RECOMPUTES,
        "tensorboard": _REPORTS,
        "wandb": _REPORTS,
        "comet": _REPORTS,
        "csv_monitor": _REPORTS,
        "flops_profiler": _PROFILES,
        "comms_logger": _PROFILES,
        "autotuning": _BATCHES,
        "elasticity": _BATCHES,
        "data_efficiency": _DATA,
        "curriculum_learning": _DATA,
        "compression_training": _CHANGES,
        "quantize_training": _CHANGES,
        "weight_quantization": _CHANGES,
        "progressive_layer_drop": _CHANGES,
        "sparse_attention": _CHANGES,
        "eigenvalue": _CHANGES,
        "compile": _COMPILES,
        "pipeline": _PIPELINE,
        "expert_parallel": _EXPERTS,
        "moe": _EXPERTS,
        "hybrid_engine": _SERVES,
        "inference": _SERVES,
        "nebula": _FILES,
    },
)
SECTIONS: Mapping[str, Keys] = MappingProxyType(
    {
        "zero_optimization": Keys(
            _names("stage"),
            _names(  # the prefix stage3_ is taken off
                """contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions allgather_bucket_size
                use_multi_rank_bucket_allreduce overlap_comm compute_grad_norm load_from_fp32_weights
                elastic_checkpoint sub_group_size prefetch_bucket_size param_persistence_threshold
                model_persistence_threshold max_live_parameters max_reuse_distance
                gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save module_granularity_threshold
                use_all_reduce_for_fetch_params allgather_sequential ignore_unused_parameters legacy_stage1
                round_robin_gradients parameter_alignment zero_hpz_partition_size memory_efficient_linear
                pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
                cpu_offload_use_pin_memory leaf_module"""
            ),
            {
                "cpu_offload": (_OFF, *_BOTH),
                "cpu_offload_param": (_OFF, *_BOTH),
                "zero_quantized_weights": (_OFF, *QUANTISED),
                "zero_quantized_gradients": (_OFF, *QUANTISED),
                "zero_quantized_nontrainable_weights": (_OFF, *QUANTISED),
                "mics_shard_size": (
                    (None, -1),
                    "DeepSpeed has no MiCS any more",
                    "Leave it out, and set num_distributed_optimizer_instances",
                ),
                "mics_hierarchical_params_gather": (
                    _OFF,
                    "DeepSpeed has no MiCS any more",
                    "Leave it out",
                ),
                "zenflow": (
                    (None,),
                    "the optimizer steps once all gradients of a step are there",
                    "Leave it out",
                ),
            },
        ),
        "bf16": Keys(
            _names("enabled"),
            _names("immediate_grad_update"),
            {
                "check_grad_overflow": (
                    (None, True),
                    "steps whose gradient is not finite are skipped",
                    "Leave it out",
                ),
                "bf16_master_weights_and_grads": (_OFF, *_MASTERS),
                "bf16_optimizer_states": (_OFF, *_MASTERS),
            },
        ),
        "fp16": Keys(
            _names(
                "enabled loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"
            ),
            _names("auto_cast"),
            {
                "consecutive_hysteresis": (
                    _OFF,
                    "overflows are forgiven until the scale grows",
                    "Leave it out",
                ),
                "fp16_master_weights_and_grads": (_OFF, *_MASTERS),
            },
        ),
        "optimizer": Keys(_names("type params"), _names("legacy_fusion")),
        "tensor_parallel": Keys(_names("autotp_size"), _names("tp_overlap_comm")),
        "data_types": Keys(
            neutral={
                "grad_accum_dtype": ((None, "fp32"), *_ADDED),
                "param_dtype": ((None,), *_PRECISION),
                "buffer_dtype": ((None,), *_PRECISION),
                "keep_in_fp32_modules": ((None, "auto"), *_PRECISION),
            }
        ),
        "checkpoint": Keys(
            free=_names("tag_validation load_universal parallel_write writer"),
            neutral={"use_node_local_storage": (_OFF, *_FILES)},
        ),
    }
)
