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
OFFLOAD = "offload"  # an option of ``fsdp``
# Keys of ``fsdp_config`` that are that option.
OFFLOADS = ("cpu_offload", "offload_params")
PRECISION = ("bf16 decides what is computed in what", "Leave it out")
XLA = ("XLA is not used", "Leave it out")
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


def offload_of(args: Any) -> str | None:
    """Return the name of what requests weights, gradients and optimizer state in host memory; None
    if nothing does. Raises ConfigError for strategies that leave some of them on the device.
    """
    config = _config(args.fsdp_config)
    named = _named(args.fsdp, config)
    if named is None:
        return None
    keys = [f"fsdp_config: {key}" for key in OFFLOADS if _truth(key, config)]
    found = [f"fsdp: {OFFLOAD}"] if OFFLOAD in _options(args.fsdp) else keys
    if not found:
        return None
    if named != "full_shard":
        reason = f"with {named} devices keep weights, or add up shards, themselves"
        raise ConfigError(found[0], repr(args.fsdp), reason, "Use full_shard")
    return found[0]


def _options(fsdp: Any) -> list[str]:
    options = [] if fsdp is True else fsdp.split() if isinstance(fsdp, str) else [*fsdp]
    return [getattr(option, "value", option) for option in options]


def _named(fsdp: Any, config: Mapping[str, Any]) -> str | None:
    """Return what ``fsdp`` and ``reshard_after_forward`` request together, by
    transformers' name.
    """
    if not fsdp:
        for key in ("reshard_after_forward", "activation_checkpointing", *OFFLOADS):
            if config.get(key) not in (None, False, "false"):
                raise ConfigError(
                    f"fsdp_config: {key}",
                    config[key],
                    "fsdp is not set",
                    "Set fsdp, or leave it out",
                )
        return None
    options = _options(fsdp)
    for option in options:
        if option not in (*STRATEGIES, OFFLOAD, "auto_wrap"):
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
        if key in ("reshard_after_forward", "activation_checkpointing", *OFFLOADS):
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
