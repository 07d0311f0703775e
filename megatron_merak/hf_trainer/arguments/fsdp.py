"""``fsdp`` and ``fsdp_config`` of transformers in terms of this library's sharding strategies; the
rest are errors.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...errors import ConfigError
from .settings import settings_of

STRATEGIES: Mapping[str, str] = MappingProxyType(
    {
        "full_shard": "optim_grads_params",
        "shard_grad_op": "optim_grads",
        "no_shard": "no_shard",
        "hybrid_shard": "optim_grads_params",
        "hybrid_shard_zero2": "optim_grads",
    }
)
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")  # shard inside a node; each node has a copy of all
OFFLOAD = (
    "nothing is kept in the host's memory",
    "Leave it out, or raise tensor_model_parallel_size",
)
PRECISION = ("bf16 decides what is computed in what", "Leave it out")
XLA = ("XLA is not used", "Leave it out")
# Option of ``fsdp`` -> (why it is refused, what to do).
OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType({"offload": OFFLOAD})
# Keys of ``fsdp_config`` that change neither numbers nor what is sharded: what is wrapped is a unit
# of the plan here, weights are gathered one unit ahead, and each rank reads its own part of a
# checkpoint.
WITHOUT_EFFECT = frozenset(
    """version auto_wrap_policy min_num_params transformer_layer_cls_to_wrap backward_prefetch forward_prefetch
    use_orig_params sync_module_states limit_all_gathers cpu_ram_efficient_loading""".split()
)
# Key -> (values that ask for nothing, why others are refused, what to do).
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str, str]] = MappingProxyType(
    {
        "cpu_offload": ((None, False, "false"), *OFFLOAD),
        "offload_params": ((None, False, "false"), *OFFLOAD),
        "state_dict_type": (
            (None, "FULL_STATE_DICT"),
            "a checkpoint is a HuggingFace directory, which every layout reads",
            "Use FULL_STATE_DICT",
        ),
        "mixed_precision": ((None,), *PRECISION),
        "mixed_precision_policy": ((None,), *PRECISION),
        "xla": ((None, False, "false"), *XLA),
        "xla_fsdp_v2": ((None, False, "false"), *XLA),
        "xla_fsdp_grad_ckpt": ((None, False, "false"), *XLA),
        "xla_fsdp_settings": ((None, {}), *XLA),
    }
)
TRUTH: Mapping[str, bool] = MappingProxyType({"true": True, "1": True, "false": False, "0": False})


def strategy_of(args: Any) -> str | None:
    """Return the sharding strategy that ``fsdp`` and ``fsdp_config`` request; None if none. Raises
    ConfigError.
    """
    named = _named(args.fsdp, _config(args.fsdp_config))
    return None if named is None else STRATEGIES[named]


def hybrid_of(args: Any) -> str | None:
    """Return the strategy of ``fsdp`` that shards inside nodes, by transformers' name; None if it
    is none of these.
    """
    named = _named(args.fsdp, _config(args.fsdp_config))
    return named if named in HYBRID else None


def recomputes(args: Any) -> bool:
    """Whether ``fsdp_config`` requests activation checkpointing."""
    return bool(args.fsdp) and bool(_truth("activation_checkpointing", _config(args.fsdp_config)))


def _named(fsdp: Any, config: Mapping[str, Any]) -> str | None:
    """Return what ``fsdp`` and ``reshard_after_forward`` request together, by
    transformers' name.
    """
    if not fsdp:
        for key in ("reshard_after_forward", "activation_checkpointing"):
            if config.get(key) not in (None, False, "false"):
                raise ConfigError(
                    f"fsdp_config: {key}",
                    config[key],
                    "fsdp is not set",
                    "Set fsdp, or leave it out",
                )
        return None
    options = [] if fsdp is True else fsdp.split() if isinstance(fsdp, str) else [*fsdp]
    options = [getattr(option, "value", option) for option in options]
    for option in options:
        if option in OPTIONS:
            raise ConfigError(f"fsdp: {option}", repr(fsdp), *OPTIONS[option])
        if option not in (*STRATEGIES, "auto_wrap"):
            remedy = f"Use {' or '.join(STRATEGIES)}"
            raise ConfigError("fsdp", repr(fsdp), f"there is no option {option}", remedy)
    named = [option for option in options if option in STRATEGIES]
    if len(named) > 1 or (options and not named):
        reason = f"it names {len(named)} strategies" if named else "it names no strategy"
        raise ConfigError("fsdp", repr(fsdp), reason, f"Use one of {', '.join(STRATEGIES)}")
    after = _after_forward(config, bool(named) and named[0] in HYBRID)
    if named and after not in (None, named[0]):
        reason = f"fsdp is {named[0]}"
        raise ConfigError(
            "fsdp_config: reshard_after_forward",
            config["reshard_after_forward"],
            reason,
            "Leave it out",
        )
    return named[0] if named else after or "full_shard"


def _after_forward(config: Mapping[str, Any], hybrid: bool) -> str | None:
    """Return the strategy that ``reshard_after_forward`` means: a truth value, or a strategy's name
    in FSDP1.

    hybrid: whether ``fsdp`` names a strategy that shards inside nodes.
    """
    value = config.get("reshard_after_forward")
    if value is None or str(value) in STRATEGIES:
        return value
    if str(value) in OPTIONS:
        raise ConfigError("fsdp_config: reshard_after_forward", value, *OPTIONS[value])
    after, unsharded = HYBRID if hybrid else ("full_shard", "shard_grad_op")
    return after if _truth("reshard_after_forward", config) else unsharded


def _truth(key: str, config: Mapping[str, Any]) -> bool:
    """Return a truth value of ``fsdp_config``, False if unset; files and command lines
    have text.
    """
    value = config.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    if str(value).lower() not in TRUTH:
        raise ConfigError(
            f"fsdp_config: {key}", repr(value), "it is neither true nor false", "Give one of them"
        )
    return TRUTH[str(value).lower()]


def _config(config: Any) -> dict[str, Any]:
    """Return the keys of ``fsdp_config`` that have an effect. Raises ConfigError for
    refused ones.
    """
    settings = {}
    for name, value in settings_of("fsdp_config", config).items():
        key = name.removeprefix("fsdp_")
        if key in ("reshard_after_forward", "activation_checkpointing"):
            settings[key] = value
        elif key in NEUTRAL:
            harmless, reason, remedy = NEUTRAL[key]
            value = (
                value.lower() if str(value).lower() == "false" and isinstance(value, str) else value
            )
            if value not in harmless:
                raise ConfigError(f"fsdp_config: {name}", repr(value), reason, remedy)
        elif key not in WITHOUT_EFFECT:
            raise ConfigError(
                f"fsdp_config: {name}", repr(value), "there is no such key here", "Leave it out"
            )
    return settings
