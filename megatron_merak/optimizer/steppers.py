"""Optimizers of torch at work on what a rank owns of parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .base import Rates
from .probe import Entry
from .recipe import Recipe
from .whole import Whole


@dataclass(eq=False)
class Share:
    """What a rank owns of parameter ``name``: flat views of its gradient and of its fp32 values, maybe empty.

    group: its number in the recipe. whole: how to get all of it. kept, others: its state where no optimizer of torch
    holds it, by key: flat, like the values, and as it is stored.
    """

    name: str
    group: int
    whole: Whole
    grad: Tensor
    values: Tensor
    entries: dict[str, Entry]
    kept: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    @property
    def alike(self) -> list[str]:
        return [key for key, entry in self.entries.items() if entry.alike]

    def state(self, key: str) -> Tensor:
        """One entry, to be saved or to be loaded into."""
        if self.entries[key].alike:
            return self.kept.setdefault(key, torch.zeros_like(self.values))
        zeros = self.entries[key].zeros(self.whole.shape, self.values.device)
        return self.others.setdefault(key, zeros)

    def live(self) -> dict:
        """The entries that are not like the values, as an optimizer of torch has them."""
        return {key: entry.live(self.others[key]) for key, entry in self.entries.items() if key in self.others}


class Stepper:
    """What steps some shares. ``started``: their state is what they keep, and not that of a first step."""

    def __init__(self, recipe: Recipe, shares: Sequence[Share], started: bool):
        self.recipe, self.shares, self.started = recipe, shares, started

    def step(self, rates: Rates) -> None:
        """Update the values by the gradient."""
        raise NotImplementedError

    def sync(self) -> None:
        """Let the shares keep all of the state."""
        raise NotImplementedError

    def _step(self, made: torch.optim.Optimizer, numbers: Sequence[int], rates: Rates) -> None:
        for group, number in zip(made.param_groups, numbers, strict=True):
            group["lr"], decay = rates[number]
            if "weight_decay" in group:
                group["weight_decay"] = decay
        made.step()


class InPlace(Stepper):
    """Steps what is there: whole parameters, or shards where a class works element by element."""

    def __init__(self, recipe: Recipe, shares: Sequence[Share], started: bool):
        super().__init__(recipe, shares, started)
        members: dict[int, list[nn.Parameter]] = {}
        self._parameters = []
        for share in shares:
            shape = share.whole.stored if share.values.numel() == share.whole.stored.numel() else share.values.shape
            parameter = nn.Parameter(share.values.data.view(shape))
            parameter.grad = share.grad.data.view(shape)
            members.setdefault(share.group, []).append(parameter)
            self._parameters.append(parameter)
        self._numbers, self._made = [*members], recipe.make(members)
        for share, parameter in zip(shares, self._parameters, strict=True) if started else ():
            kept = {key: share.state(key).view(parameter.shape) for key in share.alike}
            self._made.state[parameter] = kept | share.live()

    def step(self, rates: Rates) -> None:
        for share in self.shares:
            share.kept.clear()  # views of what a class may replace
        self._step(self._made, self._numbers, rates)

    def sync(self) -> None:
        for share, parameter in zip(self.shares, self._parameters, strict=True):
            for key, value in self._made.state[parameter].items():
                entry = share.entries.get(key)
                if entry is not None and entry.alike:
                    share.kept[key] = value.view(-1)
                elif entry is not None:
                    share.others[key] = entry.stored(value)


class Gathered(Stepper):
    """Steps a parameter that ranks have parts of: gradient, values and state are gathered, every rank computes all of
    the update, and keeps its part. Needs memory for that parameter, (2 + the entries of its state) x 4 bytes each."""

    def __init__(self, recipe: Recipe, share: Share, started: bool):
        super().__init__(recipe, [share], started)
        self._share, self._made, self._parameter = share, None, None

    def step(self, rates: Rates) -> None:
        share = self._share
        keys = share.alike if self.started else []
        parts = (share.grad, share.values, *(share.state(key) for key in keys))
        grad, values, *state = share.whole.gather(parts)
        self.started = True
        if share.values.numel():  # else this rank only helps to gather
            self._update(grad, values, dict(zip(keys, state, strict=True)), rates)

    def _update(self, grad: Tensor, values: Tensor, state: dict[str, Tensor], rates: Rates) -> None:
        share = self._share
        if self._made is None or self._parameter is None:
            self._parameter = nn.Parameter(values)
            self._made = self.recipe.make({share.group: [self._parameter]})
            if state or share.others:
                self._made.state[self._parameter] = share.live()
        parameter, live = self._parameter, self._made.state[self._parameter]
        parameter.data, parameter.grad = values, grad
        live.update(state)
        self._step(self._made, [share.group], rates)
        share.whole.own(parameter.data, share.values)
        for key in share.alike:
            share.whole.own(live.pop(key), share.state(key))
        parameter.grad, parameter.data = None, values.new_empty(0)

    def sync(self) -> None:
        if self._made is not None:
            for key, value in self._made.state[self._parameter].items():
                if key in self._share.entries:
                    self._share.others[key] = self._share.entries[key].stored(value)
