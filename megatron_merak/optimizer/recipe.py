"""Maps each parameter to the PyTorch optimizer and the hyperparameters that step it or its
shards.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .chained import Chained
from .probe import StateEntry, Traits, options_of, probe, remake


@dataclass(frozen=True)
class Group:
    """One of ``param_groups``.

    prototype: the optimizer that it belongs to.
    options:   its hyperparameters.
    traits:    of the optimizer's class with these hyperparameters.
    shapes:    of its trained parameters.
    """

    prototype: torch.optim.Optimizer
    options: Mapping[str, Any]
    traits: Traits
    shapes: Sequence[torch.Size]

    def entries(self, dims: int) -> Mapping[str, StateEntry]:
        """Return the state entries of a parameter with ``dims`` dimensions."""
        return self.traits.state[max(dims, 1)]


class Recipe:
    """Describes a user's optimizer, and makes optimizers like it for shards of the parameters.

    optimizer: created by a user over a model's parameters; it never steps itself.
    named:     the model's parameters, under all of their names; those that the optimizer does not
               have are frozen.
    device:    where ranks train.

    Attributes:
    name:         of the optimizer's classes.
    groups:       of its parameters, in order.
    param_shaped: keys of the state entries that have the shape of their parameter.
    other_shaped: keys of the other state entries.

    Raises ConfigError for an optimizer that cannot step shards of parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
        device: Any,
    ):
        self.optimizer = optimizer
        self._device = torch.device(device)
        self.prototypes = optimizer.optimizers if isinstance(optimizer, Chained) else [optimizer]
        self.name = " + ".join(dict.fromkeys(type(each).__name__ for each in self.prototypes))
        names: dict[int, list[str]] = {}
        for name, parameter in named:
            names.setdefault(id(parameter), []).append(name)
        self._group: dict[str, int] = {}
        self.groups: list[Group] = []
        for prototype in self.prototypes:
            for group in prototype.param_groups:
                self._add(prototype, group, names)
            _clear_state(prototype)
        entries = [
            each
            for group in self.groups
            for state in group.traits.state.values()
            for each in state.items()
        ]
        self.param_shaped = list(dict.fromkeys(key for key, entry in entries if entry.param_shaped))
        self.other_shaped = list(
            dict.fromkeys(key for key, entry in entries if not entry.param_shaped)
        )

    def _add(
        self,
        prototype: torch.optim.Optimizer,
        group: Mapping[str, Any],
        names: Mapping[int, list[str]],
    ) -> None:
        kind = type(prototype).__name__
        options = options_of(group)
        if options.get("lr") is None:
            reason = "a group of it has no learning rate: it would choose one by itself"
            raise ConfigError(
                "optimizer", kind, reason, "Give lr (for Adafactor, with relative_step=False)"
            )
        unknown = next((p for p in group["params"] if id(p) not in names), None)
        if unknown is not None:
            reason = (
                f"a parameter of shape {tuple(unknown.shape)} in its groups is none of the model's"
            )
            raise ConfigError("optimizer", kind, reason, "Make it of model.parameters()")
        shapes = [p.shape for p in group["params"] if p.requires_grad]
        # Capturable optimizers do not run on the CPU.
        device = self._device if options.get("capturable") else torch.device("cpu")
        traits = probe(prototype, options, map(len, shapes), device)
        self._group |= {name: len(self.groups) for p in group["params"] for name in names[id(p)]}
        self.groups.append(Group(prototype, options, traits, shapes))

    def group_of(self, name: str, shape: tuple[int, ...] = ()) -> int:
        """Return the index of a parameter's group; len(self.groups) for frozen parameters."""
        return self._group.get(name, len(self.groups))

    @property
    def state_bytes(self) -> float:
        """The average bytes of state per element of a parameter."""
        shapes = [
            (shape, group.entries(len(shape))) for group in self.groups for shape in group.shapes
        ]
        nbytes = sum(entry.nbytes(shape) for shape, entries in shapes for entry in entries.values())
        return nbytes / max(sum(shape.numel() for shape, _ in shapes), 1)

    def state_of(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the bytes of state per element of one parameter."""
        number = self.group_of(name)
        if number == len(self.groups):
            return 0.0
        entries = self.groups[number].entries(len(shape))
        return sum(entry.nbytes(torch.Size(shape)) for entry in entries.values()) / max(
            prod(shape), 1
        )

    def make(self, parameters: Mapping[int, Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        """Return an optimizer of ``parameters``, by the indices of their groups, which have the
        same prototype.
        """
        groups = [
            {**self.groups[number].options, "params": [*own]} for number, own in parameters.items()
        ]
        return remake(self.groups[next(iter(parameters))].prototype, groups)


def _clear_state(prototype: torch.optim.Optimizer) -> None:
    """Free the state that some classes create in __init__. Raises ConfigError for an optimizer that
    has stepped.
    """
    steps = [state["step"] for state in prototype.state.values() if "step" in state]
    fresh = steps and all(
        isinstance(step, torch.Tensor) and (step.is_meta or step == 0) for step in steps
    )
    if prototype.state and not fresh:
        reason = "it has stepped, and its state does not follow into the shards of ranks"
        raise ConfigError(
            "optimizer", type(prototype).__name__, reason, "Give one that has not stepped yet"
        )
    prototype.state.clear()
