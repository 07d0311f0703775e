"""Learning rate and weight decay as functions of the number of optimizer steps done, by Megatron-LM's formulas.

lr  |      ______                  warm-up, then a style: constant, linear, cosine, inverse-square-root or WSD
    |     /      \\___              (warm-up, stable, decay: https://arxiv.org/abs/2404.06395)
    |____/           \\____ min_lr
    +----|-------|---|---- t
       warm-up        decay
"""

from collections.abc import Callable, Mapping
from math import cos, pi, sqrt

from megatron_merak.config import OptimizerConfig

# x in [0, 1] is the part of the decay that is over; the value goes from 1 to 0.
DECAY_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (cos(pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - sqrt(x),
}


def learning_rate(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """The learning rate of the step that follows `iteration` done steps; the first step of a run has iteration 0.

    All `lr_*_iters` are optimizer steps; `lr_warmup_fraction` is a fraction of `lr_decay_iters`.
    """
    peak, floor = config.lr, config.final_lr
    decay_iters = train_iters if config.lr_decay_iters is None else config.lr_decay_iters
    warmup = warmup_iterations(config, decay_iters)
    style = config.lr_decay_style
    if warmup > 0 and iteration <= warmup:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * iteration / warmup
    if style == "constant":
        return peak
    if iteration > decay_iters:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * sqrt(max(warmup, 1)) / sqrt(max(iteration, 1)))
    if style == "WSD":
        return floor + (peak - floor) * _stable_then_decay(config, iteration, decay_iters)
    return floor + (peak - floor) * DECAY_SHAPES[style]((iteration - warmup) / (decay_iters - warmup))


def warmup_iterations(config: OptimizerConfig, decay_iters: int) -> float:
    """Length of the warm-up in steps; not rounded when it is given as a fraction."""
    return config.lr_warmup_iters if config.lr_warmup_fraction is None else config.lr_warmup_fraction * decay_iters


def _stable_then_decay(config: OptimizerConfig, iteration: int, decay_iters: int) -> float:
    assert config.lr_wsd_decay_iters, "WSD needs lr_wsd_decay_iters"
    over = iteration - (decay_iters - config.lr_wsd_decay_iters)
    return 1.0 if over <= 0 else DECAY_SHAPES[config.lr_wsd_decay_style](over / config.lr_wsd_decay_iters)


def weight_decay(config: OptimizerConfig, iteration: int, train_iters: int) -> float:
    """The weight decay of the step that follows `iteration` done steps: from start to end over `train_iters` steps."""
    if config.weight_decay_incr_style == "constant":
        return config.weight_decay
    start, end = config.start_weight_decay, config.end_weight_decay
    assert start is not None and end is not None, "a growing weight decay needs its start and its end"
    if iteration > train_iters:
        return end
    return start + (end - start) * (1.0 - DECAY_SHAPES[config.weight_decay_incr_style](iteration / train_iters))
