"""Steps what a rank owns of parameters with PyTorch optimizers."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .base import Rates
from .full_parameter import FullParameter
from .probe import StateEntry
from .recipe import Recipe


@dataclass(eq=False)
class Share:
    """What a rank owns of one parameter.

    name:        of the parameter.
    group:       index of its group in the recipe.
    full:        gathers the full parameter.
    grad:        flat view of the owned gradient, may be empty.
    values:      flat view of the owned fp32 values, may be empty.
    entries:     of its state, by key.
    flat_state:  state in the shape of the parameter, flat like ``values``, by key; unless an
                 optimizer has it.
    other_state: other state as it is saved, by key; unless an optimizer has it.
    """

    name: str
    group: int
    full: FullParameter
    grad: Tensor
    values: Tensor
    entries: dict[str, StateEntry]
    flat_state: dict[str, Tensor] = field(default_factory=dict)
    other_state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def param_shaped(self) -> list[str]:
        """Keys of the state in the shape of the parameter."""
        return [key for key, entry in self.entries.items() if entry.param_shaped]

    def state(self, key: str) -> Tensor:
        """Return one entry, to save or to load into."""
        if self.entries[key].param_shaped:
            return self.flat_state.setdefault(key, torch.zeros_like(self.values))
        zeros = self.entries[key].zeros(self.full.shape, self.values.device)
        return self.other_state.setdefault(key, zeros)

    def current(self, keys: Sequence[str] | None = None) -> list[Tensor]:
        """Return flat views of the owned values and of state in their shape, of ``keys`` or all."""
        return [
            self.values,
            *(self.state(key) for key in (self.param_shaped if keys is None else keys)),
        ]

    def live(self) -> dict:
        """Return the other entries in the form in which a PyTorch optimizer has them."""
        state = self.other_state
        return {key: entry.live(state[key]) for key, entry in self.entries.items() if key in state}


class Stepper:
    """Steps some shares.

    started: the parameters that have state to continue from; the next step of another one is its
             first.
    """

    def __init__(self, recipe: Recipe, shares: Sequence[Share], started: Collection[str]):
        self.recipe = recipe
        self.shares = shares
        self.started = {share.name for share in shares if share.name in started}

    def step(self, rates: Rates, frozen: Collection[str]) -> None:
        """Update the values by the gradient, but those of the parameters that are ``frozen``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy all state to the shares."""
        raise NotImplementedError

    def _step(self, optimizer: torch.optim.Optimizer, numbers: Sequence[int], rates: Rates) -> None:
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"], decay = rates[number]
            if "weight_decay" in group:
                group["weight_decay"] = decay
        optimizer.step()


class InPlace(Stepper):
    """Steps what this rank owns, without communication: full parameters, or shards if the class is
    elementwise.
    """

    def __init__(self, recipe: Recipe, shares: Sequence[Share], started: Collection[str]):
        super().__init__(recipe, shares, started)
        self._grads: list[Tensor] = []
        members: dict[int, list[nn.Parameter]] = {}
        self._parameters = []
        for share in shares:
            stored = share.full.stored
            shape = stored if share.values.numel() == stored.numel() else share.values.shape
            parameter = nn.Parameter(share.values.data.view(shape))
            self._grads.append(share.grad.data.view(shape))
            members.setdefault(share.group, []).append(parameter)
            self._parameters.append(parameter)
        self._numbers = [*members]
        self._optimizer = recipe.make(members)
        for share, parameter in zip(shares, self._parameters, strict=True):
            if share.name not in self.started:
                continue
            state = {key: share.state(key).view(parameter.shape) for key in share.param_shaped}
            self._optimizer.state[parameter] = state | share.live()

    def step(self, rates: Rates, frozen: Collection[str]) -> None:
        for share, parameter, grad in zip(self.shares, self._parameters, self._grads, strict=True):
            share.flat_state.clear()  # views of tensors that the optimizer may replace
            parameter.grad = None if share.name in frozen else grad
        self._step(self._optimizer, self._numbers, rates)

    def sync(self) -> None:
        for share, parameter in zip(self.shares, self._parameters, strict=True):
            for key, value in self._optimizer.state[parameter].items():
                entry = share.entries.get(key)
                if entry is not None and entry.param_shaped:
                    share.flat_state[key] = value.view(-1)
                elif entry is not None:
                    share.other_state[key] = entry.stored(value)


class _SingleParameter:
    """A PyTorch optimizer of one full parameter, whose values and state it has only during
    a step.
    """

    def __init__(
        self, recipe: Recipe, share: Share, step: Callable[[torch.optim.Optimizer, Rates], None]
    ):
        self._recipe = recipe
        self._share = share
        self._step = step
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameter: nn.Parameter | None = None

    def update(
        self, grad: Tensor, values: Tensor, state: dict[str, Tensor], rates: Rates, started: bool
    ) -> list[Tensor]:
        """Return the new values, then the state of the keys `Share.param_shaped`, all in the full
        shape.
        """
        share = self._share
        if self.optimizer is None or self.parameter is None:
            self.parameter = nn.Parameter(values)
            self.optimizer = self._recipe.make({share.group: [self.parameter]})
            if started:
                self.optimizer.state[self.parameter] = share.live()
        parameter = self.parameter
        live = self.optimizer.state[self.parameter]
        parameter.data = values
        parameter.grad = grad
        live.update(state)
        self._step(self.optimizer, rates)
        results = [parameter.data, *(live.pop(key) for key in share.param_shaped)]
        parameter.grad = None
        parameter.data = values.new_empty(0)
        return results


class Gathered(Stepper):
    """Steps one sharded parameter: every rank gathers gradient, values and state, and computes the
    full update.

    Each rank keeps its shard of the result. Needs memory for the full parameter, (2 + number of
    state entries) x 4 bytes per element.
    """

    def __init__(self, recipe: Recipe, share: Share, started: Collection[str]):
        super().__init__(recipe, [share], started)
        self._share = share
        self._single = _SingleParameter(
            recipe, share, lambda each, rates: self._step(each, [share.group], rates)
        )

    def step(self, rates: Rates, frozen: Collection[str]) -> None:
        share = self._share
        if share.name in frozen:
            return
        started = share.name in self.started
        keys = share.param_shaped if started else []
        shards = (share.grad, share.values, *(share.state(key) for key in keys))
        grad, values, *state = share.full.gather(shards)
        self.started.add(share.name)
        if share.values.numel():  # else this rank only helps to gather
            results = self._single.update(
                grad, values, dict(zip(keys, state, strict=True)), rates, started
            )
            for new, part in zip(results, share.current(), strict=True):
                share.full.extract(new, part)

    def sync(self) -> None:
        if self._single.optimizer is not None and self._single.parameter is not None:
            for key, value in self._single.optimizer.state[self._single.parameter].items():
                if key in self._share.entries:
                    self._share.other_state[key] = self._share.entries[key].stored(value)


class SteppedByOwners(Stepper):
    """Steps several parameters that are sharded over the same ranks, each on another one of these
    ranks, its owner.

    The owner receives gradient, values and state, computes the full update, and sends the shards
    back. There is at most one parameter per rank. All state must have the shape of the parameters.
    Needs memory for one full parameter, as `Gathered` does.
    """

    def __init__(self, recipe: Recipe, shares: Sequence[Share], started: Collection[str]):
        super().__init__(recipe, shares, started)
        self._group = shares[0].full.group
        rank = dist.get_rank(self._group)
        self._own = shares[rank] if rank < len(shares) else None
        if self._own is not None:
            number = self._own.group
            self._single = _SingleParameter(
                recipe, self._own, lambda each, rates: self._step(each, [number], rates)
            )

    def step(self, rates: Rates, frozen: Collection[str]) -> None:
        steps = [share for share in self.shares if share.name not in frozen]
        if not steps:
            return
        own = self._own if self._own in steps else None
        keys = {share: share.param_shaped if share.name in self.started else [] for share in steps}
        outgoing = [
            share.full.outgoing([share.grad, *share.current(keys[share])]) for share in steps
        ]
        pieces = self._exchange(
            outgoing, {share: 2 + len(keys[share]) for share in steps}, to_owners=True
        )
        results: list[Tensor] = []
        if own is not None:
            grad, values, *state = own.full.assemble(pieces)
            started = own.name in self.started
            updated = self._single.update(
                grad, values, dict(zip(keys[own], state, strict=True)), rates, started
            )
            results = own.full.split(torch.stack(updated))
        self.started.update(share.name for share in steps)
        pieces = self._exchange(
            results, {share: 1 + len(share.param_shaped) for share in steps}, to_owners=False
        )
        for share, piece in zip(self.shares, pieces, strict=False):
            if share in steps:
                share.full.store(piece, share.current())

    def _exchange(
        self, pieces: Sequence[Tensor], counts: Mapping[Share, int], to_owners: bool
    ) -> list[Tensor]:
        """Send each rank its flat piece; return the received ones. counts: tensors of each
        parameter that steps.
        """
        rank = dist.get_rank(self._group)
        ranks = dist.get_world_size(self._group)
        of_shards = [
            share.full.lengths(counts[share])[rank] if share in counts else 0
            for share in self.shares
        ]
        of_shards += [0] * (ranks - len(of_shards))
        of_own = [0] * ranks
        if self._own is not None and self._own in counts:
            of_own = self._own.full.lengths(counts[self._own])
        sent, received = (of_shards, of_own) if to_owners else (of_own, of_shards)
        flat = [piece.flatten() for piece in pieces] or [self.shares[0].values.new_empty(0)]
        out = flat[0].new_empty(sum(received))
        dist.all_to_all_single(out, torch.cat(flat), received, sent, group=self._group)
        return list(out.split(received))

    def sync(self) -> None:
        """Do nothing: the shares already have all state."""


def owned_batches(shares: Sequence[Share]) -> list[list[Share]]:
    """Return batches for `SteppedByOwners`: at most one share per rank of their group, the largest
    ones together.

    The result is the same on all ranks of a group: first shares that are sharded over data-parallel
    ranks, then others.
    """
    batches = []
    for data_parallel in (True, False):
        chosen = [
            share for share in shares if (share.full.shard_group is not None) == data_parallel
        ]
        by_group: dict[dist.ProcessGroup | None, list[Share]] = {}
        for share in sorted(chosen, key=lambda share: (-math.prod(share.full.shape), share.name)):
            by_group.setdefault(share.full.group, []).append(share)
        for group, members in by_group.items():
            ranks = dist.get_world_size(group)
            batches += [members[at : at + ranks] for at in range(0, len(members), ranks)]
    return batches
