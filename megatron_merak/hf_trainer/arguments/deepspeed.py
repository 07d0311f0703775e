"""``deepspeed`` of transformers: a DeepSpeed configuration in terms of this library; unsupported
keys are errors.

Neither DeepSpeed nor accelerate is needed. ZeRO's stage is a sharding strategy. A key that repeats
an argument must be "auto" or equal, as in transformers; so must DeepSpeed's default of a missing
key.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from ...errors import ConfigError
from ...optimizer.loss_scale import LossScaler, scaler_of_torch
from .deepspeed_keys import SECTIONS, TOP, Keys
from .settings import asks_nothing, settings_of

STAGES: Mapping[Any, str] = MappingProxyType(
    {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
)
AUTO = "auto"
_OFFLOADS = ("offload_optimizer", "offload_param")
_PARAMETERS = 3  # the stage of which both are
_OFFLOAD_FREE = """pin_memory buffer_count buffer_size max_in_cpu nvme_path pipeline_read
    pipeline_write fast_init""".split()
_OFFLOAD_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType({"ratio": (1, 1.0)})
# devices that nothing is offloaded to; transformers fills in "auto" so
_NOWHERE = (None, "none", AUTO)
_AGREE = 'Set it to "auto", or make the two agree'
# a script's own way to what a section is
_METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optimizer": (
            "create_optimizer",
            "get_decay_parameter_names",
            "get_optimizer_cls_and_kwargs",
        ),
        "scheduler": ("create_scheduler",),
    }
)
_ADAMS = ("adam", "adamw")
_SAME_OPTIM = ("adamw_torch", "adamw_torch_fused")
_OPTIMS: Mapping[str, str] = MappingProxyType(
    {"lion": "lion_32bit", "adagrad": "adagrad", "muon": "muon"}
)
# Parameters of Adam that repeat an argument -> what DeepSpeed takes where they are missing.
_ADAM: Mapping[str, Any] = MappingProxyType(
    {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
)
_ADAM_FREE = ("torch_adam", "foreach", "fused", "set_grad_none")
_ADAM_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"bias_correction": (True,), "amsgrad": (False,), "fp32_optimizer_states": (None, True)}
)
_SCALE: Mapping[str, float] = MappingProxyType(
    {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }
)


def config_of(args: Any) -> Mapping[str, Any]:
    """Return the configuration that ``args.deepspeed`` has or names; empty if there is none.

    Raises ConfigError for an unsupported key.
    """
    config = settings_of("deepspeed", args.deepspeed)
    _check_keys("", config, TOP)
    for name, keys in SECTIONS.items():
        _check_keys(name, _section(config, name), keys)
    return config


def strategy_of(args: Any) -> str | None:
    """Return the sharding strategy of ZeRO's stage; None without a configuration. Raises
    ConfigError.
    """
    if not args.deepspeed:
        return None
    config = config_of(args)
    what = "deepspeed: zero_optimization"
    if "zero_optimization" not in config:
        raise ConfigError(
            what, None, "it is missing", 'Give its stage: {"stage": 0} shares nothing'
        )
    stage = config["zero_optimization"].get("stage", 0)
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(
            f"{what}.stage", repr(stage), "there is no such stage", "Give 0, 1, 2 or 3"
        )
    return STAGES[stage]


def offload_of(args: Any) -> str | None:
    """Return the name of what requests weights, gradients and optimizer state in host memory; None
    if nothing does. Raises ConfigError for requests that leave some of them elsewhere.
    """
    if not args.deepspeed:
        return None
    config = config_of(args)
    zero = _section(config, "zero_optimization")
    asked = {}
    for name in _OFFLOADS:
        section = zero.get(name)
        device = section.get("device") if isinstance(section, Mapping) else section or None
        if device not in _NOWHERE:
            asked[f"deepspeed: zero_optimization.{name}"] = (device, section)
    for what, (device, section) in asked.items():
        if device != "cpu":
            reason = "what is offloaded is in memory of the host"
            raise ConfigError(what, device, reason, "Use cpu")
        for key, value in section.items() if isinstance(section, Mapping) else ():
            if key not in ("device", *_OFFLOAD_FREE):
                allowed = _OFFLOAD_NEUTRAL.get(key, ())
                if value not in allowed:
                    reason = "everything is offloaded" if allowed else "there is no such key here"
                    raise ConfigError(f"{what}.{key}", repr(value), reason, "Leave it out")
        if len(asked) < len(_OFFLOADS) or zero.get("stage", 0) != _PARAMETERS:
            other = " and ".join(_OFFLOADS)
            reason = "weights, gradients and optimizer state are in host memory together"
            raise ConfigError(what, device, reason, f"Set stage {_PARAMETERS}, {other}, or neither")
    return next(iter(asked), None)


def tensor_parallel_of(args: Any) -> int:
    """Return ``tensor_parallel.autotp_size``; 1 if unset."""
    size = _section(config_of(args), "tensor_parallel").get("autotp_size") or 1
    if type(size) is not int or size < 1:
        what = "deepspeed: tensor_parallel.autotp_size"
        raise ConfigError(what, repr(size), "it counts ranks", "Give a whole number, 1 or more")
    return size


def scaler_of(args: Any) -> LossScaler:
    """Return the loss scaler of fp16: by the DeepSpeed configuration, else torch's."""
    if not args.deepspeed:
        return scaler_of_torch()
    section = _section(config_of(args), "fp16")
    settings = {name: section.get(name, default) for name, default in _SCALE.items()}
    for name, value in settings.items():
        least = 0 if name in ("loss_scale", "initial_scale_power") else 1
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            remedy = f"Give {least} or more, or leave it out"
            raise ConfigError(
                f"deepspeed: fp16.{name}", repr(value), "it is not a valid number", remedy
            )
    setting = "deepspeed: fp16.min_loss_scale"
    if settings["loss_scale"]:
        return LossScaler(settings["loss_scale"], setting="deepspeed: fp16.loss_scale")
    first = 2.0 ** settings["initial_scale_power"]
    least = settings["min_loss_scale"]
    return LossScaler(
        first, least, settings["loss_scale_window"], int(settings["hysteresis"]), setting=setting
    )


def decayed_by_deepspeed(args: Any, model: nn.Module) -> list[str]:
    """Return the parameters that DeepSpeed's own optimizer decays: all; none if it is not
    configured.
    """
    if not (args.deepspeed and "optimizer" in config_of(args)):
        return []
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def scheduler_of(args: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return name and parameters of DeepSpeed's schedule; None if transformers' is used."""
    section = config_of(args).get("scheduler") if args.deepspeed else None
    if section is None:
        return None
    if not isinstance(section, Mapping) or not isinstance(section.get("params", {}), Mapping):
        raise ConfigError(
            "deepspeed: scheduler", repr(section), "it is not a mapping", "Give its type and params"
        )
    return str(section.get("type")), section.get("params", {})


def check_repeats(args: Any, replicas: int) -> None:
    """Raise ConfigError, naming both, if the configuration contradicts an argument that it repeats.

    replicas: number that share a step.
    """
    if not args.deepspeed:
        return
    config = config_of(args)
    micro = args.per_device_train_batch_size
    steps = args.gradient_accumulation_steps
    product = (
        f"per_device_train_batch_size {micro} x gradient_accumulation_steps {steps} x "
        f"{replicas} replicas"
    )
    _same("train_micro_batch_size_per_gpu", config, micro, "per_device_train_batch_size")
    _same("gradient_accumulation_steps", config, steps, "gradient_accumulation_steps")
    _same("train_batch_size", config, micro * steps * replicas, product)
    if "gradient_clipping" not in config and args.max_grad_norm:
        reason = f"without it DeepSpeed does not clip, and max_grad_norm is {args.max_grad_norm}"
        raise ConfigError(
            "deepspeed: gradient_clipping",
            "(missing)",
            reason,
            'Set it to "auto", or max_grad_norm=0',
        )
    _same("gradient_clipping", config, args.max_grad_norm, "max_grad_norm")
    for name in ("bf16", "fp16"):
        _same(f"{name}.enabled", _section(config, name), getattr(args, name), name)
    if args.fp16:
        scaler_of(args)
    if "optimizer" in config:
        _check_adam(args, config["optimizer"])


def refuse_beside_deepspeed(trainer: Any, base: type) -> None:
    """Raise ConfigError if a script has its own optimizer or schedule beside those of the
    configuration.

    base: the class that the script's trainer is derived from.
    """
    settings = {
        "optimizer": (trainer._given_optimizer, trainer.optimizer_cls_and_kwargs),
        "scheduler": (trainer._given_scheduler,),
    }
    for section, methods in _METHODS.items():
        if not trainer.args.deepspeed or section not in config_of(trainer.args):
            continue
        beside = [
            name for name in methods if getattr(type(trainer), name) is not getattr(base, name)
        ]
        if any(each is not None for each in settings[section]):
            beside.append(f"the {section} given to {type(trainer).__name__}")
        if beside:
            reason = f"deepspeed has a section {section}, which transformers uses instead"
            raise ConfigError(beside[0], "(of the script)", reason, "Leave out one of the two")


def _check_adam(args: Any, section: Mapping[str, Any]) -> None:
    kind = str(section.get("type"))
    params = section.get("params") or {}
    optim = getattr(args.optim, "value", args.optim)
    if kind.lower() not in _ADAMS:
        instead = _OPTIMS.get(kind.lower(), "...")
        remedy = f'Leave the section out, and set optim="{instead}" (docs/optimizers.md)'
        raise ConfigError(
            "deepspeed: optimizer.type", kind, "only Adam and AdamW are supported here", remedy
        )
    if optim not in _SAME_OPTIM:
        raise ConfigError(
            "deepspeed: optimizer.type", kind, f"optim is {optim}", "Leave out one of the two"
        )
    for name, value in params.items():
        what = f"deepspeed: optimizer.params.{name}"
        if name == "adam_w_mode":
            if not value and args.weight_decay and kind.lower() == "adam":
                raise ConfigError(
                    what,
                    value,
                    "only AdamW has weight decay",
                    "Leave it out, or set weight_decay=0",
                )
        elif name in _ADAM_NEUTRAL:
            if value not in _ADAM_NEUTRAL[name]:
                raise ConfigError(what, value, "it would be another optimizer", "Leave it out")
        elif name == "max_grad_norm":
            raise ConfigError(
                what,
                value,
                "DeepSpeed does not take it",
                "Set gradient_clipping of the configuration",
            )
        elif name not in _ADAM and name not in _ADAM_FREE:
            raise ConfigError(what, repr(value), "there is no such parameter", "Leave it out")
    ours = {
        "lr": (args.learning_rate, "learning_rate"),
        "betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1 and adam_beta2"),
        "eps": (args.adam_epsilon, "adam_epsilon"),
        "weight_decay": (args.weight_decay, "weight_decay"),
    }
    settings = {**_ADAM, **params}
    for name, (value, argument) in ours.items():
        _same(f"optimizer.params.{name}", settings, value, argument, missing=name not in params)


def _same(
    path: str, section: Mapping[str, Any], value: Any, argument: str, missing: bool = False
) -> None:
    """Raise ConfigError unless the last part of ``path`` is absent in its section, "auto" or
    ``value``.
    """
    name = path.rpartition(".")[2]
    configured = section.get(name)
    configured = list(configured) if isinstance(configured, tuple) else configured
    if configured in (None, AUTO) or configured == value:
        return
    reason = f"{argument} is {value}" + (
        ", and DeepSpeed takes the former where it is missing" if missing else ""
    )
    raise ConfigError(f"deepspeed: {path}", repr(configured), reason, _AGREE)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"deepspeed: {name}", repr(section), "it is not a mapping", "Give a dict")
    return section or {}


def _check_keys(section: str, settings: Mapping[str, Any], keys: Keys) -> None:
    for name, value in settings.items():
        what = f"deepspeed: {section}.{name}" if section else f"deepspeed: {name}"
        plain = name.removeprefix("stage3_") if section == "zero_optimization" else name
        if plain in keys.neutral:
            harmless, reason, remedy = keys.neutral[plain]
            if value not in harmless:
                raise ConfigError(what, repr(value), reason, remedy)
        elif plain in keys.off:
            if not asks_nothing(value):
                raise ConfigError(what, repr(value), *keys.off[plain])
        elif (
            plain not in keys.read | keys.free
            and not (section == "" and name in SECTIONS)
            and plain not in _OFFLOADS
        ):
            raise ConfigError(what, repr(value), "there is no such key here", "Leave it out")
