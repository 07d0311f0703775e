"""Fields of transformers that are accepted if their value changes no result here, and refused by
name otherwise.

They configure how torch, accelerate or DistributedDataParallel compute a step; none of these is
used.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from types import MappingProxyType
from typing import Any

from ...errors import ConfigError
from .settings import settings_of

_UNITS = "recomputation is by unit of the plan"
_METHOD = "Leave it out, and set recompute_method and recompute_num_layers"
_LOADED = "batches are cut from one order of samples, whatever the layout"
# values (None: any), why others are refused, what to do
Taken = Mapping[str, tuple[tuple[Any, ...] | None, str, str]]

# Keys of ``activation_checkpointing_kwargs``: both kinds of recomputation compute the same.
_KWARGS: Taken = MappingProxyType(
    {
        "use_reentrant": (None, "", ""),
        "preserve_rng_state": ((True,), "a recomputation repeats what was drawn", "Leave it out"),
        "determinism_check": (None, "", ""),
        "early_stop": (None, "", ""),
        "debug": ((False,), _UNITS, "Leave it out"),
        "context_fn": ((None,), _UNITS, "Leave it out"),
        "every_n_layers": ((1,), _UNITS, _METHOD),
        "offload": (
            (False,),
            "inputs of recomputed units stay on the device",
            "Leave it out, or set cpu_offloading_num_layers instead",
        ),
    }
)
_ACCELERATOR: Taken = MappingProxyType(
    {
        "split_batches": (
            (False,),
            "a batch is a replica's",
            "Divide per_device_train_batch_size by the replicas",
        ),
        "dispatch_batches": (None, "", ""),
        "even_batches": ((True,), _LOADED, "Leave it True, or set dataloader_drop_last"),
        "use_seedable_sampler": ((True,), "samplers are seeded by seed and epoch", "Leave it True"),
        "non_blocking": (None, "", ""),
        "use_configured_state": ((False,), "accelerate is not used", "Leave it False"),
        "gradient_accumulation_kwargs": (None, "", ""),
    }
)
_ACCUMULATION: Taken = MappingProxyType(
    {
        "sync_each_batch": (None, "", ""),  # says when gradients travel
        "num_steps": (
            (None, 1),
            "gradient_accumulation_steps says it",
            "Set that, and leave this out",
        ),
    }
)
_COMPILED = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def check_without_effect(args: Any) -> None:
    """Raise ConfigError, naming the key, for a value that would change something and is
    unsupported.
    """
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        _check(name, settings_of(name, getattr(args, name, None)), _KWARGS)
    config = args.accelerator_config
    config = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    settings = settings_of("accelerator_config", config)
    _check("accelerator_config", settings, _ACCELERATOR)
    kwargs = settings.get("gradient_accumulation_kwargs")
    what = "accelerator_config: gradient_accumulation_kwargs"
    _check(what, settings_of(what, kwargs), _ACCUMULATION)
    if args.ddp_broadcast_buffers is False:
        reason = "the first replica's buffers are saved and used for evaluation"
        raise ConfigError("ddp_broadcast_buffers", False, reason, "Leave it unset")


def warn_of_compilation(args: Any) -> None:
    """Warn once, on the first rank, that torch.compile is not called."""
    requested = [name for name in _COMPILED if getattr(args, name)]
    if requested and args.process_index == 0:
        text = (
            "torch.compile is not called: this library runs the program that it captured of "
            "the model"
        )
        warnings.warn(f"{requested[0]}: {text}.", stacklevel=2)


def warn_of_moments(args: Any) -> None:
    """Warn once, on the first rank, of moments of Adam that their type keeps from falling."""
    for line in args.moments.stuck_moments() if args.process_index == 0 else ():
        named = re.sub(r"--([a-z0-9-]+)", lambda flag: flag[1].replace("-", "_"), line)
        warnings.warn(named, stacklevel=2)


def _check(name: str, settings: Mapping[str, Any], taken: Taken) -> None:
    for key, value in settings.items():
        if key not in taken:
            raise ConfigError(
                f"{name}: {key}", repr(value), "there is no such key here", "Leave it out"
            )
        values, reason, remedy = taken[key]
        if values is not None and value not in values:
            raise ConfigError(f"{name}: {key}", repr(value), reason, remedy)
