"""The status of each field of transformers' ``TrainingArguments``: honoured, refused, or
different.
"""

from collections.abc import Mapping
from types import MappingProxyType

# older releases lack these fields
NEWER = frozenset(("activation_checkpointing", "activation_checkpointing_kwargs"))
HONOURED = frozenset(
    """output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    gradient_accumulation_steps bf16 fp16 activation_checkpointing gradient_checkpointing logging_strategy logging_steps
    logging_first_step logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
    log_on_each_node disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
    trackio_static_space_id hub_private_repo eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start
    eval_do_concat_batches eval_accumulation_steps include_for_metrics save_only_model save_strategy save_steps
    save_total_limit load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint label_smoothing_factor optim optim_args full_determinism seed data_seed
    use_cpu dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
    dataloader_multiprocessing_context remove_unused_columns label_names
    train_sampling_strategy length_column_name ddp_backend ddp_timeout do_train do_eval do_predict
    resume_from_checkpoint local_rank fsdp fsdp_config deepspeed parallelism_config accelerator_config
    activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile torch_compile_backend
    torch_compile_mode torch_empty_cache_steps dataloader_persistent_workers ddp_find_unused_parameters
    ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph neftune_noise_alpha enable_jit_checkpoint""".split()
)
UNKNOWN = ("this field is not supported", "Leave it as it is")
_REDUCED = "no effect: this library reduces gradients"
_KWARGS = (
    "`use_reentrant` has no effect: both variants compute the same; keys that change a "
    "number are refused"
)
_COMPILED = "no effect, with a warning: this library runs the captured program"
# field -> (why, what to do); a value other than the field's default is refused.
REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "optim_target_modules": (
            "every trainable parameter is optimized",
            "Freeze parameters with requires_grad",
        ),
        "average_tokens_across_devices": (
            "the loss is always the mean over all tokens",
            "Leave it True",
        ),
        "fp16_full_eval": ("evaluation runs in the precision of training", "Use fp16"),
        "bf16_full_eval": ("evaluation runs in the precision of training", "Use bf16"),
        "tf32": ("it is a setting of the process", "Set fp32_matmul_precision"),
        "use_liger_kernel": ("kernels are fused into the captured graph", "Leave it False"),
        "liger_kernel_config": ("kernels are fused into the captured graph", "Leave it unset"),
        "use_cache": ("training does not cache keys and values", "Leave it False"),
        "auto_find_batch_size": (
            "the plan fixes the batch size",
            "Choose per_device_train_batch_size",
        ),
        "eval_use_gather_object": ("predictions are sent as tensors", "Leave it False"),
        "batch_eval_metrics": (
            "compute_metrics sees the whole evaluation",
            "Use preprocess_logits_for_metrics",
        ),
        "save_on_each_node": ("output_dir is one directory that all nodes see", "Leave it False"),
        "push_to_hub": (
            "nothing is uploaded",
            "Call save_model, then huggingface_hub.upload_folder",
        ),
        "hub_token": ("nothing is uploaded", "Leave it unset"),
        "hub_model_id": ("nothing is uploaded", "Leave it unset"),
        "hub_strategy": ("nothing is uploaded", "Leave it unset"),
        "hub_always_push": ("nothing is uploaded", "Leave it False"),
        "hub_revision": ("nothing is uploaded", "Leave it unset"),
        "dataloader_in_order": ("all ranks of a replica take the same batches", "Leave it True"),
        "debug": ("hooks on the model are not captured", "Leave it empty"),
        "skip_memory_metrics": ("memory is not tracked", "Leave it True"),
    }
)
# Fields that are read once, when the arguments are constructed: field -> (why, what to do) for a
# later change.
FIXED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "neftune_noise_alpha": (
            "the padding of batches was derived from the earlier value",
            "Set it in the constructor",
        )
    }
)
# Honoured, with a difference from transformers.
DIFFERENT: Mapping[str, str] = MappingProxyType(
    {
        "accelerator_config": "sets how batches are loaded; keys that would change the batches "
        "are refused",
        "activation_checkpointing": "recomputes units of the plan; see `recompute_method`",
        "activation_checkpointing_kwargs": _KWARGS,
        "bf16": "no autocast: everything computes in bf16; weights are trained and saved in "
        "their dtype, see "
        "docs/weights.md",
        "data_seed": "also seeds the random numbers of datasets and collators, by epoch and batch",
        "dataloader_num_workers": "per rank",
        "dataloader_persistent_workers": "no effect: workers live for one epoch",
        "ddp_backend": "for all process groups of the job; also `shm`, `emu` and other backends "
        "of this library",
        "ddp_broadcast_buffers": "False is refused: the first replica's buffers are saved and "
        "used for evaluation",
        "ddp_bucket_cap_mb": _REDUCED,
        "ddp_find_unused_parameters": _REDUCED,
        "ddp_static_graph": _REDUCED,
        "deepspeed": "the ZeRO stage sets `data_parallel_sharding_strategy`; unsupported keys "
        "are refused",
        "enable_jit_checkpoint": "every run that saves does so for a signal, see "
        "docs/checkpoints.md; True asks for it "
        "beside `save_strategy='no'`",
        "eval_accumulation_steps": "predictions always move to the CPU immediately",
        "fsdp": "sets `data_parallel_sharding_strategy`; `hybrid_shard` shards within a node; "
        "`offload` sets `offload_model_states`",
        "fsdp_config": "the units of the plan are wrapped; unsupported keys are refused",
        "fp16": "no autocast, as for `bf16`; the loss scale is that of torch's GradScaler, for "
        "an fp32 model",
        "gradient_accumulation_steps": "the micro-batches that fill the pipeline",
        "gradient_checkpointing": "same as `activation_checkpointing`",
        "gradient_checkpointing_kwargs": _KWARGS,
        "ignore_data_skip": "skipped batches are not loaded, because batches are numbered",
        "include_num_input_tokens_seen": "counted over replicas, not over ranks",
        "logging_nan_inf_filter": "per step, not per micro-batch",
        "neftune_noise_alpha": "the noise is drawn like dropout: by seed, step and position in "
        "the model",
        "optim": "also `muon`; `lion_32bit` needs no bitsandbytes; quantized state, `galore`, "
        "`lomo` and "
        "similar ones are "
        "refused, see docs/optimizers.md",
        "optim_args": "arguments without effect are refused",
        "parallelism_config": "sets degrees and instances of this library; cp_size and sp_size both "
        "are context_parallel_size, see `cp_comm_type`",
        "per_device_eval_batch_size": "per replica of the model",
        "per_device_train_batch_size": "per replica of the model: tensor x pipeline ranks",
        "save_total_limit": "counts complete checkpoints only",
        "seed": "dropout is drawn by seed, step and position in the model, so that recomputation "
        "and pipelines "
        "repeat it",
        "torch_compile": _COMPILED,
        "torch_compile_backend": _COMPILED,
        "torch_compile_mode": _COMPILED,
        "torch_empty_cache_steps": "no effect: buffers are allocated once",
        "train_sampling_strategy": "`group_by_length` is drawn by seed and epoch; "
        "`batch_rebalance` is refused",
    }
)
POSITIVE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "max_consecutive_skipped_steps",
)
# Fields that transformers passes to accelerate, DeepSpeed and torch.compile on construction.
OF_ACCELERATE = (
    "fsdp",
    "fsdp_config",
    "deepspeed",
    "accelerator_config",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
)
# fields that name a file; hosts may have their own copies
FILES = ("plan", "schedule_file", "device_profile")
NOT_NEGATIVE = (
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "adam_epsilon",
    "dataloader_num_workers",
    "replica_check_interval",
    "error_injection_rate",
)
