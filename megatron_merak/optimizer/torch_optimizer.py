"""Any optimizer of torch on the shards that a rank owns, with the arithmetic of that optimizer in one process.

A class that works element by element steps views of the flat fp32 values, whatever part of a parameter they are. Any
other class steps whole parameters; those of which ranks have parts are gathered one by one.
"""

import re
from collections.abc import Mapping

import torch

from ..config import OptimizerConfig
from ..errors import ConfigError
from ..parallel.buffers import ParameterBuffer, Slot
from ..parallel.mesh import Mesh
from ..parallel.scattered import Scattered, own_span
from ..plan import TensorSharding
from .base import KeptOptimizer, Rates
from .loss_scale import LossScaler
from .recipe import Recipe
from .steppers import Gathered, InPlace, Owned, Share, Stepper, owned_batches
from .whole import Whole


class TorchOptimizer(KeptOptimizer):
    """recipe: what steps the parameters of ``buffer``. mesh: this rank's. tensors: how tensor parallelism divides them;
    what is not in it, it does not divide. config, scaler: see `Optimizer`; of ``config``, clip_grad alone counts.

    A step leaves the clipped gradient in what this rank owns of `main_grad`.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        config: OptimizerConfig,
        recipe: Recipe,
        mesh: Mesh,
        tensors: Mapping[str, TensorSharding],
        scaler: LossScaler | None = None,
    ):
        super().__init__(buffer, config, mesh.model, mesh.sharing, scaler)
        self.recipe, self.mesh, self.name = recipe, mesh, recipe.name
        trained = {name: slot for name, slot in buffer.slots.items() if slot.group < len(recipe.groups)}
        self._shares = {name: self._share(name, slot, tensors.get(name)) for name, slot in trained.items()}
        self._kinds = {_kind_of(key): key for key in (*recipe.alike, *recipe.others)}

    def _share(self, name: str, slot: Slot, tensor: TensorSharding | None) -> Share:
        buffer, mesh = self.buffer, self.mesh
        whole = Whole(buffer, name, tensor or TensorSharding(name, slot.shape), mesh.tp, mesh.sharing)
        first, last = own_span(buffer, name)
        grad = values = self.master[:0]
        for (start, stop, offset), own, data in zip(buffer.owned, buffer.own_grads, buffer.own_data, strict=True):
            if start <= first < last <= stop:
                here, place = slice(first - start, last - start), slice(offset + first - start, offset + last - start)
                grad, values = own[here], self.master[place] if buffer.rounds else data[here]
        entries = self.recipe.groups[slot.group].entries(len(slot.shape))
        return Share(name, slot.group, whole, grad, values, dict(entries))

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        """State was loaded, or there is none yet."""
        self._steps = value
        self._steppers: list[Stepper] | None = None

    def _update(self, rates: Rates, scale: float) -> None:
        if scale != 1.0:
            for gradient in self.buffer.own_grads:
                gradient.mul_(scale)
            self.scaled = 1.0
        if self._steppers is None:
            self._steppers = self._make(self._steps > 0)
        self._steps += 1
        for stepper in self._steppers:
            stepper.step(rates)
        owned = zip(self.buffer.owned, self.buffer.own_data, strict=True) if self.buffer.rounds else ()
        for (start, stop, offset), data in owned:
            data.copy_(self.master[offset : offset + stop - start])

    def _make(self, started: bool) -> list[Stepper]:
        """Those that gather come last, in an order that all ranks have."""
        in_place: dict[int, list[Share]] = {}
        gathered: list[Stepper] = []
        owned: list[Share] = []
        for share in self._shares.values():
            group = self.recipe.groups[share.group]
            if share.whole.divided and not group.traits.elementwise:
                if share.whole.group is not None and len(share.alike) == len(share.entries):
                    owned += [share] if share.whole.here else []
                else:
                    gathered += [Gathered(self.recipe, share, started)] if share.whole.here else []
            elif share.values.numel():
                in_place.setdefault(id(group.prototype), []).append(share)
        steppers: list[Stepper] = [InPlace(self.recipe, shares, started) for shares in in_place.values()]
        steppers += [Owned(self.recipe, shares, started) for shares in owned_batches(owned)]
        return [*steppers, *gathered]

    def _sync(self) -> None:
        for stepper in self._steppers or ():
            stepper.sync()

    def state(self) -> dict[str, torch.Tensor | Scattered]:
        self._sync()
        found: dict[str, torch.Tensor | Scattered] = {"master": self.master} if self.buffer.rounds else {}
        for kind, key in self._kinds.items():
            names = {name: share for name, share in self._shares.items() if _is_alike(share, key)}
            if key in self.recipe.alike:
                parts = {name: share.state(key) for name, share in names.items() if share.values.numel()}
                found[kind] = Scattered(self.buffer, names, parts)
        return found

    def others(self) -> dict[str, dict[str, torch.Tensor]]:
        self._sync()
        return {
            kind: {
                name: share.state(key)
                for name, share in self._shares.items()
                if share.values.numel() and key in share.entries and not share.entries[key].alike
            }
            for kind, key in self._kinds.items()
            if key in self.recipe.others
        }

    def writes(self, name: str) -> bool:
        """Whether of all ranks this one saves what `others` has of a parameter."""
        mesh = self.mesh
        return self.buffer.slots[name].counted and mesh.tp_rank == 0 and mesh.dp_rank == self._shares[name].whole.owner


def check_layout(recipe: Recipe, model_ranks: int, shards: bool) -> None:
    """Raises ConfigError where a rank would have to know parameters of others for a step.

    model_ranks: tensor x pipeline ranks. shards: data-parallel ranks share the state.
    """
    coupled = next((group for group in recipe.groups if not group.traits.alone), None)
    if coupled is not None and (model_ranks > 1 or shards):
        reason = "its update of a parameter depends on the others, which other ranks have"
        remedy = "Train with plain data parallelism, or take an optimizer that steps each parameter by itself"
        raise ConfigError("optimizer", type(coupled.prototype).__name__, reason, remedy)


def _is_alike(share: Share, key: str) -> bool:
    return key in share.entries and share.entries[key].alike


def _kind_of(key: str) -> str:
    """What the state of an optimizer is called in a checkpoint, whose files are named after it."""
    name = re.sub(r"[^a-z0-9_]", "_", key.lower())
    return name if name[:1].isalpha() and name not in ("model", "master") else f"state_{name}"
