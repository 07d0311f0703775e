"""Runs any PyTorch optimizer on the shards that a rank owns, with the results of that optimizer in
one process.

An elementwise optimizer steps views of the flat fp32 values, whatever part of a parameter they are.
Any other one steps full parameters; sharded ones are gathered one by one.
"""

import re
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..config import OptimizerConfig
from ..errors import ConfigError
from ..parallel.buffers import ParameterBuffer, Slot
from ..parallel.mesh import Mesh
from ..parallel.scattered import Scattered, own_span
from ..plan import TensorSharding
from .base import LocalOptimizer, Rates
from .full_parameter import FullParameter
from .loss_scale import LossScaler
from .recipe import Recipe
from .steppers import Gathered, InPlace, Share, SteppedByOwners, Stepper, owned_batches


class TorchOptimizer(LocalOptimizer):
    """A user's PyTorch optimizer over the parameters of ``buffer``.

    A step leaves the clipped gradient in what this rank owns of `main_grad`.

    config, scaler: see `Optimizer`; only clip_grad of ``config`` is used.
    recipe:         the optimizer of each parameter.
    mesh:           of this rank.
    tensors:        how tensor parallelism shards parameters; those not in it are not sharded.
    norm_group:     ``group`` of an `Optimizer`.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        recipe: Recipe,
        mesh: Mesh,
        tensors: Mapping[str, TensorSharding],
        norm_group: dist.ProcessGroup | None = None,
        scaler: LossScaler | None = None,
    ):
        super().__init__(buffer, config, norm_group, mesh.shard_group, scaler=scaler)
        self.recipe = recipe
        self.mesh = mesh
        self.name = recipe.name
        trained = {
            name: slot for name, slot in buffer.slots.items() if slot.group < len(recipe.groups)
        }
        self._shares = {
            name: self._share(name, slot, tensors.get(name)) for name, slot in trained.items()
        }
        self._kinds = {_kind_of(key): key for key in (*recipe.param_shaped, *recipe.other_shaped)}

    def _share(self, name: str, slot: Slot, tensor: TensorSharding | None) -> Share:
        buffer = self.buffer
        mesh = self.mesh
        experts = mesh.experts if slot.experts else None
        full = FullParameter(
            buffer,
            name,
            tensor or TensorSharding(name, slot.shape),
            mesh.tp if experts is None else experts.group,
            shard_group=mesh.shard_group if experts is None else experts.same,
        )
        first, last = own_span(buffer, name)
        grad = values = self.master[:0]
        for (start, stop, offset), own, data in zip(
            buffer.owned, buffer.own_grads, buffer.own_data, strict=True
        ):
            if start <= first < last <= stop:
                local = slice(first - start, last - start)
                flat = slice(offset + first - start, offset + last - start)
                grad = own[local]
                values = self.master[flat] if buffer.rounds else data[local]
        entries = self.recipe.groups[slot.group].entries(len(slot.shape))
        return Share(name, slot.group, full, grad, values=values, entries=dict(entries))

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        """Set the number of steps, of the state that was loaded, or 0 without state."""
        self._steps = value
        self._steppers: list[Stepper] | None = None

    def _update(self, rates: Rates, scale: float) -> None:
        if scale != 1.0:
            for gradient in self.buffer.own_grads:
                gradient.mul_(scale)
            self.scaled = 1.0
        if self._steppers is None:
            self._steppers = self._new_steppers(self._started())
        self._steps += 1
        for stepper in self._steppers:
            stepper.step(rates, self.frozen)
        owned = (
            zip(self.buffer.owned, self.buffer.own_data, strict=True) if self.buffer.rounds else ()
        )
        for (start, stop, offset), data in owned:
            data.copy_(self.master[offset : offset + stop - start])

    def _started(self) -> frozenset[str]:
        """Return the parameters that have stepped, and so have state."""
        return frozenset(name for name in self._shares if self._steps > self.missed.get(name, 0))

    def _new_steppers(self, started: frozenset[str]) -> list[Stepper]:
        """Return the steppers; those that communicate come last, in the same order on all ranks."""
        in_place: dict[int, list[Share]] = {}
        gathered: list[Stepper] = []
        owned: list[Share] = []
        for share in self._shares.values():
            group = self.recipe.groups[share.group]
            if share.full.sharded and not group.traits.elementwise:
                if share.full.group is not None and len(share.param_shaped) == len(share.entries):
                    owned += [share] if share.full.participates else []
                else:
                    gathered += (
                        [Gathered(self.recipe, share, started)] if share.full.participates else []
                    )
            elif share.values.numel():
                in_place.setdefault(id(group.prototype), []).append(share)
        steppers: list[Stepper] = [
            InPlace(self.recipe, shares, started) for shares in in_place.values()
        ]
        steppers += [
            SteppedByOwners(self.recipe, shares, started) for shares in owned_batches(owned)
        ]
        return [*steppers, *gathered]

    def _sync(self) -> None:
        for stepper in self._steppers or ():
            stepper.sync()

    def state(self) -> dict[str, torch.Tensor | Scattered]:
        self._sync()
        state: dict[str, torch.Tensor | Scattered] = (
            {"master": self.master} if self.buffer.rounds else {}
        )
        for kind, key in self._kinds.items():
            names = {
                name: share for name, share in self._shares.items() if _is_param_shaped(share, key)
            }
            if key in self.recipe.param_shaped:
                parts = {
                    name: share.state(key) for name, share in names.items() if share.values.numel()
                }
                state[kind] = Scattered(self.buffer, names, parts)
        return state

    def other_state(self) -> dict[str, dict[str, torch.Tensor]]:
        self._sync()
        return {
            kind: {
                name: share.state(key)
                for name, share in self._shares.items()
                if share.values.numel()
                and key in share.entries
                and not share.entries[key].param_shaped
            }
            for kind, key in self._kinds.items()
            if key in self.recipe.other_shaped
        }

    def writes(self, name: str) -> bool:
        slot = self.buffer.slots[name]
        place, _ = self.mesh.same(slot.experts)
        first = self.mesh.sharing(slot.experts)[0] == 0
        return slot.counted and first and place == self._shares[name].full.owner


def check_layout(recipe: Recipe, model_ranks: int, shards: bool) -> None:
    """Raise ConfigError where a step would need parameters that are on other ranks.

    model_ranks: number of tensor x pipeline ranks.
    shards:      whether the state is sharded over data-parallel ranks.
    """
    coupled = next((group for group in recipe.groups if not group.traits.independent), None)
    if coupled is not None and (model_ranks > 1 or shards):
        reason = "its update of a parameter depends on the others, which other ranks have"
        remedy = (
            "Train with plain data parallelism, or take an optimizer that steps each "
            "parameter by itself"
        )
        raise ConfigError("optimizer", type(coupled.prototype).__name__, reason, remedy)


def check_on_host(recipe: Recipe, ranks: int) -> None:
    """Raise ConfigError for an optimizer that steps full parameters, where their shards are in host
    memory.

    ranks: number of tensor-parallel ranks and of those with the same weights together.
    """
    whole = next((group for group in recipe.groups if not group.traits.elementwise), None)
    if whole is not None and ranks > 1:
        reason = "it steps full parameters, whose parts are in the memory of several ranks' hosts"
        remedy = (
            "Leave offload_model_states out, or take an optimizer that steps each element alone"
        )
        raise ConfigError("optimizer", type(whole.prototype).__name__, reason, remedy)


def _is_param_shaped(share: Share, key: str) -> bool:
    return key in share.entries and share.entries[key].param_shaped


def _kind_of(key: str) -> str:
    """Return the name of an optimizer's state in a checkpoint, which is part of file names."""
    name = re.sub(r"[^a-z0-9_]", "_", key.lower())
    return name if name[:1].isalpha() and name not in ("model", "master") else f"state_{name}"
