"""Parameter groups: which parameters share learning rate and weight decay, and what these are in
pretraining.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from ..config import OptimizerConfig
from ..optimizer.base import Rates
from ..optimizer.schedules import learning_rate, weight_decay

# (name, full shape) of a parameter -> its group.
GroupOf = Callable[[str, tuple[int, ...]], int]


def matrices_and_others(name: str, shape: tuple[int, ...]) -> int:
    """Megatron-LM's rule: vectors (norms, biases) are in group 1, which has no weight decay;
    matrices in group 0.
    """
    return 0 if len(shape) > 1 else 1


def groups_of_run(config: OptimizerConfig, outer: Collection[str]) -> GroupOf:
    """Return the groups of a pretraining run: those of `matrices_and_others`, and two more with
    --decoupled-lr.

    outer: the names of the weights of embedding and output layer, which --decoupled-lr applies to.
    """
    if config.decoupled_lr is None:
        return matrices_and_others
    return lambda name, shape: matrices_and_others(name, shape) + 2 * (name in outer)


def outer_names(model: Any) -> set[str]:
    """Return the names of the parameters of the model's word embedding and output layer."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {
        id(parameter)
        for module in modules
        if module is not None
        for parameter in module.parameters()
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in outer and parameter.dim() > 1
    }


def rates_of_run(config: OptimizerConfig, done: int, total: int) -> Rates:
    """Return learning rate and weight decay of each group of ``groups_of_run`` in the step after
    ``done`` steps.

    done, total: see ``learning_rate``.
    """
    decay = weight_decay(config, done, total)
    rate = learning_rate(config, done, total)
    outer = rate if config.decoupled_lr is None else learning_rate(_decoupled(config), done, total)
    return [(rate, decay), (rate, 0.0), (outer, decay), (outer, 0.0)]


def _decoupled(config: OptimizerConfig) -> OptimizerConfig:
    floor = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return replace(config, lr=config.decoupled_lr, min_lr=floor)
