"""What training on a number of tokens takes: steps, days, hours of devices, and money."""

import math
import re
from dataclasses import dataclass

from megatron_merak.counting import counted
from megatron_merak.errors import ConfigError
from megatron_merak.plan import Plan, interval

TOKENS = "--tokens"
PRICE = "--price-per-gpu-hour"
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_DAY = 86400


@dataclass(frozen=True)
class Budget:
    """What a user asks of a whole run.

    tokens: to train on.
    price:  of a device's hour, in any currency; None: unknown.
    """

    tokens: float
    price: float | None = None

    @classmethod
    def of(cls, tokens: str | None, price: str | None) -> "Budget | None":
        """Read ``--tokens`` and ``--price-per-gpu-hour``; None without either. Raises
        ConfigError.
        """
        if tokens is None and price is not None:
            raise ConfigError(PRICE, price, f"it has no effect without {TOKENS}", f"Add {TOKENS}")
        if tokens is None:
            return None
        return cls(tokens_of(tokens), None if price is None else _price_of(price))


def tokens_of(text: str) -> float:
    """Read a number of tokens such as "1.4T", "300B" or "1000000". Raises ConfigError."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([KMBT]?)", text.strip().upper())
    value = float(found[1]) * _SIZES[found[2]] if found else 0.0
    if not 1 <= value < 1e18:
        reason = "it is no number of tokens"
        raise ConfigError(TOKENS, text, reason, "Write one such as 1.4T, 300B or 1000000")
    return value


def _price_of(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e9:
        raise ConfigError(PRICE, text, "it is no price", "Write a number such as 2.5")
    return value


def budget_text(plan: Plan, budget: Budget) -> str:
    """Return a line on the whole run, with the interval of the predicted step where there is one.

    Raises ConfigError for a plan whose samples have no number of tokens.
    """
    per_step = plan.global_batch_size * plan.sequence_length
    if not per_step:
        reason = "the samples of this plan have no number of tokens"
        raise ConfigError(TOKENS, f"{budget.tokens:g}", reason, "Give --seq-length")
    steps = math.ceil(budget.tokens / per_step)
    days = steps * plan.predicted_time / _DAY
    hours = 24 * days * plan.grid.size
    device = plan.cluster.device_names
    found = interval(plan)
    between = ""
    if found:
        low, high = (steps * seconds / _DAY for seconds in found)
        between = f" (p10 to p90: {_number(low)} to {_number(high)})"
    parts = [
        f"{_short(budget.tokens)} tokens: {counted(steps, 'step')}, {_number(days)} days{between}",
        f"{_number(hours)} hours of {device}",
    ]
    if budget.price is not None:
        parts.append(f"{_number(hours * budget.price)} at {budget.price:g} an hour")
    return ", ".join(parts)


def _number(value: float) -> str:
    """Three digits of a number below 1,000, all before the point of others."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _short(tokens: float) -> str:
    suffix, size = max(
        ((suffix, size) for suffix, size in _SIZES.items() if size <= tokens),
        key=lambda pair: pair[1],
    )
    return f"{tokens / size:g}{suffix}"
