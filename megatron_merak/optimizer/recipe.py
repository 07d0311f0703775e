"""Which optimizer of torch steps which parameter, whatever shards of it a rank has."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .chained import Chained
from .probe import Entry, Traits, options_of, probe, remake


@dataclass(frozen=True)
class Group:
    """One of ``param_groups``: ``options`` are its hyperparameters, ``traits`` what its class is like with them, and
    ``shapes`` those of its parameters that are trained."""

    prototype: torch.optim.Optimizer
    options: Mapping[str, Any]
    traits: Traits
    shapes: Sequence[torch.Size]

    def entries(self, dims: int) -> Mapping[str, Entry]:
        """The state of a parameter of so many dimensions."""
        return self.traits.state[max(dims, 1)]


class Recipe:
    """optimizer: made over the parameters of a model, as a user would, and not used: others like it step shards.

    named: the model's parameters, under all of their names; those that the optimizer does not have are not trained.
    device: where ranks train. Raises ConfigError for an optimizer that cannot step shards of parameters.

    name: of its classes. groups: of its parameters, in order. alike, others: the entries of its state that have the
    shape of their parameter, and those that have not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]], device: Any):
        self.optimizer, self._device = optimizer, torch.device(device)
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
            _forget(prototype)
        entries = [each for group in self.groups for state in group.traits.state.values() for each in state.items()]
        self.alike = list(dict.fromkeys(key for key, entry in entries if entry.alike))
        self.others = list(dict.fromkeys(key for key, entry in entries if not entry.alike))

    def _add(self, prototype: torch.optim.Optimizer, group: Mapping[str, Any], names: Mapping[int, list[str]]) -> None:
        kind, options = type(prototype).__name__, options_of(group)
        if options.get("lr") is None:
            reason = "a group of it has no learning rate: it would choose one by itself"
            raise ConfigError("optimizer", kind, reason, "Give lr (for Adafactor, with relative_step=False)")
        unknown = next((p for p in group["params"] if id(p) not in names), None)
        if unknown is not None:
            reason = f"a parameter of shape {tuple(unknown.shape)} in its groups is none of the model's"
            raise ConfigError("optimizer", kind, reason, "Make it of model.parameters()")
        shapes = [p.shape for p in group["params"] if p.requires_grad]
        device = self._device if options.get("capturable") else torch.device("cpu")  # capturable steps refuse the CPU
        traits = probe(prototype, options, map(len, shapes), device)
        self._group |= {name: len(self.groups) for p in group["params"] for name in names[id(p)]}
        self.groups.append(Group(prototype, options, traits, shapes))

    def group_of(self, name: str, shape: tuple[int, ...] = ()) -> int:
        """The number of a parameter's group; behind the last one for those that are not trained."""
        return self._group.get(name, len(self.groups))

    @property
    def state_bytes(self) -> float:
        """What is kept of an element of a parameter on average, beside its value."""
        shapes = [(shape, group.entries(len(shape))) for group in self.groups for shape in group.shapes]
        kept = sum(entry.nbytes(shape) for shape, entries in shapes for entry in entries.values())
        return kept / max(sum(shape.numel() for shape, _ in shapes), 1)

    def state_of(self, name: str, shape: tuple[int, ...]) -> float:
        """As ``state_bytes``, of one parameter."""
        number = self.group_of(name)
        if number == len(self.groups):
            return 0.0
        entries = self.groups[number].entries(len(shape))
        return sum(entry.nbytes(torch.Size(shape)) for entry in entries.values()) / max(prod(shape), 1)

    def make(self, parameters: Mapping[int, Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer of ``parameters``, by the number of their groups, which have one prototype."""
        groups = [{**self.groups[number].options, "params": [*own]} for number, own in parameters.items()]
        return remake(self.groups[next(iter(parameters))].prototype, groups)


def _forget(prototype: torch.optim.Optimizer) -> None:
    """Free the state that some classes make when they are made. Raises ConfigError for an optimizer in use."""
    steps = [state["step"] for state in prototype.state.values() if "step" in state]
    fresh = steps and all(isinstance(step, torch.Tensor) and (step.is_meta or step == 0) for step in steps)
    if prototype.state and not fresh:
        reason = "it has stepped, and its state does not follow into the shards of ranks"
        raise ConfigError("optimizer", type(prototype).__name__, reason, "Give one that has not stepped yet")
    prototype.state.clear()
