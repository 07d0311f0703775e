"""Build this rank's stages of the native model: its parameters in flat storage, initialised, and
bound to its units.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..errors import PlanError
from ..models.gpt import GPTPrelude, GPTUnit, build_unit
from ..models.layers import Placement
from ..models.names import outer_names, tensor_table
from ..parallel.buffers import BufferEntry, ParameterBuffer
from ..parallel.mesh import Mesh
from ..plan import Plan, TensorSharding
from ..runtime.halves import halve
from ..runtime.parameters import RankParameters
from ..runtime.program import LOSS, Program
from ..runtime.stage import Stage
from ..segment import Common, Crossing, fuse
from ..tensor_parallel.layout import ParameterLayout
from .init_native import initialise_all, workers_for
from .parameter_groups import GroupOf, groups_of_run
from .precision import DTYPES
from .sharing import shard_of, stages_sharing, tie_groups

Key = tuple[str, ...]


@dataclass(frozen=True)
class NativeStages:
    """This rank's stages of the native model.

    stages:     by global index.
    parameters: all of this rank's stages.
    layouts:    per parameter, which HuggingFace tensors its storage consists of.
    """

    stages: dict[int, Stage]
    parameters: RankParameters
    layouts: dict[str, ParameterLayout]


def tensors(config: Config) -> tuple[TensorSharding, ...]:
    """How tensor parallelism shards each tensor of the model, as plans list it."""
    return tensor_table(config.model, config.parallel.tensor_model_parallel_size)


def check_native_shardings(plan: Sequence[TensorSharding], table: Sequence[TensorSharding]) -> None:
    """Raise PlanError, naming the first difference, unless a plan shards all tensors as the native
    model does.

    table: how the native model shards them (see ``tensors``); it can compute with no other
           sharding.
    """
    planned = {tensor.name: tensor for tensor in plan}
    native = {tensor.name: tensor for tensor in table}
    for name, tensor in native.items():
        if name not in planned:
            reason = (
                "the plan does not say how it is sharded; the native model has it "
                f"{tensor.describe()}"
            )
            raise PlanError("sharding of", name, reason, "Restore its row in the plan")
        if planned[name].shape != tensor.shape:
            reason = (
                f"its shape is {planned[name].shape} in the plan, and {tensor.shape} in the model"
            )
            raise PlanError(
                "sharding of", name, reason, "Train the model that the plan was made for"
            )
        stored = planned[name].describe()
        expected = tensor.describe()
        if stored != expected:
            reason = f"the plan has it {stored}, and the native model {expected}, never otherwise"
            raise PlanError(
                "sharding of", name, reason, "Restore it, or train the model by pretrain_hf.py"
            )
    unknown = next((name for name in planned if name not in native), None)
    if unknown is not None:
        reason = "the plan says how it is sharded, and the native model has no such tensor"
        raise PlanError(
            "sharding of", unknown, reason, "Train the model that the plan was made for"
        )


def key_of(layout: ParameterLayout) -> Key:
    """The key of a parameter across units and stages: tied parameters have equal keys."""
    return tuple(piece.sharding.name for piece in layout.pieces)


def find_ties(units: list[GPTUnit], plan: Plan) -> dict[Key, tuple[int, ...]]:
    """The stages that use each parameter, in order."""
    stage_of = {unit: stage for stage, part in enumerate(plan.stages) for unit in part.units}
    stages_of: dict[Key, dict[int, None]] = {}
    for unit in units:
        for layout in unit.layouts.values():
            stages_of.setdefault(key_of(layout), {})[stage_of[unit.index]] = None
    return {key: tuple(stages) for key, stages in stages_of.items()}


def bind(unit: GPTUnit, name: str, parameter: nn.Parameter) -> None:
    """Replace the unit's parameter ``name``."""
    path, _, leaf = name.rpartition(".")
    setattr(unit.get_submodule(path), leaf, parameter)


def build_stages(config: Config, plan: Plan, mesh: Mesh) -> NativeStages:
    """Build, initialise and bind this rank's stages. Collective over all ranks: makes groups for
    tied parameters.
    """
    dtype = DTYPES[plan.dtype]
    model = dataclasses.replace(config.model, cross_entropy_chunk_size=plan.loss_chunk)
    place = Placement(
        mesh.tp,
        "edge",
        dtype,
        "meta",
        sequence_parallel=plan.sequence_parallel,
        recompute_activations=plan.recompute_activations,
        fp32_residual=plan.fp32_residual,
    )
    chain = [build_unit(index, model, place) for index in range(model.num_layers + 2)]
    units_of = {
        stage: [chain[unit] for unit in plan.stages[stage].units]
        for stage in plan.stages_of(mesh.pp_rank)
    }
    units = [unit for stage in units_of.values() for unit in stage]
    stages_of = find_ties(chain, plan)
    groups = tie_groups(stages_of, plan, mesh)
    shared = stages_sharing(stages_of, plan, mesh)
    group_of = groups_of_run(config.optimizer, outer_names(config.model))
    entries, layouts, names = _entries(units, stages_of, groups, units_of, mesh, group_of)
    buffer = ParameterBuffer(entries, dtype, mesh.device, plan.bucket_size, *shard_of(plan, mesh))
    for buckets in buffer.filling():
        parts = [
            part
            for bucket in buckets
            for name in bucket.names
            for part in layouts[name].views(buffer.parameter(name), mesh.tp_rank, mesh.grid.tp)
        ]
        initialise_all(
            parts, config.train.seed, mesh.tp_rank, mesh.grid.tp, workers=workers_for(mesh.device)
        )
    parameters = {name: nn.Parameter(buffer.parameter(name)) for name in layouts}
    for unit in units:
        for local in unit.layouts:
            bind(unit, local, parameters[names[unit.index, local]])
    keys = {name: key_of(layout) for name, layout in layouts.items()}
    rank_parameters = RankParameters(
        buffer,
        {parameter: name for name, parameter in parameters.items()},
        mesh,
        frozenset(name for name, layout in layouts.items() if not layout.sharded),
        ties=tuple((name, groups[key]) for name, key in keys.items() if key in groups),
        overlap=plan.overlap_grad_reduce,
        overlap_gathers=plan.overlap_param_gather,
        shared={name: shared[key] for name, key in keys.items() if key in shared},
        reads={unit.index: [names[unit.index, local] for local in unit.layouts] for unit in units},
        in_bf16=plan.grad_reduce_in_bf16,
    )
    prelude = GPTPrelude(model, mesh.device)
    split = halve if plan.overlap == "sub-pipeline" else None
    stages = {}
    for index, part in units_of.items():
        modules = nn.ModuleList(part)
        with_sinks: list[Any] = [module for module in modules.modules() if hasattr(module, "sink")]
        for module in with_sinks:
            module.sink = rank_parameters.weights
        stages[index] = Stage(
            index,
            _Programs(part, len(chain), prelude, mesh, plan=plan, dtype=place.stream),
            rank_parameters,
            plan.stages[index].runs,
            mesh,
            config.train.seed,
            mode=modules.train,
            split=split,
            overlap=plan.overlap != "none",
            units=plan.stages[index].units,
        )
    return NativeStages(stages, rank_parameters, layouts)


class _Programs:
    """The programs of one stage, by the number of samples.

    dtype: of the hidden states that stages send to each other. The loss is a sum over tokens.
    """

    def __init__(
        self,
        units: list[GPTUnit],
        chain: int,
        prelude: GPTPrelude,
        mesh: Mesh,
        plan: Plan,
        dtype: torch.dtype,
    ):
        self.units = units
        self.prelude = prelude
        self.plan = plan
        self.dtype = dtype
        self.first = units[0].index == 0
        self.last = units[-1].index == chain - 1
        one = mesh.tp is None  # nothing is communicated inside a unit
        self.segments = tuple(
            s for u in units for s in ([fuse(u.segments())] if one else u.segments())
        )
        self._programs: dict[int, Program] = {}

    def __call__(
        self, batch: Mapping[str, torch.Tensor], training: bool, task: None = None
    ) -> Program:
        samples = len(batch["tokens"])
        if samples not in self._programs:
            self._programs[samples] = self._make(samples)
        return self._programs[samples]

    def _make(self, samples: int) -> Program:
        shape = self.units[0].border_shape(samples, self.plan.sequence_length)
        return Program(
            self.segments,
            self.prelude,
            sources=() if self.first else (Crossing(self.units[0].source, shape, self.dtype),),
            targets=() if self.last else (Crossing(self.units[-1].target, shape, self.dtype),),
            results=(LOSS,) if self.last else (),
            count=_tokens,
        )


def _tokens(common: Common) -> torch.Tensor:
    return common["loss_mask"].sum()


def _entries(
    units: list[GPTUnit],
    stages_of: Mapping[Key, tuple[int, ...]],
    tied: Collection[Key],
    own_stages: Collection[int],
    mesh: Mesh,
    group_of: GroupOf,
):
    """Buffer entries per unit, name -> layout, and (unit, local name) -> name; tied parameters
    share one name.
    """
    entries = []
    layouts = {}
    names = {}
    seen: dict[Any, Any] = {}
    for unit in units:
        group = []
        for local, parameter in unit.named_parameters():
            layout = unit.layouts[local]
            name = f"{unit.name}.{local}"
            key = key_of(layout)
            names[unit.index, local] = seen.setdefault(key, name)
            if seen[key] != name:
                continue
            layouts[name] = layout
            first = stages_of[key][0] in own_stages
            counted = first and (layout.sharded or mesh.tp_rank == 0)
            shape = tuple(parameter.shape)
            kind = group_of(layout.pieces[0].sharding.name, shape)
            group.append(BufferEntry(name, shape, kind, counted, tied=key in tied))
        entries.append(group)
    return entries, layouts, names
