"""One rank's shards of a captured model's parameters: those that its pipeline stages use, with
initial values.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from ..checkpoint.hf import Source, fill, source_of
from ..checkpoint.shard import overlaps_of_rectangle
from ..checkpoint.store import Shard
from ..errors import PlanError
from ..graph.fusion.four_bit import stored_as
from ..ops import FourBit, stored_bytes
from ..parallel.agree import broadcast_json, gather_json, together
from ..parallel.buffers import BufferEntry, Flat, ParameterBuffer, ShardedState, align
from ..parallel.mesh import Mesh
from ..plan import TensorSharding
from ..runtime.frozen_weights import FrozenWeights
from ..runtime.parameters import RankParameters
from .adapters import has_adapters, name_before
from .blueprint import Blueprint
from .deliver import deliver
from .four_bit import FourBitSource, shards_of, whole_formats
from .init_captured import Initialiser, workers_for
from .parameter_groups import GroupOf
from .precision import DTYPES, HALVES
from .sharing import expert_shards_of, shard_of, stages_sharing, tie_groups


@dataclass(frozen=True)
class StoredParameter:
    """This rank's shard of one parameter, padding included.

    sharding: how tensor parallelism shards it.
    storage:  the tensor that the model computes with.
    counted:  whether this rank, of those of a replica that have the same values, counts and writes
              them.
    exact:    its values in the dtype of the user's model: fp32 where it computes in 16 bits, else
              ``storage`` itself. Where replicas shard the fp32 values, a view of the gradient's
              memory, into which they are all-gathered.
    four_bit: how all ranks together store a weight in 4 bits, of which ``storage`` are the bytes;
              None for others.
    """

    sharding: TensorSharding
    storage: Tensor
    counted: bool
    exact: Tensor
    four_bit: FourBit | None = None

    def shard(self, mesh: Mesh, storage: Tensor) -> Shard:
        """``storage``, of the shape of ``self.storage``, as a shard of a HuggingFace tensor,
        without padding.
        """
        tensor = self.sharding
        if self.four_bit is not None:
            return next(self.parts(mesh))
        rank, ranks = mesh.sharing(tensor.experts)
        shape = tensor.local_shape(rank, ranks)
        view = storage if tensor.dim is None else storage.narrow(tensor.dim, 0, shape[tensor.dim])
        owner = self.counted and mesh.same(tensor.experts)[0] == 0
        dim = tensor.dim
        intervals = tensor.intervals(rank, ranks)
        slab = None
        if tensor.within is not None and dim is not None:
            ((first, last),) = intervals
            slab = (dim, first, last)
            dim = tensor.within
            intervals = tensor.features(rank)
        return Shard(tensor.name, tensor.shape, dim, intervals, tensor=view, owner=owner, slab=slab)

    def parts(self, mesh: Mesh) -> Iterator[Shard]:
        """Yield what a weight in 4 bits is made of, see ``shards_of``; nothing for others."""
        if self.four_bit is not None:
            tensor = self.sharding
            rank, ranks = mesh.sharing(tensor.experts)
            owner = self.counted and mesh.same(tensor.experts)[0] == 0
            yield from shards_of(tensor, self.four_bit, self.storage, rank, ranks, owner=owner)


class ParameterShards:
    """The parameter shards of one rank, of all its stages: trainable ones are views of ``buffer``,
    frozen ones are not.

    The first stage keeps the parameters that the loss does not use, so that checkpoints are
    complete.

    stored:     per parameter name, this rank's shard.
    parameters: per parameter name, what segments read.
    stages_of:  per parameter name of the whole model, the stages that use it.
    units:      the units of this rank's stages, in order.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, group_of: GroupOf):
        self.blueprint = blueprint
        self.mesh = mesh
        self.captured = blueprint.traced.captured
        self.model = blueprint.traced.model
        self.stages = blueprint.plan.stages_of(mesh.pp_rank)
        self.stages_of = blueprint.stages_of()
        tensors = blueprint.sharding.tensors
        self._four_bit = whole_formats(self.captured.four_bit, tensors, blueprint.plan.grid.tp)
        self.units = [unit for stage in self.stages for unit in blueprint.plan.stages[stage].units]
        used = [self.reads(unit) for unit in self.units]
        owner = {
            name: min(k for k, names in enumerate(used) if name in names)
            for names in used
            for name in names
        }
        if blueprint.plan.offload_model_states:
            check_one_dtype({name: self.captured.dtypes[name] for name in self.captured.trainable})
        own = [[n for n in names if owner[n] == k] for k, names in enumerate(used)]
        self.buffer = self._make_buffer([self._beside(names) for names in own], group_of)
        self.frozen = self._make_frozen_on_host(owner) if self.buffer.on_host else None
        self._frozen = (
            {name: x for names in own for name, x in self._make_frozen(names)}
            if self.frozen is None
            else self.frozen.on_host
        )
        self.stored = {name: self._store(name) for name in owner}
        trainable = self.captured.trainable
        read = {} if self.frozen is None else self.frozen.parameters
        self.parameters = {
            name: read[name] if name in read else nn.Parameter(stored.storage, name in trainable)
            for name, stored in self.stored.items()
        }
        if 0 in self.stages:
            self.stored |= {
                name: self._store_unused(name, parameter) for name, parameter in self._unused()
            }

    def reads(self, unit: int) -> Collection[str]:
        """The parameters that a unit uses."""
        return self.blueprint.chain.parameters[unit]

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The names of the trainable parameters."""
        return {
            parameter: name
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }

    @property
    def shares_weights(self) -> bool:
        """Whether the data-parallel ranks have parts of the weights that are exported."""
        return (
            self.mesh.experts is not None
            or self.shares_exact
            or self.buffer.sharding >= ShardedState.PARAMETERS
        )

    @property
    def shares_exact(self) -> bool:
        """Whether weights that are rounded for computing have fp32 values that data-parallel ranks
        shard.
        """
        return self.buffer.sharded and any(
            stored.exact is not stored.storage and name in self.buffer.slots
            for name, stored in self.stored.items()
        )

    @property
    def replicated(self) -> frozenset[str]:
        """The parameters that are replicated over the tensor-parallel ranks."""
        return frozenset(name for name in self.parameters if self.stored[name].sharding.dim is None)

    def rank_parameters(self) -> RankParameters:
        """The trainable parameters, as stages and the optimizer use them.

        Collective over all ranks: makes process groups for the parameters that several pipeline
        ranks have.
        """
        names = self.names
        plan = self.blueprint.plan
        mesh = self.mesh
        stages_of: dict[tuple[str, ...], tuple[int, ...]] = {
            (name,): stages for name, stages in self.stages_of.items()
        }
        groups = tie_groups(stages_of, plan, mesh)
        shared = stages_sharing(stages_of, plan, mesh)
        trained = sorted(names.values())  # the same order on every rank
        return RankParameters(
            self.buffer,
            names,
            mesh,
            self.replicated,
            ties=tuple((name, groups[name,]) for name in trained if (name,) in groups),
            overlap=plan.overlap_grad_reduce,
            overlap_gathers=plan.overlap_param_gather,
            partial=self.blueprint.partial,
            shared={name: shared[name,] for name in trained if (name,) in shared},
            reads={
                unit: [name for name in self.reads(unit) if name in self.buffer.slots]
                for unit in self.units
            },
            in_bf16=plan.grad_reduce_in_bf16,
            tensors=self.blueprint.sharding.tensors,
            frozen=self.frozen,
        )

    def _make_frozen_on_host(self, names: Iterable[str]) -> FrozenWeights:
        captured = self.captured
        frozen = {}
        for name in names:
            if name not in captured.trainable:
                tensor = self.blueprint.sharding.tensors[name]
                shape = tensor.stored_shape(self.blueprint.plan.ranks_of(tensor))
                frozen[name] = (shape, captured.dtypes[name])
        reads = {unit: [*self.reads(unit)] for unit in self.units}
        return FrozenWeights(frozen, reads, self.mesh.device)

    def _make_buffer(self, units: list[list[str]], group_of: GroupOf) -> ParameterBuffer:
        blueprint = self.blueprint
        tensors = blueprint.sharding.tensors
        captured = self.captured

        def entry(name: str) -> BufferEntry:
            tensor = tensors[name]
            group = group_of(name, tensor.shape)
            fp32 = captured.dtypes[name] == torch.float32
            ranks = {*map(blueprint.plan.schedule.rank_of, self.stages_of[name])}
            return BufferEntry(
                name,
                tensor.stored_shape(blueprint.plan.ranks_of(tensor)),
                group,
                self._counted(name),
                fp32=fp32,
                tied=len(ranks) > 1,
                experts=tensor.experts,
            )

        entries = [[entry(name) for name in names] for names in units]
        kinds = {captured.dtypes[name] for name in captured.trainable}
        dtype = kinds.pop() if len(kinds) == 1 else DTYPES[blueprint.plan.dtype]
        plan = blueprint.plan
        mesh = self.mesh
        shards, shard, sharding = shard_of(plan, mesh)
        return ParameterBuffer(
            entries,
            dtype,
            mesh.device,
            plan.bucket_size,
            shards=shards,
            shard=shard,
            sharding=sharding,
            experts=expert_shards_of(plan, mesh),
            on_host=plan.offload_model_states,
        )

    def _beside(self, names: list[str]) -> list[str]:
        """Return the trained parameters of a unit in the order in which they lie in memory: that of
        first use; beside frozen ones, matrices of as many inputs together, so that adapters of
        layers of one input are one product.
        """
        trained = [name for name in names if name in self.captured.trainable]
        shapes = {name: self.captured.shapes[name] for name in trained}
        if len(trained) == len(names) or any(len(shape) != 2 for shape in shapes.values()):
            return trained
        widths = list(dict.fromkeys(shape[1] for shape in shapes.values()))
        return sorted(trained, key=lambda name: widths.index(shapes[name][1]))

    def _make_frozen(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen parameters of a unit, with zeros: those of one dtype are one piece of
        memory, in order of first use, so that layers of one input are one product.
        """
        captured = self.captured
        tensors = self.blueprint.sharding.tensors
        frozen = [name for name in names if name not in captured.trainable]
        for name in [name for name in frozen if name in self._four_bit]:
            tensor = tensors[name]
            how = stored_as(self._four_bit[name], tensor.stored_shape(self.blueprint.plan.grid.tp))
            yield name, torch.zeros(stored_bytes(how), dtype=torch.uint8, device=self.mesh.device)
        frozen = [name for name in frozen if name not in self._four_bit]
        for dtype in dict.fromkeys(captured.dtypes[name] for name in frozen):
            shapes = {
                name: tensors[name].stored_shape(self.blueprint.plan.ranks_of(tensors[name]))
                for name in frozen
                if captured.dtypes[name] == dtype
            }
            sizes = [align(prod(shape)) for shape in shapes.values()]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=self.mesh.device)
            for (name, shape), piece in zip(shapes.items(), flat.split(sizes), strict=True):
                yield name, piece[: prod(shape)].view(shape)

    def _counted(self, name: str) -> bool:
        """Whether this rank, of those of a replica that have the same values, counts and writes
        them.
        """
        replicated = self.blueprint.sharding.tensors[name].dim is None
        return self.stages_of[name][0] in self.stages and (not replicated or self.mesh.tp_rank == 0)

    def _store(self, name: str) -> StoredParameter:
        captured = self.captured
        tensor = self.blueprint.sharding.tensors[name]
        own = self.model.get_parameter(name).dtype
        rounds = own == torch.float32 and captured.dtypes[name] in HALVES
        if name in captured.trainable:
            storage = exact = self.buffer.parameter(name)
            if rounds:
                buffer = self.buffer
                exact = buffer.view(buffer.main_grad if buffer.sharded else buffer.master, name)
        else:
            storage = exact = self._frozen[name]
            if rounds:
                exact = torch.zeros_like(storage, dtype=own)
        how = self._four_bit.get(name)
        return StoredParameter(tensor, storage, self._counted(name), exact, four_bit=how)

    def _unused(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            if name not in self.stages_of and name not in self.captured.aliases:
                yield name, parameter

    def _store_unused(self, name: str, parameter: nn.Parameter) -> StoredParameter:
        storage = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.buffer.home)
        return StoredParameter(
            TensorSharding(name, tuple(parameter.shape)), storage, self.mesh.tp_rank == 0, storage
        )

    def shards(self, flat: Flat, names: Collection[str] | None = None) -> Iterator[Shard]:
        """``flat`` ([buffer.size]: weights, gradients or optimizer state) as shards of HuggingFace
        tensors.

        names: of parameters; None: all trainable ones.

        For weights these are the tensors that the model computes with.
        """
        for name in self.buffer.slots if names is None else names:
            stored = self.stored[name]
            yield stored.shard(
                self.mesh,
                stored.storage if flat is self.buffer.data else self.buffer.view(flat, name),
            )

    def others(self) -> Iterator[Shard]:
        """Shards of the frozen weights."""
        for name, stored in self.stored.items():
            if name not in self.buffer.slots:
                yield stored.shard(self.mesh, stored.exact)

    def exported(self, names: Collection[str]) -> Iterator[Shard]:
        """Shards of weights in the dtypes of the user's model."""
        for name in names:
            yield self.stored[name].shard(self.mesh, self.stored[name].exact)

    @torch.no_grad()
    def round_frozen(self) -> None:
        """Round frozen weights, from their values in the dtype of the user's model, to the dtype
        that computes.
        """
        for name, stored in self.stored.items():
            if name not in self.buffer.slots and stored.exact is not stored.storage:
                stored.storage.copy_(stored.exact)

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Update all copies of a weight from the exported one, after the user has written to it."""
        for name, stored in self.stored.items():
            if stored.exact is not stored.storage and name in self.buffer.slots:
                stored.storage.copy_(stored.exact)
        self.round_frozen()
        self.buffer.follow_edits()

    def _names_in(self, directory: Source) -> dict[str, str]:
        """The parameters that ``directory`` has, and their names there."""
        available = {*directory.names()}
        adapted = has_adapters(self.model)
        names = {name: name_before(name) if adapted else name for name in self.stored}
        return {name: original for name, original in names.items() if original in available}

    @torch.no_grad()
    def fill(self, seed: int) -> None:
        """Give every parameter its initial value, and ``buffer`` its fp32 masters.

        Values come from the directory that the model was loaded from; else from the first rank's
        model in memory; else from the model's own random initialisation, by ``seed``.

        Collective over all ranks: a MerakError on one rank is raised on every rank.
        """
        buffer = self.buffer
        turns = self.buffer.filling()
        fill_shards = self._filler(seed)
        parts = [part for stored in self.stored.values() for part in stored.parts(self.mesh)]
        packed = {part.name for part in parts}
        fill_shards([*parts, *[shard for shard in self.others() if shard.name not in packed]])
        self.round_frozen()
        masters = buffer.main_grad if buffer.sharded else buffer.master
        for _ in range(
            max(gather_json(len(buffer.turns(buffer.main_grad)), self.mesh.control, "cpu"))
        ):
            buckets = next(turns, ())
            names = [name for bucket in buckets for name in bucket.names]
            fill_shards([*self.exported(names)])
            for name in names:
                stored = self.stored[name]
                if stored.exact is stored.storage:
                    buffer.view(masters, name).copy_(stored.storage)
                else:
                    stored.storage.copy_(stored.exact)
            if buffer.sharded and buffer.rounds:
                buffer.take(buffer.master, masters, buckets)
        next(turns, None)  # so that the last buckets are kept

    def _filler(self, seed: int) -> Callable[[Sequence[Shard]], None]:
        """A function that fills shards; collective over all ranks."""
        model = self.model
        control = self.mesh.control
        directory = source_of(self.model)
        names = {} if directory is None else self._names_in(directory)
        source = FourBitSource(model, self._four_bit)
        in_memory = {*broadcast_json(source.names(), control, "cpu")} - names.keys()
        initialiser: list[Initialiser] = []
        workers = workers_for(model, self.mesh.device)

        def fill_shards(shards: Sequence[Shard]) -> None:
            held = [shard for shard in shards if shard.name in in_memory]
            experts = {name for name, each in self.stored.items() if each.sharding.experts}
            deliver([shard for shard in held if shard.name not in experts], source, self.mesh)
            if self.mesh.experts is not None:
                own = [shard for shard in held if shard.name in experts]
                deliver(own, source, self.mesh, experts=True)
            with together(control, "cpu"):
                if directory is not None:
                    on_disk = [shard for shard in shards if shard.name in names]
                    fill([replace(shard, name=names[shard.name]) for shard in on_disk], directory)
                drawn = [
                    shard
                    for shard in shards
                    if shard.name not in in_memory and shard.name not in names
                ]
                if drawn:
                    initialiser[:] = initialiser or [Initialiser(model)]
                    draw = partial(_draw, initialiser[0], seed)
                    # one after the other, where that is no less fast, in this thread
                    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
                        for _ in (map if pool is None else pool.map)(draw, drawn):
                            pass

        return fill_shards


def check_one_dtype(dtypes: Mapping[str, torch.dtype]) -> None:
    """Raise PlanError for weights that train in fp32 beside 16-bit ones, where model states are in
    host memory: segments would read them from there.
    """
    if len({*dtypes.values()}) > 1:
        name = min(name for name, dtype in dtypes.items() if dtype == torch.float32)
        reason = f"parameter {name} computes in fp32 and others in 16 bits"
        remedy = "Compute all in one type, or freeze it"
        raise PlanError("offload_model_states", True, reason, remedy)


@torch.no_grad()
def _draw(initialiser: Initialiser, seed: int, shard: Shard) -> None:
    """Fill a shard with its part of the initial value."""
    full = initialiser.draw(shard.name, seed)
    whole = [(0, extent) for extent in full.shape]
    for target, source in overlaps_of_rectangle(tuple(full.shape), shard.part, whole):
        shard.tensor[target].copy_(full[source])
