"""The optimizer as callbacks and schedules see it: two groups of parameters whose rates may be changed, no more."""

import math
from collections.abc import Callable, Collection

import torch
from torch import nn
from transformers import TrainingArguments

from ..errors import AbsentError, ConfigError

REMEDY = "Change lr and weight_decay of param_groups; set the rest by the arguments before training"
SHARDED = "parameters, gradients and moments lie sharded in flat buffers"
HONOURED = ("lr", "weight_decay")


def _absent(name: str) -> Callable:
    def refuse(self, *_: object, **__: object) -> None:
        raise ConfigError(f"optimizer.{name}", "(called)", SHARDED, REMEDY)

    return refuse


class ParameterGroups(torch.optim.Optimizer):
    """The two groups that ``transformers.Trainer`` makes: parameters with weight decay, and those without.

    ``lr`` and ``weight_decay`` of each are those of the next update, whoever sets them. Any other change is
    a ``fault``, and any other use raises ConfigError.

    model: its trainable parameters are the groups' ``params``; their values and gradients are not the trained ones.
    decayed: names of parameters with weight decay. args: the rates to begin with.
    """

    def __init__(self, model: nn.Module, decayed: Collection[str], args: TrainingArguments):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name in decayed], "weight_decay": args.weight_decay},
            {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
        ]
        self._complete = False
        betas = (args.adam_beta1, args.adam_beta2)
        super().__init__(groups, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon})
        self._members = [(group["params"], len(group["params"])) for group in self.param_groups]
        self._all = list(model.named_parameters())
        self._trained = [p.requires_grad for _, p in self._all]
        self._opt_called = True  # schedules look here whether updates come before their steps
        self._complete = True

    step, zero_grad = _absent("step"), _absent("zero_grad")
    state_dict, load_state_dict = _absent("state_dict"), _absent("load_state_dict")
    register_step_pre_hook = register_step_post_hook = _absent("register_step_hook")
    register_state_dict_pre_hook = register_state_dict_post_hook = _absent("register_state_dict_hook")
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _absent("register_load_state_dict_hook")

    def add_param_group(self, param_group: dict) -> None:
        if self._complete:
            _absent("add_param_group")(self)
        super().add_param_group(param_group)

    @property
    def state(self) -> None:
        raise AbsentError("optimizer.state", "(asked for)", SHARDED, REMEDY)

    @state.setter
    def state(self, value: object) -> None:
        if self._complete:
            _absent("state")(self)

    def __repr__(self) -> str:
        rates = (", ".join(f"{name} {group[name]}" for name in HONOURED) for group in self.param_groups)
        return f"ParameterGroups({'; '.join(rates)})"

    def rates(self) -> tuple[float, float, float, float]:
        """lr and weight decay of the parameters with decay, then of those without."""
        return tuple(float(group[name]) for group in self.param_groups for name in HONOURED)  # type: ignore

    def fault(self) -> ConfigError | None:
        """What was changed here or in the parameters' ``requires_grad`` and would have no effect; else None."""
        if len(self.param_groups) != len(self._members):
            return ConfigError("optimizer.param_groups", len(self.param_groups), "there are two of them", REMEDY)
        for group, (params, count) in zip(self.param_groups, self._members, strict=True):
            if group["params"] is not params or len(params) != count:
                return ConfigError("optimizer.param_groups", "params", f"they were changed, and {SHARDED}", REMEDY)
            for name in ("betas", "eps"):
                if _tuple(group[name]) != _tuple(self.defaults[name]):
                    reason = "a callback or the schedule changed it, and it is one number of the whole run"
                    return ConfigError(f"optimizer.param_groups {name}", group[name], reason, REMEDY)
        for (name, parameter), trained in zip(self._all, self._trained, strict=True):
            if parameter.requires_grad != trained:
                reason = "requires_grad was changed during the run, and the captured gradients are those before"
                remedy = "Freeze parameters before MerakTrainer is made"
                return ConfigError(name, f"requires_grad={parameter.requires_grad}", reason, remedy)
        if not all(math.isfinite(value) and value >= 0 for value in self.rates()):
            return ConfigError("optimizer.param_groups", self.rates(), "a rate is negative or not finite", "Correct it")
        return None

    def load_rates(self, values: list[float]) -> None:
        """Take back what ``rates`` gave."""
        places = [(group, name) for group in self.param_groups for name in HONOURED]
        for (group, name), value in zip(places, values, strict=True):
            group[name] = float(value)


def _tuple(value: object) -> tuple:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
