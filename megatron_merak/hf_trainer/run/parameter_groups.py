"""The optimizer that callbacks and schedules see: parameter groups whose rates may be changed, and
nothing else.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ...errors import AbsentError, ConfigError

REMEDY = "Change lr and weight_decay of param_groups; set the rest by the arguments before training"
SHARDED = "parameters, gradients and moments lie sharded in flat buffers"
HONOURED = ("lr", "weight_decay")
_FREE = frozenset((*HONOURED, "params", "initial_lr", "param_names"))


def _absent(name: str) -> Callable:
    def refuse(self, *_: object, **__: object) -> None:
        raise ConfigError(f"optimizer.{name}", "(called)", SHARDED, REMEDY)

    return refuse


class ParameterGroups(torch.optim.Optimizer):
    """The groups of ``optimizer``, whose state and steps are the engine's.

    optimizer: made by the script or as transformers would; its ``param_groups`` are these.
    model:     its trainable parameters are the groups' ``params``; their values and gradients are
               not the trained ones.

    ``lr`` and ``weight_decay`` of the groups apply to the next update, whoever sets them.
    Parameters may be frozen and thawed by ``requires_grad``. Any other change is a ``fault``, and
    any other use raises ConfigError.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        self._complete = False
        self._optimizer = optimizer
        super().__init__(
            [dict(group) for group in optimizer.param_groups], dict(optimizer.defaults)
        )
        # the very same, which a schedule of ``optimizer`` changes, too
        self.param_groups = optimizer.param_groups
        self._members = [(group["params"], len(group["params"])) for group in self.param_groups]
        self._fixed = [
            {key: group[key] for key in group.keys() - _FREE} for group in self.param_groups
        ]
        self._all = list(model.named_parameters())
        self._trained = [p.requires_grad for _, p in self._all]
        members = {id(parameter) for params, _ in self._members for parameter in params}
        self._leaves_some = any(p.requires_grad and id(p) not in members for _, p in self._all)
        # Schedules look here whether updates come before their steps.
        self._opt_called = True
        vars(optimizer)["_opt_called"] = True
        self._complete = True

    step = _absent("step")
    zero_grad = _absent("zero_grad")
    state_dict = _absent("state_dict")
    load_state_dict = _absent("load_state_dict")
    register_step_pre_hook = register_step_post_hook = _absent("register_step_hook")
    register_state_dict_pre_hook = register_state_dict_post_hook = _absent(
        "register_state_dict_hook"
    )
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _absent(
        "register_load_state_dict_hook"
    )

    def add_param_group(self, param_group: dict) -> None:
        if self._complete:
            _absent("add_param_group")(self)
        super().add_param_group(param_group)

    @property
    def state(self) -> Any:  # an attribute in torch
        raise AbsentError("optimizer.state", "(asked for)", SHARDED, REMEDY)

    @state.setter
    def state(self, value: object) -> None:
        if self._complete:
            _absent("state")(self)

    def __repr__(self) -> str:
        rates = (
            ", ".join(f"{name} {value}" for name, value in zip(HONOURED, pair, strict=True))
            for pair in self.pairs()
        )
        return f"ParameterGroups({type(self._optimizer).__name__}: {'; '.join(rates)})"

    def moves(self, scheduler: LRScheduler) -> bool:
        """Whether a schedule changes the rates of these groups."""
        return getattr(scheduler, "optimizer", None) in (self, self._optimizer)

    def pairs(self) -> list[tuple[float, float]]:
        """Return learning rate and weight decay of each group, 0 for an optimizer without decay."""
        return [
            (float(group["lr"]), float(group.get("weight_decay", 0.0)))
            for group in self.param_groups
        ]

    def of_engine(self) -> list[tuple[float, float]]:
        """Return `pairs`, and one more for parameters in no group, which stay as they are."""
        others = [(0.0, 0.0)] if self._leaves_some else []
        return self.pairs() + others

    def rates(self) -> tuple[float, ...]:
        """Return `pairs` as one flat list."""
        return tuple(rate for pair in self.pairs() for rate in pair)

    def fault(self) -> ConfigError | None:
        """Return the change, of groups or of ``requires_grad``, that would have no effect; None
        without one.
        """
        if len(self.param_groups) != len(self._members):
            reason = f"there were {len(self._members)} of them before"
            return ConfigError("optimizer.param_groups", len(self.param_groups), reason, REMEDY)
        for group, (params, count), fixed in zip(
            self.param_groups, self._members, self._fixed, strict=True
        ):
            if group["params"] is not params or len(params) != count:
                return ConfigError(
                    "optimizer.param_groups", "params", f"they were changed, and {SHARDED}", REMEDY
                )
            for name, value in fixed.items():
                if _tuple(group.get(name)) != _tuple(value):
                    reason = "a callback or the schedule changed it, and it is fixed for the run"
                    return ConfigError(
                        f"optimizer.param_groups {name}", group.get(name), reason, REMEDY
                    )
        if (thawed := self._thawed()) is not None:
            return thawed
        if not all(math.isfinite(value) and value >= 0 for value in self.rates()):
            return ConfigError(
                "optimizer.param_groups",
                self.rates(),
                "a rate is negative or not finite",
                "Correct it",
            )
        return None

    def frozen(self) -> list[str]:
        """Return the parameters that were trainable when the model was captured, and are frozen
        now.
        """
        return [
            name
            for (name, parameter), trained in zip(self._all, self._trained, strict=True)
            if trained and not parameter.requires_grad
        ]

    def _thawed(self) -> ConfigError | None:
        """Return the error for a change of ``requires_grad`` that cannot be followed."""
        for (name, parameter), trained in zip(self._all, self._trained, strict=True):
            if parameter.requires_grad and not trained:
                reason = (
                    "it was frozen when the model was captured, so that it has no gradient "
                    "and no place in steps"
                )
                remedy = (
                    "Leave it trainable until training begins, and freeze it in the "
                    "callback's on_train_begin"
                )
                return ConfigError(name, "requires_grad=True", reason, remedy)
        if any(self._trained) and len(self.frozen()) == sum(self._trained):
            reason = "a callback has frozen every parameter, so that there is no gradient"
            return ConfigError("model", "(frozen)", reason, "Leave a parameter trainable")
        return None

    def load_rates(self, values: list[float]) -> None:
        """Set the rates from what ``rates`` returned."""
        places = [(group, name) for group in self.param_groups for name in HONOURED]
        for (group, name), value in zip(places, values, strict=True):
            if name in group:
                group[name] = float(value)


def _tuple(value: object) -> tuple:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
