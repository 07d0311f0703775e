"""The loss scale of fp16: what gradients are multiplied by while they are computed, so that small ones are not lost.

A dynamic scale moves by powers of two. A step whose gradient overflowed is skipped and halves it, or uses up one of
`hysteresis`; `window` steps without one double it:

    scale    8 8 8 4 4 4 4 8 8      hysteresis 2, window 4
    overflow   x x                  the first is forgiven; once it is, every one counts until the scale has grown
"""

from collections.abc import Mapping
from typing import Any

from megatron_merak.config import TrainConfig

_FACTOR = 2.0
_LEAST, _LARGEST = 2.0**-126, 2.0**127  # the normal powers of two of fp32


class LossScaler:
    """The scale of the next step, alike on every rank: `update` is told what all of them know.

    initial: the first scale. minimum: it is lowered no further. window: steps without overflow before it grows; None:
    it never moves. hysteresis: overflows before it is lowered. floor: at a scale of this or less the scale is not to
    blame for an overflow (None: ``minimum``). setting: what the user calls the lowest scale, to be told to lower it.
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
        self.scale, self.initial, self.minimum, self.window = float(initial), float(initial), minimum, window
        self.hysteresis, self.floor, self.setting = hysteresis, minimum if floor is None else floor, setting
        self.grown, self.forgiven = 0, 0
        self.to_blame = False

    @property
    def dynamic(self) -> bool:
        return self.window is not None

    @property
    def scales(self) -> bool:
        """Whether there is a loss scale at all."""
        return self.dynamic or self.scale != 1.0

    def update(self, overflowed: bool) -> None:
        """A step is done, or skipped because its gradient was not finite. `to_blame`: a lower scale may help then."""
        self.to_blame = overflowed and self.dynamic and self.scale > self.floor
        if not self.dynamic:
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
        """What a checkpoint keeps, as JSON; None of a scale that never moves."""
        return {"scale": self.scale, "grown": self.grown, "forgiven": self.forgiven} if self.dynamic else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a `state`, or from the start where the saved run had none; see `is_state`."""
        if self.dynamic:
            found = state or {"scale": self.initial, "grown": 0, "forgiven": 0}
            self.scale = max(float(found["scale"]), self.minimum)
            self.grown, self.forgiven = found["grown"], found["forgiven"]


def is_state(value: Any) -> bool:
    """Whether a value from JSON can be the `state` of a scale."""
    if not isinstance(value, dict) or type(value.get("scale")) not in (int, float):
        return False
    counts = (value.get("grown"), value.get("forgiven"))
    return _LEAST <= value["scale"] <= _LARGEST and all(type(count) is int and count >= 0 for count in counts)


def scaler_of_run(train: TrainConfig) -> LossScaler:
    """By Megatron-LM's flags and rules."""
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
    """By the rules and defaults of torch.amp.GradScaler, which transformers.Trainer uses; there is no lowest scale."""
    return LossScaler(65536.0, _LEAST, 2000, 1, floor=1.0)
