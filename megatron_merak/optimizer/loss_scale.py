"""The loss scale of fp16: the factor of gradients in the backward, which keeps small ones from underflowing.

A dynamic scale changes by factors of two. A step whose gradient overflows is skipped; it halves the scale, or uses up
one of `hysteresis`. `window` steps without overflow double the scale:

    scale    8 8 8 4 4 4 4 8 8      hysteresis 2, window 4
    overflow   x x                  the first is tolerated; from then on each halves the scale, until it grows again
"""

from collections.abc import Mapping
from typing import Any

from megatron_merak.config import TrainConfig

_FACTOR = 2.0
# the normal powers of two of fp32
_LEAST = 2.0**-126
_LARGEST = 2.0**127


class LossScaler:
    """The scale of the next step, equal on every rank, because `update` gets the same argument on
    all of them.

    initial:    the first scale.
    minimum:    of the scale.
    window:     steps without overflow before the scale grows; None: the scale is constant.
    hysteresis: number of overflows before the scale is lowered.
    floor:      an overflow at this scale or less is not attributed to the scale; None: ``minimum``.
    setting:    name of the setting of the lowest scale, for error messages.
    """

    def __init__(
        self,
        initial: float = 1.0,
        minimum: float = 1.0,
        window: float | None = None,
        hysteresis: int = 1,
        floor: float | None = None,
        setting: str = "",
    ):
        self.scale = float(initial)
        self.initial = float(initial)
        self.minimum = minimum
        self.window = window
        self.hysteresis = hysteresis
        self.floor = minimum if floor is None else floor
        self.setting = setting
        self.grown = 0
        self.forgiven = 0
        self.to_blame = False

    @property
    def dynamic(self) -> bool:
        return self.window is not None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled at all."""
        return self.dynamic or self.scale != 1.0

    def update(self, overflowed: bool) -> None:
        """Report a step, skipped if it overflowed. Sets `to_blame`: whether a lower scale may avoid
        the overflow.
        """
        self.to_blame = overflowed and self.dynamic and self.scale > self.floor
        if self.window is None:
            return
        if overflowed:
            self.grown = 0
            self.forgiven += 1
            if self.forgiven >= self.hysteresis:
                self.scale = max(self.scale / _FACTOR, self.minimum)
            return
        self.grown += 1
        if self.grown >= self.window:
            self.grown = self.forgiven = 0
            self.scale = self.scale if self.scale * _FACTOR > _LARGEST else self.scale * _FACTOR

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, as JSON; None for a constant scale."""
        return (
            {"scale": self.scale, "grown": self.grown, "forgiven": self.forgiven}
            if self.dynamic
            else None
        )

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a `state`, or from the initial scale where the saved run had none; see
        `is_state`.
        """
        if self.dynamic:
            saved = state or {"scale": self.initial, "grown": 0, "forgiven": 0}
            self.scale = max(float(saved["scale"]), self.minimum)
            self.grown = saved["grown"]
            self.forgiven = saved["forgiven"]


def is_state(value: Any) -> bool:
    """Whether a value from JSON is a valid `state` of a scaler."""
    if not isinstance(value, dict) or type(value.get("scale")) not in (int, float):
        return False
    counts = (value.get("grown"), value.get("forgiven"))
    return _LEAST <= value["scale"] <= _LARGEST and all(
        type(count) is int and count >= 0 for count in counts
    )


def scaler_of_run(train: TrainConfig) -> LossScaler:
    """Return the scaler given by Megatron-LM's flags and rules."""
    if not train.fp16:
        return LossScaler()
    if train.loss_scale:
        return LossScaler(train.loss_scale, setting="--loss-scale")
    return LossScaler(
        train.initial_loss_scale,
        train.min_loss_scale,
        train.loss_scale_window,
        train.hysteresis,
        setting="--min-loss-scale",
    )


def scaler_of_torch() -> LossScaler:
    """Return a scaler with the rules and defaults of torch.amp.GradScaler, which
    transformers.Trainer uses.
    """
    return LossScaler(65536.0, _LEAST, 2000, 1, floor=1.0)
