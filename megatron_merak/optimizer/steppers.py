"""Optimizers of torch at work on what a rank owns of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
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

    def current(self, keys: Sequence[str] | None = None) -> list[Tensor]:
        """The values, and the entries like them, by ``keys`` or by all: flat views of what this rank owns."""
        return [self.values, *(self.state(key) for key in (self.alike if keys is None else keys))]

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


class _One:
    """An optimizer of torch for one parameter, whose values and state come for a step and go after it."""

    def __init__(self, recipe: Recipe, share: Share, step: Callable[[torch.optim.Optimizer, Rates], None]):
        self._recipe, self._share, self._step = recipe, share, step
        self.made: torch.optim.Optimizer | None = None
        self.parameter: nn.Parameter | None = None

    def update(self, grad: Tensor, values: Tensor, state: dict[str, Tensor], rates: Rates) -> list[Tensor]:
        """Return the new values, and the state that is like them by the keys of ``alike``; all have the full shape."""
        share = self._share
        if self.made is None or self.parameter is None:
            self.parameter = nn.Parameter(values)
            self.made = self._recipe.make({share.group: [self.parameter]})
            if state or share.others:
                self.made.state[self.parameter] = share.live()
        parameter, live = self.parameter, self.made.state[self.parameter]
        parameter.data, parameter.grad = values, grad
        live.update(state)
        self._step(self.made, rates)
        found = [parameter.data, *(live.pop(key) for key in share.alike)]
        parameter.grad, parameter.data = None, values.new_empty(0)
        return found


class Gathered(Stepper):
    """Steps a parameter that ranks have parts of: gradient, values and state are gathered, every rank computes all of
    the update, and keeps its part. Needs memory for that parameter, (2 + the entries of its state) x 4 bytes each."""

    def __init__(self, recipe: Recipe, share: Share, started: bool):
        super().__init__(recipe, [share], started)
        self._share = share
        self._one = _One(recipe, share, lambda made, rates: self._step(made, [share.group], rates))

    def step(self, rates: Rates) -> None:
        share = self._share
        keys = share.alike if self.started else []
        parts = (share.grad, share.values, *(share.state(key) for key in keys))
        grad, values, *state = share.whole.gather(parts)
        self.started = True
        if share.values.numel():  # else this rank only helps to gather
            found = self._one.update(grad, values, dict(zip(keys, state, strict=True)), rates)
            for new, part in zip(found, share.current(), strict=True):
                share.whole.own(new, part)

    def sync(self) -> None:
        if self._one.made is not None:
            for key, value in self._one.made.state[self._one.parameter].items():
                if key in self._share.entries:
                    self._share.others[key] = self._share.entries[key].stored(value)


class Owned(Stepper):
    """Steps several parameters that the same ranks have parts of, each on one of these ranks: it gets gradient, values
    and state of its parameter, computes the update, and gives the parts back. At most one parameter per rank.

    For classes whose state is all like the parameters. Needs memory for one parameter, as `Gathered` does.
    """

    def __init__(self, recipe: Recipe, shares: Sequence[Share], started: bool):
        super().__init__(recipe, shares, started)
        self._group = shares[0].whole.group
        rank = dist.get_rank(self._group)
        self._mine = shares[rank] if rank < len(shares) else None
        if self._mine is not None:
            number = self._mine.group
            self._one = _One(recipe, self._mine, lambda made, rates: self._step(made, [number], rates))

    def step(self, rates: Rates) -> None:
        keys = {share: share.alike if self.started else [] for share in self.shares}
        sent = [share.whole.sent([share.grad, *share.current(keys[share])]) for share in self.shares]
        pieces = self._exchange(sent, {share: 2 + len(keys[share]) for share in self.shares}, to_owners=True)
        back: list[Tensor] = []
        if self._mine is not None:
            grad, values, *state = self._mine.whole.put_together(pieces)
            found = self._one.update(grad, values, dict(zip(keys[self._mine], state, strict=True)), rates)
            back = self._mine.whole.taken_apart(torch.stack(found))
        self.started = True
        pieces = self._exchange(back, {share: 1 + len(share.alike) for share in self.shares}, to_owners=False)
        for share, piece in zip(self.shares, pieces, strict=False):
            share.whole.take(piece, share.current())

    def _exchange(self, sent: Sequence[Tensor], counts: Mapping[Share, int], to_owners: bool) -> list[Tensor]:
        """Give each rank its piece, flat; return those that this rank gets. counts: tensors of each parameter."""
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        own = [share.whole.lengths(counts[share])[rank] for share in self.shares]
        own += [0] * (ranks - len(own))
        mine = [0] * ranks if self._mine is None else self._mine.whole.lengths(counts[self._mine])
        given, taken = (own, mine) if to_owners else (mine, own)
        flat = [piece.flatten() for piece in sent] or [self.shares[0].values.new_empty(0)]
        out = flat[0].new_empty(sum(taken))
        dist.all_to_all_single(out, torch.cat(flat), taken, given, group=self._group)
        return list(out.split(taken))

    def sync(self) -> None:
        """Nothing is kept but what the shares have."""


def owned_batches(shares: Sequence[Share]) -> list[list[Share]]:
    """Shares whose updates owners can compute, in batches of at most one per rank of their group, the largest together.

    The same on all ranks of a group: first those that data-parallel ranks share, then the others.
    """
    batches = []
    for shared in (True, False):
        chosen = [share for share in shares if (share.whole.sharing is not None) == shared]
        by_group: dict[dist.ProcessGroup | None, list[Share]] = {}
        for share in sorted(chosen, key=lambda share: (-math.prod(share.whole.shape), share.name)):
            by_group.setdefault(share.whole.group, []).append(share)
        for group, members in by_group.items():
            ranks = dist.get_world_size(group)
            batches += [members[at : at + ranks] for at in range(0, len(members), ranks)]
    return batches
