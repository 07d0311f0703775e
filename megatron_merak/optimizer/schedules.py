"""Learning rate and weight decay as functions of completed optimizer steps or samples, by Megatron-LM's formulas.

lr  |      ______                  warm-up, then a style: constant, linear, cosine, inverse-square-root or WSD
    |     /      \\___              (warm-up, stable, decay: https://arxiv.org/abs/2404.06395)
    |____/           \\____ min_lr
    +----|-------|---|---- t
       warm-up        decay
"""

from collections.abc import Callable, Mapping
from math import cos, pi, sqrt

from megatron_merak.config import OptimizerConfig

# x in [0, 1] is the completed fraction of the decay; the value decreases from 1 to 0.
DECAY_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (cos(pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - sqrt(x),
}


def learning_rate(config: OptimizerConfig, done: int, total: int) -> float:
    """Return the learning rate of the step after ``done`` of ``total`` optimizer steps; 0 for the
    first step.

    With --train-samples both count samples, as do all lengths in ``config``. `lr_warmup_fraction`
    is a fraction of the decay.
    """
    assert config.lr is not None, "without --lr nothing is trained"
    peak = config.lr
    floor = config.final_lr
    decay = total if config.decay is None else config.decay
    warmup = warmup_length(config, decay)
    style = config.lr_decay_style
    if warmup > 0 and done <= warmup:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * done / warmup
    if style == "constant":
        return peak
    if done > decay:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * sqrt(max(warmup, 1)) / sqrt(max(done, 1)))
    if style == "WSD":
        return floor + (peak - floor) * _stable_then_decay(config, done, decay)
    return floor + (peak - floor) * DECAY_SHAPES[style]((done - warmup) / (decay - warmup))


def warmup_length(config: OptimizerConfig, decay: int) -> float:
    """Return the length of the warm-up, in the unit of ``decay``; not rounded if it is configured
    as a fraction.
    """
    return config.warmup if config.lr_warmup_fraction is None else config.lr_warmup_fraction * decay


def _stable_then_decay(config: OptimizerConfig, done: int, decay: int) -> float:
    assert config.anneal, "WSD needs the length of its decay"
    over = done - (decay - config.anneal)
    return 1.0 if over <= 0 else DECAY_SHAPES[config.lr_wsd_decay_style](over / config.anneal)


def weight_decay(config: OptimizerConfig, done: int, total: int) -> float:
    """Return the weight decay of the step after ``done`` of ``total`` steps, or samples."""
    if config.weight_decay_incr_style == "constant":
        return config.weight_decay
    start = config.start_weight_decay
    end = config.end_weight_decay
    assert start is not None and end is not None, (
        "a growing weight decay needs its start and its end"
    )
    if done > total:
        return end
    return start + (end - start) * (
        1.0 - DECAY_SHAPES[config.weight_decay_incr_style](done / total)
    )
