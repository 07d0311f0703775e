"""``MerakArguments``: transformers' ``TrainingArguments`` and the degrees of parallelism.

A field of ``TrainingArguments`` either keeps its meaning or is refused by name; none is silently
ignored. accelerate is not needed. The job is joined when the arguments are constructed, as in
transformers.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from ...config import OptimizerConfig, TrainConfig
from ...config.backends import BACKENDS
from ...config.checks import check_context_parallel, check_experts, check_needs
from ...config.fp8 import FP8_FORMATS
from ...config.rank_order import check_order
from ...errors import ConfigError
from ...parallel.launch import World, adopt, launch
from ...parallel.watchdog import HangLimits
from . import deepspeed, fsdp, parallelism, sharding
from .deepspeed_schedules import check_schedule
from .fields import FIXED, HONOURED, NOT_NEGATIVE, OF_ACCELERATE, POSITIVE, REFUSED, UNKNOWN
from .instances import check_instances, degrees_of, grid_of
from .keywords import checked
from .neftune import check_alpha
from .optimizers import MUON, class_and_arguments
from .plan_arguments import take_from_plan
from .searched import check_search
from .shared import SHARED, SharedArguments
from .without_effect import check_without_effect, warn_of_compilation, warn_of_moments

_DEFAULT_TIMEOUT = 1800  # seconds, of TrainingArguments.ddp_timeout


@dataclass(frozen=True)
class _Place:
    """The position of this process in the job, with the attribute names of accelerate's state."""

    num_processes: int
    process_index: int
    device: torch.device

    @property
    def local_process_index(self) -> int:
        return self.process_index

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    is_local_main_process = is_main_process
    distributed_type = "NO"  # tells accelerate that this library distributes the model


@dataclass
class MerakArguments(SharedArguments, TrainingArguments):
    """``TrainingArguments`` with additional fields for parallelism. Raises ConfigError for
    unsupported values.

    Fields of ``TrainingArguments`` keep their names, meanings and defaults. A "device" of
    ``per_device_train_batch_size`` is a replica of the model: the global batch is that size times
    ``gradient_accumulation_steps`` times the number of replicas, which is the number of ranks
    divided by the tensor and pipeline degrees. ``gradient_accumulation_steps`` is the number of
    micro-batches that fill the pipeline.
    """

    fp8: str | None = field(
        default=None,
        metadata={
            "help": "Compute the products of linear layers with operands of 8 bits: e4m3, or hybrid, "
            "with gradients in e5m2 (unset: in the type of the model); fp8_format of the commands."
        },
    )
    recompute_activations: bool = field(
        default=False,
        metadata={
            "help": "Recompute the input of the second matrix of feed-forward layers instead of "
            "storing it."
        },
    )
    hierarchical_context_parallel_sizes: list[int] | None = field(
        default=None,
        metadata={
            "help": "For cp_comm_type='a2a+p2p': the number of neighbours that exchange heads, and the "
            "number of groups of these, whose product is context_parallel_size."
        },
    )
    num_distributed_optimizer_instances: int | None = field(
        default=None,
        metadata={
            "help": "Groups of adjacent data-parallel ranks, each with a full copy of the "
            "sharded state (unset: "
            "one, or with fsdp='hybrid_shard' one per node)."
        },
    )
    warmup_ratio: float | None = field(
        default=None,
        metadata={"help": "Warm-up as a fraction of all steps; same as warmup_steps below 1."},
    )
    length_buckets: str | None = field(
        default="auto",
        metadata={
            "help": "Lengths to which token batches are padded, because every shape is captured "
            "once: 'auto' "
            "(8, 16, 24, ..., 128, 144, ...), 'none', or a list such as '128,256,512'."
        },
    )
    pad_to_multiple_of: int | None = field(
        default=None,
        metadata={
            "help": "Pad the length of token batches to a multiple of this instead of to "
            "length_buckets."
        },
    )
    replica_check_interval: int = field(
        default=100,
        metadata={
            "help": "Steps between comparisons of the weight digests of data-parallel replicas; "
            "0: none."
        },
    )
    prediction_outputs: str | None = field(
        default=None,
        metadata={
            "help": "Model outputs to return as predictions, separated by commas (unset: all)."
        },
    )

    def __post_init__(self):
        _refuse_fields(self)
        check_without_effect(self)
        check_alpha(self.neftune_noise_alpha)
        sharding.take_degrees(self)
        self.sharding  # noqa: B018  what is refused is told now
        check_order(self.rank_order, False, "rank_order")
        if self.warmup_ratio is not None:
            if self.warmup_steps or not 0 <= self.warmup_ratio < 1:
                remedy = "Give a fraction below 1 and leave warmup_steps 0"
                raise ConfigError(
                    "warmup_ratio",
                    self.warmup_ratio,
                    f"warmup_steps is {self.warmup_steps}",
                    remedy,
                )
            self.warmup_steps = self.warmup_ratio
        if self.plan is not None:
            take_from_plan(self)
        check_search(self)
        _check_numbers(self)
        if self.fp8 not in (None, *FP8_FORMATS):
            remedy = f"Use {' or '.join(FP8_FORMATS)}"
            raise ConfigError("fp8", repr(self.fp8), "it is not one of the choices", remedy)
        check_needs(self.precision)
        of_accelerate = {name: getattr(self, name) for name in OF_ACCELERATE}
        for name in OF_ACCELERATE:  # it is not needed
            setattr(self, name, None)
        optim = self.optim
        self.optim = "adamw_torch" if self.optim == MUON else self.optim
        try:
            super().__post_init__()
        except (ValueError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError("training arguments", "(together)", reason, "Correct them") from error
        for name, value in of_accelerate.items():
            setattr(self, name, value)
        self.optim = MUON if optim == MUON else self.optim
        class_and_arguments(self)  # a name that is refused is told now
        self.warmup_ratio = None
        self.buckets  # noqa: B018  a wrong list is told now
        if self.recomputes and self.recompute_activations:
            reason = "activation_checkpointing already recomputes entire layers"
            raise ConfigError("recompute_activations", True, reason, "Set only one of them")
        if self.load_best_model_at_end and self.save_only_model:
            reason = "the best model is loaded from its training state, which is not saved"
            raise ConfigError(
                "save_only_model", True, reason, "Leave it False with load_best_model_at_end"
            )
        sizes = {
            "tensor": self.tensor_model_parallel_size,
            "context": self.context_parallel_size,
            "pipeline": self.pipeline_model_parallel_size,
        }
        if self.context_parallel_size == 1:
            del sizes["context"]
        if self.world_size % math.prod(sizes.values()):
            degrees = " x ".join(map(str, sizes.values()))
            reason = f"a replica of the model takes {degrees} ranks ({' x '.join(sizes)} parallel)"
            raise ConfigError(
                "world size",
                self.world_size,
                reason,
                "Start a multiple of that, or lower the degrees",
            )
        degrees = degrees_of(self)
        check_needs(degrees)
        check_needs(self.moments)
        copies = self.world_size // (degrees.ranks_of_replica // degrees.context_parallel_size)
        check_context_parallel(degrees)
        check_experts(degrees, copies)
        parallelism.check_world(self)
        check_instances(self)
        self._check_deepspeed()
        warn_of_compilation(self)
        warn_of_moments(self)

        not_honoured = [
            each.name for each in dataclasses.fields(TrainingArguments) if each.name not in HONOURED
        ]
        self._settled = {name: getattr(self, name) for name in (*not_honoured, *FIXED)}

    def refuse_changes(self) -> None:
        """Raise ConfigError for a field that was set after construction and is unsupported, or no
        longer supported.
        """
        for name, value in self._settled.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    name, repr(getattr(self, name)), *{**REFUSED, **FIXED}.get(name, UNKNOWN)
                )
        check_without_effect(self)
        self._check_deepspeed()

    def _check_deepspeed(self) -> None:
        deepspeed.check_repeats(self, grid_of(self).dp)
        check_schedule(self)

    @property
    def precision(self) -> TrainConfig:
        """What computes in fp8, as settings of the commands."""
        return TrainConfig(
            micro_batch_size=1,
            fp8_format=self.fp8,
            fp8_recipe=self.fp8_recipe,
            first_last_layers_bf16=self.first_last_layers_bf16,
            num_layers_at_start_in_bf16=self.num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=self.num_layers_at_end_in_bf16,
        )

    @property
    def moments(self) -> OptimizerConfig:
        """How Adam's moments decay and are stored, as settings of the commands."""
        return OptimizerConfig(
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            use_precision_aware_optimizer=self.use_precision_aware_optimizer,
            exp_avg_dtype=self.exp_avg_dtype,
            exp_avg_sq_dtype=self.exp_avg_sq_dtype,
        )

    @property
    def recomputes(self) -> bool:
        """Whether units recompute; older releases of transformers have only the second name."""
        requested = getattr(self, "activation_checkpointing", None) or self.gradient_checkpointing
        return bool(requested) or fsdp.recomputes(self)

    @property
    def sharding(self) -> str | None:
        """The strategy that the arguments request, by whichever of their names for it."""
        return sharding.sharding_of(self)

    @property
    def offloads_model_states(self) -> bool:
        """Whether the arguments request model states in host memory, by whichever of their names for
        it.
        """
        return sharding.offloads(self)

    @property
    def recompute_granularity(self) -> str | None:
        return "full" if self.recomputes else "selective" if self.recompute_activations else None

    @property
    def buckets(self) -> str | tuple[int, ...] | None:
        """``length_buckets``: "auto", ascending lengths, or None."""
        text = self.length_buckets
        if text is None or text in ("none", ""):
            return None
        if text == "auto":
            return text
        try:
            lengths = tuple(sorted(int(part) for part in str(text).strip("[]()").split(",")))
        except ValueError:
            lengths = (0,)
        if lengths[0] < 1:
            raise ConfigError(
                "length_buckets",
                repr(text),
                "it is not a list of lengths",
                "Give auto, none or 128,256",
            )
        return lengths

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        """The device of this process; joins the job unless it has joined. Raises LaunchError."""
        world = self.world
        self._n_gpu = int(world.device.type == "cuda")
        self.distributed_state = _Place(world.size, world.rank, world.device)
        return world.device

    @functools.cached_property
    def world(self) -> World:
        """The position of this process in the job; joins the job unless it has joined. Raises
        LaunchError.
        """
        backend = self.ddp_backend or "auto"
        precision = self.fp32_matmul_precision
        limits = HangLimits.of_timeout(self.ddp_timeout, _DEFAULT_TIMEOUT)
        if dist.is_initialized():
            return adopt(backend, precision, self.use_cpu, limits)
        return launch(
            backend,
            self.ddp_timeout / 60,
            self.full_determinism,
            None,
            fp32_matmul=precision,
            use_cpu=self.use_cpu,
            limits=limits,
        )


def _refuse_fields(args: TrainingArguments) -> None:
    for each in dataclasses.fields(TrainingArguments):
        name = each.name
        value = getattr(args, each.name)
        if name in HONOURED:
            continue
        default = each.default
        if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        hidden = value == f"<{name.upper()}>"  # a token, in what to_dict gives
        if value == default or hidden or not (value or default):
            continue
        raise ConfigError(name, repr(value), *REFUSED.get(name, UNKNOWN))
    _check_backend(args)
    if args.train_sampling_strategy == "batch_rebalance":
        reason = "a replica's batch would depend on the number of replicas"
        raise ConfigError(
            "train_sampling_strategy", "batch_rebalance", reason, "Use random or group_by_length"
        )


def _check_backend(args: TrainingArguments) -> None:
    name = args.ddp_backend
    if name is None:
        return
    known = {each: backend for each, backend in BACKENDS.items() if each != "emu"}
    if name not in known:
        remedy = f"Use {', '.join(known)} or leave it unset"
        raise ConfigError("ddp_backend", name, "it is not supported", remedy)
    if args.use_cpu and known[name].of_gpus:
        raise ConfigError("ddp_backend", name, "use_cpu is set", "Leave one of the two out")
    if name == "mpi" and getattr(args, "async_save", False):
        reason = "its thread needs a group of its own, and ddp_backend mpi has one of all ranks"
        raise ConfigError("async_save", True, reason, "Leave it out, or use gloo")


def _check_numbers(args: "MerakArguments") -> None:
    for names, least in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
        for name in names:
            value = getattr(args, name)
            if not isinstance(value, int | float):
                raise ConfigError(name, repr(value), "it is not a number", "Give a number")
            if names is POSITIVE and not isinstance(value, int):
                raise ConfigError(name, value, "it is not a whole number", "Give a whole number")
            if not value >= least:
                raise ConfigError(name, value, f"it is below {least}", f"Give {least} or more")
    for name, row in SHARED.items():
        value = getattr(args, name)
        choices = row.metadata.get("choices")
        if choices is not None and value not in choices and value != row.default:
            remedy = row.metadata.get("not_yet", {}).get(value) or f"Use {' or '.join(choices)}"
            raise ConfigError(name, repr(value), "it is not one of the choices", remedy)
    if args.pad_to_multiple_of is not None and args.pad_to_multiple_of < 1:
        raise ConfigError(
            "pad_to_multiple_of", args.pad_to_multiple_of, "it is below 1", "Give 1 or more"
        )


MerakArguments.__init__ = checked(MerakArguments.__init__)  # type: ignore[method-assign]
