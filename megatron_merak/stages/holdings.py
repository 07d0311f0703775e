"""What one rank holds of a captured model: its parts of the parameters that its stages use, filled."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..checkpoint.hf import ModuleSource, Source, fill, source_of
from ..checkpoint.store import Shard
from ..parallel.agree import broadcast_json, gather_json, together
from ..parallel.buffers import BufferEntry, Flat, ParameterBuffer, Sharding
from ..parallel.mesh import Mesh
from ..plan import TensorSharding
from .adapters import has_adapters, name_before
from .blueprint import Blueprint
from .deliver import deliver
from .init_captured import Initialiser
from .native import shard_of
from .parameter_groups import GroupOf
from .precision import DTYPES, HALVES


@dataclass(frozen=True)
class Held:
    """One parameter, padding included.

    sharding: how it is divided. storage: what the model computes with. counted: whether of all stages this one counts
    it. exact: its values in the dtype of the user's model, fp32 where it computes in 16 bits; else ``storage`` itself.
    Where replicas share the fp32 values, ``exact`` is a place in the gradient's memory, to which they are gathered.
    """

    sharding: TensorSharding
    storage: Tensor
    counted: bool
    exact: Tensor

    def shard(self, mesh: Mesh, storage: Tensor) -> Shard:
        tensor, tp = self.sharding, mesh.grid.tp
        shape = tensor.local_shape(mesh.tp_rank, tp)
        view = storage if tensor.dim is None else storage.narrow(tensor.dim, 0, shape[tensor.dim])
        owner = self.counted and mesh.dp_rank == 0
        return Shard(tensor.name, tensor.shape, tensor.dim, tensor.intervals(mesh.tp_rank, tp), view, owner)


def stored_shape(tensor: TensorSharding, tp: int) -> tuple[int, ...]:
    """The shape of a rank's part with its padding."""
    if tensor.dim is None:
        return tensor.shape
    extent = tensor.shape[tensor.dim] if tensor.padded is None else tensor.padded
    return tensor.shape[: tensor.dim] + (extent // tp,) + tensor.shape[tensor.dim + 1 :]


class Holdings:
    """Of one rank, all its stages together: trainable parameters as views of ``buffer``, frozen ones beside it.

    Parameters that the loss does not use stay with the first stage, so that nothing is lost on the way to disk.
    parameters: what segments read, by name. stages_of: the stages that use each parameter of the model. units: of all
    these stages, in order.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, group_of: GroupOf):
        self.blueprint, self.mesh, self.captured = blueprint, mesh, blueprint.traced.captured
        self.model = blueprint.traced.model
        self.stages = blueprint.plan.stages_of(mesh.pp_rank)
        self.stages_of = blueprint.stages_of()
        self.units = [unit for stage in self.stages for unit in blueprint.plan.stages[stage].units]
        used = [self.reads(unit) for unit in self.units]
        owner = {name: min(k for k, names in enumerate(used) if name in names) for names in used for name in names}
        self.buffer = self._make_buffer([[n for n in names if owner[n] == k] for k, names in enumerate(used)], group_of)
        self.held = {name: self._hold(name) for name in owner}
        trainable = self.captured.trainable
        self.parameters = {name: nn.Parameter(held.storage, name in trainable) for name, held in self.held.items()}
        if 0 in self.stages:
            self.held |= {name: self._spare(name, parameter) for name, parameter in self._unused()}

    def reads(self, unit: int) -> Collection[str]:
        """The parameters that a unit uses."""
        return self.blueprint.chain.parameters[unit]

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The trainable parameters."""
        return {parameter: name for name, parameter in self.parameters.items() if parameter.requires_grad}

    @property
    def shares_weights(self) -> bool:
        """Whether each replica has a part only of what is exported."""
        return self.shares_exact or self.buffer.sharding >= Sharding.PARAMETERS

    @property
    def shares_exact(self) -> bool:
        """Whether weights have fp32 values that computing rounds, of which each replica has a part only."""
        return self.buffer.sharded and any(
            held.exact is not held.storage and name in self.buffer.slots for name, held in self.held.items()
        )

    @property
    def replicated(self) -> frozenset[str]:
        """Parameters of which every tensor-parallel rank holds all."""
        return frozenset(name for name in self.parameters if self.held[name].sharding.dim is None)

    def _make_buffer(self, units: list[list[str]], group_of: GroupOf) -> ParameterBuffer:
        blueprint, tp = self.blueprint, self.mesh.grid.tp
        tensors, captured = blueprint.sharding.tensors, self.captured

        def entry(name: str) -> BufferEntry:
            tensor = tensors[name]
            group, fp32 = group_of(name, tensor.shape), captured.dtypes[name] == torch.float32
            ranks = {*map(blueprint.plan.schedule.rank_of, self.stages_of[name])}
            return BufferEntry(name, stored_shape(tensor, tp), group, self._counted(name), fp32, len(ranks) > 1)

        entries = [[entry(name) for name in names if name in captured.trainable] for names in units]
        kinds = {captured.dtypes[name] for name in captured.trainable}
        dtype = kinds.pop() if len(kinds) == 1 else DTYPES[blueprint.plan.dtype]
        plan, mesh = blueprint.plan, self.mesh
        return ParameterBuffer(entries, dtype, mesh.device, plan.bucket_size, *shard_of(plan, mesh))

    def _counted(self, name: str) -> bool:
        """Whether of all ranks of a replica that hold the same values this one counts and writes them."""
        whole = self.blueprint.sharding.tensors[name].dim is None
        return self.stages_of[name][0] in self.stages and (not whole or self.mesh.tp_rank == 0)

    def _hold(self, name: str) -> Held:
        captured, tensor = self.captured, self.blueprint.sharding.tensors[name]
        own = self.model.get_parameter(name).dtype
        rounds = own == torch.float32 and captured.dtypes[name] in HALVES
        if name in captured.trainable:
            storage = exact = self.buffer.parameter(name)
            if rounds:
                buffer = self.buffer
                exact = buffer.view(buffer.main_grad if buffer.sharded else buffer.master, name)
        else:
            shape = stored_shape(tensor, self.mesh.grid.tp)
            storage = exact = torch.zeros(shape, dtype=captured.dtypes[name], device=self.mesh.device)
            if rounds:
                exact = torch.zeros_like(storage, dtype=own)
        return Held(tensor, storage, self._counted(name), exact)

    def _unused(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if name not in self.stages_of and name not in self.captured.aliases:
                yield name, parameter

    def _spare(self, name: str, parameter: nn.Parameter) -> Held:
        storage = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.mesh.device)
        return Held(TensorSharding(name, tuple(parameter.shape)), storage, self.mesh.tp_rank == 0, storage)

    def shards(self, flat: Flat, names: Collection[str] | None = None) -> Iterator[Shard]:
        """``flat`` ([buffer.size]: values, gradients, optimizer state) as shards of HuggingFace tensors, of some
        parameters or all. Of values, what the model computes with."""
        for name in self.buffer.slots if names is None else names:
            held = self.held[name]
            yield held.shard(self.mesh, held.storage if flat is self.buffer.data else self.buffer.view(flat, name))

    def others(self) -> Iterator[Shard]:
        """The weights that are not trained."""
        for name, held in self.held.items():
            if name not in self.buffer.slots:
                yield held.shard(self.mesh, held.exact)

    def exported(self, names: Collection[str]) -> Iterator[Shard]:
        """Weights in the dtypes of the user's model."""
        for name in names:
            yield self.held[name].shard(self.mesh, self.held[name].exact)

    @torch.no_grad()
    def settle(self) -> None:
        """Frozen weights that compute in another dtype than the user's model has follow their exact values."""
        for name, held in self.held.items():
            if name not in self.buffer.slots and held.exact is not held.storage:
                held.storage.copy_(held.exact)

    @torch.no_grad()
    def follow_edits(self) -> None:
        """All copies of a weight follow the one that is exported, after that was written from outside."""
        for name, held in self.held.items():
            if held.exact is not held.storage and name in self.buffer.slots:
                held.storage.copy_(held.exact)
        self.settle()
        self.buffer.follow_edits()

    def _stored(self, directory: Source) -> dict[str, str]:
        """The parameters that are read from ``directory``, and their names there."""
        names, adapted = {*directory.names()}, has_adapters(self.model)
        under = {name: name_before(name) if adapted else name for name in self.held}
        return {name: each for name, each in under.items() if each in names}

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Take the values from where the model was loaded, from the first rank's model, or from its own random rule.

        Collective over all ranks: what fails on one raises its MerakError on every rank.
        """
        buffer, turns = self.buffer, self.buffer.filling()
        give = self._giver(seed)
        give([*self.others()])
        self.settle()
        masters = buffer.main_grad if buffer.sharded else buffer.master
        for _ in range(max(gather_json(len(buffer.turns(buffer.main_grad)), self.mesh.control, "cpu"))):
            buckets = next(turns, ())
            names = [name for bucket in buckets for name in bucket.names]
            give([*self.exported(names)])
            for name in names:
                held = self.held[name]
                if held.exact is held.storage:
                    buffer.view(masters, name).copy_(held.storage)
                else:
                    held.storage.copy_(held.exact)
            if buffer.sharded and buffer.rounds:
                buffer.take(buffer.master, masters, buckets)
        next(turns, None)  # the last buckets are kept

    def _giver(self, seed: int) -> Callable[[Sequence[Shard]], None]:
        """What fills shards, on all ranks together."""
        model, control, directory = self.model, self.mesh.control, source_of(self.model)
        stored = {} if directory is None else self._stored(directory)
        in_memory = {*broadcast_json(ModuleSource(model).names(), control, "cpu")} - stored.keys()
        initialiser: list[Initialiser] = []

        def give(shards: Sequence[Shard]) -> None:
            deliver([shard for shard in shards if shard.name in in_memory], ModuleSource(model), self.mesh)
            with together(control, "cpu"):
                if directory is not None:
                    found = [shard for shard in shards if shard.name in stored]
                    fill([replace(shard, name=stored[shard.name]) for shard in found], directory)
                for shard in shards:
                    if shard.name not in in_memory and shard.name not in stored:
                        initialiser[:] = initialiser or [Initialiser(model)]
                        full = initialiser[0].draw(shard.name, seed)
                        if shard.dim is not None:
                            full = torch.cat([full.narrow(shard.dim, a, b - a) for a, b in shard.intervals], shard.dim)
                        shard.tensor.copy_(full)

        return give
