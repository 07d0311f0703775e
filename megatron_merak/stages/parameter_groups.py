"""Which parameters share a learning rate and a weight decay, and what these are in a pretraining job."""

from collections.abc import Callable, Collection
from dataclasses import replace

from ..config import OptimizerConfig
from ..optimizer.base import Rates
from ..optimizer.schedules import learning_rate, weight_decay

# The group of a parameter, from its name and its shape before it is divided.
GroupOf = Callable[[str, tuple[int, ...]], int]


def matrices_and_others(name: str, shape: tuple[int, ...]) -> int:
    """Megatron-LM's rule: vectors (norms, biases), in group 1, have no weight decay."""
    return 0 if len(shape) > 1 else 1


def groups_of_run(config: OptimizerConfig, outer: Collection[str]) -> GroupOf:
    """The same, and two groups more with --decoupled-lr: of ``outer``, the embedding's and the output layer's
    weights."""
    if config.decoupled_lr is None:
        return matrices_and_others
    return lambda name, shape: matrices_and_others(name, shape) + 2 * (name in outer)


def rates_of_run(config: OptimizerConfig, done: int, total: int) -> Rates:
    """What each of ``groups_of_run`` has in the step that follows ``done``; see ``learning_rate``."""
    decay = weight_decay(config, done, total)
    rate = learning_rate(config, done, total)
    outer = rate if config.decoupled_lr is None else learning_rate(_decoupled(config), done, total)
    return [(rate, decay), (rate, 0.0), (outer, decay), (outer, 0.0)]


def _decoupled(config: OptimizerConfig) -> OptimizerConfig:
    floor = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return replace(config, lr=config.decoupled_lr, min_lr=floor)
