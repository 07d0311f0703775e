"""From a configuration and a plan to this rank's stage: parameters in flat storage, filled, bound to its units."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.store import Shard
from ..config import Config
from ..models.gpt import Prelude, Unit, build_unit
from ..models.layers import Placement
from ..models.names import tensor_table
from ..parallel.buffers import BufferEntry, ParameterBuffer, default_bucket_elements
from ..parallel.mesh import Mesh, new_groups
from ..plan import Plan, TensorSharding
from ..runtime.parameters import StageParameters
from ..runtime.program import LOSS, Program
from ..runtime.stage import Stage
from ..segment import Common, Crossing, fuse
from ..tensor_parallel.layout import ParameterLayout
from .materialize import initialise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Key = tuple[str, ...]


@dataclass(frozen=True)
class Model:
    """This rank's part of the model: its stage, its flat storage, and how the storage reads as HuggingFace tensors."""

    stage: Stage
    buffer: ParameterBuffer
    layouts: dict[str, ParameterLayout]
    mesh: Mesh

    def shards(self, flat: torch.Tensor) -> Iterator[Shard]:
        """``flat`` (values, gradients or optimizer state, [buffer.size]) as shards of HuggingFace tensors.

        Of all ranks exactly one owns each part: the first replica, the first stage that holds it, tensor rank 0 if
        replicated.
        """
        mesh, tp = self.mesh, self.mesh.grid.tp
        for name, layout in self.layouts.items():
            owner = mesh.dp_rank == 0 and self.buffer.slots[name].counted
            for piece, view in layout.views(self.buffer.view(flat, name), mesh.tp_rank, tp):
                tensor = piece.sharding
                yield Shard(tensor.name, tensor.shape, tensor.dim, tensor.intervals(mesh.tp_rank, tp), view, owner)


def tensors(config: Config) -> tuple[TensorSharding, ...]:
    """The plan's table of tensors: how tensor parallelism divides each one of the model."""
    return tensor_table(config.model, config.parallel.tensor_model_parallel_size)


def key_of(layout: ParameterLayout) -> Key:
    """What identifies a parameter across units and stages: equal keys are one tied parameter."""
    return tuple(piece.sharding.name for piece in layout.pieces)


def find_ties(units: list[Unit], plan: Plan) -> dict[Key, tuple[int, ...]]:
    """The stages that hold each parameter, in order."""
    stage_of = {unit: stage for stage, part in enumerate(plan.stages) for unit in part.units}
    held: dict[Key, list[int]] = {}
    for unit in units:
        for layout in unit.layouts.values():
            stages = held.setdefault(key_of(layout), [])
            if stage_of[unit.index] not in stages:
                stages.append(stage_of[unit.index])
    return {key: tuple(stages) for key, stages in held.items()}


def tie_groups(
    stages_of: dict[Key, tuple[int, ...]], plan: Plan, mesh: Mesh
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """A group per distinct set of stages that share a parameter; every rank makes all of them in the same order."""
    grid, groups = mesh.grid, {}
    for stages in sorted({stages for stages in stages_of.values() if len(stages) > 1}):
        ranks = [plan.schedule.rank_of(stage) for stage in stages]
        members = [[grid.rank(tp, 0, dp, pp) for pp in ranks] for dp in range(grid.dp) for tp in range(grid.tp)]
        groups[stages] = new_groups(mesh.rank, members, mesh.timeout)
    return groups


def bind(unit: Unit, name: str, parameter: nn.Parameter) -> None:
    """Replace the unit's parameter ``name``."""
    path, _, leaf = name.rpartition(".")
    setattr(unit.get_submodule(path), leaf, parameter)


def build_model(config: Config, plan: Plan, mesh: Mesh) -> Model:
    """Build, initialise and bind this rank's stage. Collective over all ranks: it makes groups for tied parameters."""
    dtype, model = DTYPES[config.train.dtype], config.model
    place = Placement(mesh.tp, "edge", dtype, "meta")
    chain = [build_unit(index, model, place) for index in range(model.num_layers + 2)]
    (index,) = plan.stages_of(mesh.pp_rank)
    units = [chain[unit] for unit in plan.stages[index].units]
    stages_of = find_ties(chain, plan)
    groups = tie_groups(stages_of, plan, mesh)
    entries, layouts, names = _entries(units, stages_of, index, mesh)
    bucket = config.parallel.ddp_bucket_size or default_bucket_elements(mesh.grid.dp)
    buffer = ParameterBuffer(entries, dtype, mesh.device, bucket)
    for name, layout in layouts.items():
        for piece, view in layout.views(buffer.parameter(name), mesh.tp_rank, mesh.grid.tp):
            initialise(view, piece, config.train.seed, mesh.tp_rank, mesh.grid.tp)
    parameters = {name: nn.Parameter(buffer.parameter(name)) for name in layouts}
    for unit in units:
        for local in unit.layouts:
            bind(unit, local, parameters[names[unit.index, local]])
    ties = tuple(
        (n, groups[stages_of[key_of(layout)]]) for n, layout in layouts.items() if len(stages_of[key_of(layout)]) > 1
    )
    held = StageParameters(
        buffer,
        {parameter: name for name, parameter in parameters.items()},
        mesh,
        frozenset(name for name, layout in layouts.items() if not layout.sharded),
        ties,
        not config.parallel.no_overlap_grad_reduce,
    )
    modules = nn.ModuleList(units)
    for module in modules.modules():
        if hasattr(module, "sink"):
            module.sink = held.weights
    program = _program(units, len(chain), Prelude(model, mesh.device), mesh, plan, dtype)
    recompute = plan.stages[index].recompute
    stage = Stage(index, lambda batch, training: program, held, recompute, mesh, config.train.seed, modules.train)
    return Model(stage, buffer, layouts, mesh)


def _program(units: list[Unit], chain: int, prelude: Prelude, mesh: Mesh, plan: Plan, dtype: torch.dtype) -> Program:
    """One hidden state crosses each border; the loss is a sum over tokens."""
    hidden = ((plan.micro_batch_size, plan.sequence_length, prelude.config.hidden_size), dtype)
    first, last = units[0].index == 0, units[-1].index == chain - 1
    return Program(
        tuple(s for unit in units for s in (unit.segments() if mesh.tp is not None else [fuse(unit.segments())])),
        prelude,
        () if first else (Crossing(units[0].source, *hidden),),
        () if last else (Crossing(units[-1].target, *hidden),),
        (LOSS,) if last else (),
        _tokens,
    )


def _tokens(common: Common) -> torch.Tensor:
    return common["loss_mask"].sum()


def _entries(units: list[Unit], stages_of: dict[Key, tuple[int, ...]], index: int, mesh: Mesh):
    """Storage entries per unit, name -> layout, and (unit, local name) -> name; tied parameters share one name."""
    entries, layouts, names, seen = [], {}, {}, {}
    for unit in units:
        group = []
        for local, parameter in unit.named_parameters():
            layout, name = unit.layouts[local], f"{unit.name}.{local}"
            key = key_of(layout)
            names[unit.index, local] = seen.setdefault(key, name)
            if seen[key] != name:
                continue
            layouts[name] = layout
            first = stages_of[key][0] == index
            counted = first and (layout.sharded or mesh.tp_rank == 0)
            group.append(BufferEntry(name, tuple(parameter.shape), parameter.dim() > 1, counted))
        entries.append(group)
    return entries, layouts, names
