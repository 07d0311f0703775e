"""The learning-rate schedules of a DeepSpeed configuration, with DeepSpeed's own numbers.

DeepSpeed counts steps from -1, where the rate is lowest; its warm-up begins one step later than
transformers', and rises with the logarithm of the step unless ``warmup_type`` is "linear".
"""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ...errors import ConfigError
from .deepspeed import AUTO, scheduler_of

_WARMUP: Mapping[str, Any] = MappingProxyType({"warmup_num_steps": 1000, "warmup_type": "log"})
_RATES: Mapping[str, Any] = MappingProxyType({**_WARMUP, "warmup_min_lr": 0.0})
# Name -> what DeepSpeed takes for parameters that are missing; None: it has no default, or takes
# that of the optimizer.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "WarmupLR": {**_RATES, "warmup_max_lr": None},
        "WarmupDecayLR": {**_RATES, "warmup_max_lr": 0.001, "total_num_steps": None},
        "WarmupCosineLR": {
            **_WARMUP,
            "warmup_min_ratio": 0.0,
            "cos_min_ratio": 0.0001,
            "total_num_steps": None,
        },
    }
)
# Beside a schedule of DeepSpeed, ``lr_scheduler_type`` has its default or names the same one.
_ALIKE = MappingProxyType(
    {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
)


def check_schedule(args: Any) -> None:
    """Raise ConfigError for a schedule that is unsupported or contradicts arguments."""
    if (scheduler := scheduler_of(args)) is None:
        return
    kind, params = scheduler
    if kind not in _DEFAULTS:
        remedy = f"Use {', '.join(_DEFAULTS)}, or leave the section out and set lr_scheduler_type"
        raise ConfigError(
            "deepspeed: scheduler.type", kind, "there is no such schedule here", remedy
        )
    for name, value in params.items():
        what = f"deepspeed: scheduler.params.{name}"
        if name not in _DEFAULTS[kind]:
            raise ConfigError(what, repr(value), f"{kind} has no such parameter", "Leave it out")
        if name == "warmup_type" and value not in ("log", "linear"):
            raise ConfigError(
                what, repr(value), "there is no such kind of warm-up", "Give log or linear"
            )
        fills = name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name != "warmup_type" and not number and not (fills and value == AUTO):
            raise ConfigError(
                what,
                repr(value),
                "it is not a number",
                'Give one, or "auto"' if fills else "Give one",
            )
    named = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if named not in ("linear", _ALIKE[kind]):
        reason = f"lr_scheduler_type is {named}"
        raise ConfigError("deepspeed: scheduler.type", kind, reason, "Leave out one of the two")
    if args.lr_scheduler_kwargs:
        reason = f"{kind} of the deepspeed configuration does not take them"
        raise ConfigError("lr_scheduler_kwargs", args.lr_scheduler_kwargs, reason, "Leave them out")
    if kind != "WarmupCosineLR":
        _agreed("warmup_max_lr", kind, params, args.learning_rate, argument="learning_rate")
    if args.max_steps > 0:
        _filled(args, args.max_steps, kind, params)


def schedule_of_deepspeed(args: Any, steps: int, optimizer: Optimizer) -> LRScheduler | None:
    """Return the schedule of a DeepSpeed configuration for a run of ``steps``; None if it
    has none.
    """
    if (scheduler := scheduler_of(args)) is None:
        return None
    kind, params = scheduler
    settings = _filled(args, steps, kind, params)
    bases = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    return LambdaLR(
        optimizer, [partial(_factor, kind, settings, args.learning_rate, base) for base in bases]
    )


def _filled(args: Any, steps: int, kind: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters for a run of ``steps``. Raises ConfigError if they contradict
    arguments.
    """
    filled = {**_DEFAULTS[kind], **params}
    warmup = max(1, args.get_warmup_steps(steps))
    filled["warmup_num_steps"] = max(
        2, _agreed("warmup_num_steps", kind, params, warmup, argument="the number of warmup_steps")
    )
    if "total_num_steps" in filled:
        if params.get("total_num_steps") is None:
            what = "deepspeed: scheduler.params.total_num_steps"
            reason = f"{kind} has no default for it"
            raise ConfigError(what, "(missing)", reason, 'Set it to "auto"')
        _agreed("total_num_steps", kind, params, steps, argument="the number of steps of the run")
        filled["total_num_steps"] = steps
    if filled.get("warmup_min_lr") == AUTO:
        filled["warmup_min_lr"] = 0.0
    return filled


def _agreed(name: str, kind: str, params: Mapping[str, Any], value: Any, argument: str) -> Any:
    configured = params.get(name, _DEFAULTS[kind][name])
    if configured in (None, AUTO) or configured == value:
        return value
    missing = "" if name in params else ", and DeepSpeed takes the former where it is missing"
    remedy = 'Set it to "auto", or make the two agree'
    raise ConfigError(
        f"deepspeed: scheduler.params.{name}", configured, f"{argument} is {value}{missing}", remedy
    )


def _factor(kind: str, settings: Mapping[str, Any], rate: float, base: float, done: int) -> float:
    """Return the factor of ``base`` after ``done`` steps. rate: at the end of the warm-up."""
    at = done - 1
    warmup = settings["warmup_num_steps"]
    risen = _risen(settings["warmup_type"], at, warmup)
    if kind == "WarmupCosineLR":
        if at < 0:
            return 0.0
        least = settings["warmup_min_ratio"]
        return least + risen * (1 - least) if at < warmup else _cosine(settings, at - warmup + 1)
    lowest = settings["warmup_min_lr"]
    if kind == "WarmupDecayLR" and at >= warmup:
        total = settings["total_num_steps"]
        risen = max(0.0, (total - at) / max(1.0, total - warmup))
    return (lowest + (rate - lowest) * risen) / (base or 1.0)


def _risen(kind: str, at: int, warmup: int) -> float:
    if at < 0:
        return 0.0
    if at >= warmup:
        return 1.0
    return math.log(at + 1) / math.log(warmup) if kind == "log" else at / warmup


def _cosine(settings: Mapping[str, Any], past: int) -> float:
    least = settings["cos_min_ratio"]
    span = max(1, settings["total_num_steps"] - settings["warmup_num_steps"])
    return max(0.0, least + (1 - least) * (1 + math.cos(math.pi * min(1.0, past / span))) / 2)
