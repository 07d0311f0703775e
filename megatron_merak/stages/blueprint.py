"""How a captured model is cut into units, sharded and planned, and the programs that one rank runs of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import nn

from ..cluster import CLUSTERS, Cluster
from ..config import ParallelConfig
from ..config.checks import check_recompute, check_schedule, check_sharding
from ..errors import PlanError, TraceError
from ..graph.capture.captured import Captured
from ..graph.capture.fast_trace import gc_paused
from ..graph.capture.guards import Guards
from ..graph.capture.outputs import LossFunction
from ..graph.fusion.fuse import fuse
from ..graph.ir.nodes import is_random
from ..graph.kept_state import StateOf
from ..graph.lowering.lookups import Lookups, Outside, lookups_of
from ..graph.lowering.rewrite import rewrite
from ..graph.lowering.split import Parts, split
from ..graph.lowering.undropped import undropped
from ..graph.measure import measure
from ..graph.partition.cut import Chain, align, cut
from ..graph.sharding.shard import Sharding, TensorRules, shard
from ..parallel.mesh import Mesh
from ..plan import Grid, Plan
from ..plan.fit import check_chain
from ..planner.make import ProgressCallback, choices, plan_chain
from ..planner.predict import priced
from ..planner.tables import by_family
from ..runtime.program import Program
from ..tensor_parallel import group_rank
from .lengths import KnownLengths
from .precision import HALVES
from .traced import Batch, OwnLoss, Traced, shapes_of
from .unused import Unused

MOST_CASES = 16  # programs for batches of one shape that branch differently on their values


def make_blueprint(
    traced: Traced,
    grid: Grid,
    *,
    microbatches: int = 1,
    cluster: Cluster = CLUSTERS["cpu"],
    parallel: ParallelConfig | None = None,
    graph_sharding: str = "cut",
    rules: str = "",
    vocabulary_multiple: int = 1,
    loss_chunk: int = 0,
    sequence_length: int | None = None,
    state_bytes: float = 8.0,
    state_of: StateOf | None = None,
    progress: ProgressCallback = lambda share: None,
) -> "Blueprint":
    """Plan a captured model.

    microbatches:        per step and replica.
    cluster:             what it is planned for.
    parallel:            schedule, recomputation, overlap; its degrees are not read, but those of ``grid``.
    graph_sharding:      how the graph is cut into units.
    rules:               see ``TensorRules.parse``.
    vocabulary_multiple: a vocabulary is padded to a multiple of this x tp.
    loss_chunk:          rows whose logits are in memory at a time, 0 for all.
    sequence_length:     tokens of a sample; None: as many as a row of the first micro-batch has.
    state_bytes:         see ``Plan``.
    state_of:            the same, of each parameter.
    progress:            see ``report_progress`` of ``plan_chain``.

    Raises PlanError.
    """
    parallel = parallel or ParallelConfig()
    check_recompute(parallel)
    check_schedule(parallel)
    check_sharding(parallel)
    captured = traced.captured
    chain = cut(captured, graph_sharding)
    sharding = shard(captured, grid.tp, TensorRules.parse(rules), vocabulary_multiple=vocabulary_multiple)
    samples, length = traced.size
    recompute = parallel.recomputes_activations
    attention = cluster.device.fused_attention
    plan = plan_chain(
        measure(
            captured,
            chain,
            sharding,
            grid.tp,
            fused_attention=attention,
            loss_chunk=loss_chunk,
            recompute_activations=recompute,
            positions=traced.positions,
            state_of=state_of,
        ),
        grid,
        microbatches=microbatches,
        micro_batch_size=samples,
        sequence_length=length if sequence_length is None else sequence_length,
        dtype=traced.dtype,
        cluster=cluster,
        shardings=tuple(sharding.tensors.values()),
        reasons=tuple(sharding.reasons.items()),
        loss_chunk=loss_chunk,
        graph_sharding=graph_sharding,
        state_bytes=state_bytes,
        frozen_bytes=frozen_bytes(traced),
        report_progress=progress,
        **choices(parallel, microbatches),
    )
    return Blueprint(traced, chain, sharding, plan)


def frozen_bytes(traced: Traced) -> float:
    """Bytes per element of the frozen weights, on average; 0 where there are none.

    A weight that is rounded for computing is in memory twice: rounded, and in the dtype of the user's model.
    """
    captured = traced.captured
    sizes: dict[str, tuple[int, int]] = {}
    for name in captured.shapes.keys() - captured.trainable:
        own = traced.model.get_parameter(name).dtype
        computed = captured.dtypes[name]
        rounds = own == torch.float32 and computed in HALVES
        sizes[name] = computed.itemsize + (own.itemsize if rounds else 0), prod(captured.shapes[name])
    count = sum(values for _, values in sizes.values())
    return sum(itemsize * values for itemsize, values in sizes.values()) / count if count else 0.0


def blueprint_from_plan(traced: Traced, plan: Plan, state_of: StateOf | None = None) -> "Blueprint":
    """Apply a stored or edited plan to a captured model. The plan's predictions are computed anew.

    state_of: see ``make_blueprint``.

    Raises PlanError, naming the first difference, if the plan is one of another model or cannot be followed.
    """
    captured = traced.captured
    tp = plan.grid.tp
    if plan.sequence_parallel:
        raise PlanError("plan: sequence_parallel", True, "only the native model supports it", "Set it to false")
    if plan.fp32_residual:
        remedy = "Set it to false: the model's own code decides the dtype of its residuals"
        raise PlanError("plan: fp32_residual", True, "only the native model supports it", remedy)
    if not plan.graph_sharding:
        raise PlanError("plan: graph_sharding", "''", "it is a plan of the native model", "Make a plan of this model")
    chain = cut(captured, plan.graph_sharding)
    check_chain(plan, chain.names)
    sharding = shard(captured, tp, pins={tensor.name: tensor for tensor in plan.shardings}, complete=True)
    units = measure(
        captured,
        chain,
        sharding,
        tp,
        fused_attention=plan.cluster.device.fused_attention,
        loss_chunk=plan.loss_chunk,
        recompute_activations=plan.recompute_activations,
        positions=traced.positions,
        state_of=state_of,
    )
    return Blueprint(traced, chain, sharding, priced(replace(plan, units=units)))


@dataclass(frozen=True)
class Role:
    """What a program of a stage computes.

    outputs: the names of what it returns.
    drops:   whether dropout is applied, if the model has any.
    compute: computes the outputs; None: the model and its loss do.
    """

    training: bool
    outputs: tuple[str, ...]
    drops: bool = True
    compute: LossFunction | None = None


@dataclass(frozen=True)
class Task:
    """What a training step or an evaluation computes.

    loss:    computes losses and outputs; None: the model does, with the loss that it was traced with.
    outputs: names of the outputs of an evaluation.
    dropout: whether training applies dropout.
    """

    loss: OwnLoss | None = None
    outputs: tuple[str, ...] = ("loss",)
    dropout: bool = True


class Blueprint:
    """A plan with the captured model that it is for, its cut into units and its sharding; the same on every rank.

    chain, sharding: of the first capture; captures of other shapes, and for evaluation, are cut and sharded alike.
    fused:           per fused operation, the largest number of them in one program.
    partial:         replicated parameters of whose gradient each tensor-parallel rank computes a partial sum.
    """

    def __init__(self, traced: Traced, chain: Chain, sharding: Sharding, plan: Plan):
        self.traced = traced
        self.chain = chain
        self.sharding = sharding
        self.plan = plan
        self.fused: Counter[str] = Counter()
        self.partial: tuple[str, ...] = ()
        self.unused = Unused()
        self.lengths = KnownLengths()
        if traced.captured.guards and plan.grid.tp > 1:  # all programs must agree, whatever they branch to
            self.partial = tuple(name for name, tensor in sharding.tensors.items() if tensor.dim is None)

    def replicated_weights(self) -> tuple[str, ...]:
        """A sentence per family of matrices that are replicated over the tensor-parallel ranks."""
        if self.plan.grid.tp == 1:
            return ()
        tensors = self.sharding.tensors
        reasons = self.sharding.reasons
        matrices = [name for name, tensor in tensors.items() if len(tensor.shape) > 1 and tensor.dim is None]
        return tuple(f"{name} is {reason}." for name, reason in by_family((name, reasons[name]) for name in matrices))

    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """The stages whose units use each parameter, ascending."""
        stages_of: dict[str, list[int]] = {}
        for stage, part in enumerate(self.plan.stages):
            for unit in part.units:
                for name in self.chain.parameters[unit]:
                    stages = stages_of.setdefault(name, [])
                    if stage not in stages:
                        stages.append(stage)
        return {name: tuple(stages) for name, stages in stages_of.items()}

    def parts(self, batch: Batch, role: Role, stage: int, mesh: Mesh) -> tuple[Parts, Guards | None]:
        """The part of the graph that ``stage`` runs for batches of this shape, and guards that they must meet, too."""
        shapes = shapes_of(batch)
        traced = self.traced
        explore = partial(traced.lengths, batch, role.training, role.outputs, role.compute)
        with gc_paused():
            parts = self.lengths.parts((role, stage), shapes, explore)
            if parts is not None:
                return parts, None
            captured, parts = self._captured(batch, role, stage, mesh)
        self.lengths.add((role, stage), shapes, captured, parts)
        return parts, captured.guards

    def _captured(self, batch: Batch, role: Role, stage: int, mesh: Mesh) -> tuple[Captured, Parts]:
        traced = self.traced
        arguments = (role, stage, mesh)
        first = traced.captured
        as_first = role.training and role.compute is None and shapes_of(batch) == traced.example
        if as_first and not (first.guards and first.guards.broken(batch)):
            return first, self._parts(first, self.chain, self.sharding, *arguments)
        captured = traced.capture(batch, role.training, role.outputs, role.compute)
        unknown = [name for name in captured.trainable if name not in first.shapes]
        if unknown:
            reason = "this batch uses it, but the first batch, which determined its placement, did not"
            raise PlanError("parameter", min(unknown), reason, "Start with a batch that uses every parameter")
        touched = first.untouched & captured.trainable - captured.untouched
        if role.training and role.compute is None and touched:
            reason = "this batch gives it a gradient, but the first batch did not, and it was left out of updates"
            raise PlanError(
                "parameter", min(touched), reason, "Start with a batch that gives every parameter a gradient"
            )
        if role.training:
            self.unused.warn(first.trainable, captured.trainable, mesh)
            if captured.trainable <= captured.untouched:
                # autograd raises here, too, and a graph without parameters cannot be cut
                reason = "it gives none of the trainable parameters a gradient"
                remedy = "Compute it from the model's outputs, without detach() and outside of torch.no_grad()"
                raise TraceError("loss", "(of this batch)", reason, remedy)
        chain = align(cut(captured, self.plan.graph_sharding), self.chain)
        sharding = shard(captured, self.plan.grid.tp, pins=self.sharding.tensors)
        return captured, self._parts(captured, chain, sharding, *arguments)

    def _parts(self, captured: Captured, chain: Chain, sharding: Sharding, role: Role, stage: int, mesh: Mesh) -> Parts:
        rewritten = rewrite(captured, chain, sharding, group_rank(mesh.tp), tp=self.plan.grid.tp, partial=self.partial)
        if not role.drops:
            undropped(rewritten.graph)
        first = self.traced.captured
        if captured is first:
            self.partial = rewritten.partial
        extra = [name for name in rewritten.partial if name not in self.partial and name in first.shapes]
        if role.training and extra:
            reason = "its gradient is a partial sum for this batch, but was complete for the first batch"
            raise PlanError(
                "sharding of", extra[0], reason, "Start with a batch like this one, or replicate the weight"
            )
        self.fused |= fuse(rewritten.graph, self.plan.loss_chunk, self.plan.recompute_activations)
        parts = split(rewritten, self.plan.stages[stage].units, mesh.device, lookups_of(captured))
        return replace(parts, touched=captured.trainable - captured.untouched)


class Programs:
    """The programs of one stage. Called with a batch and a task, returns the program.

    A batch is captured if it has a new shape, or breaks the guards of all programs for its shape.

    Raises TraceError where a model branches on values that differ in every batch.
    """

    def __init__(self, blueprint: Blueprint, stage: int, mesh: Mesh, parameters: Mapping[str, nn.Parameter], sink):
        self.blueprint = blueprint
        self.stage = stage
        self.mesh = mesh
        self.parameters = parameters
        self.sink = sink
        self._random = any(map(is_random, blueprint.traced.captured.module.graph.nodes))
        self._programs: dict[tuple, list[tuple[Guards | None, Program]]] = {}
        self._lookups: dict[Program, Lookups] = {}
        self._touched: dict[Program, frozenset[str]] = {}

    def __call__(self, batch: Batch, training: bool, task: Task | None = None) -> Program:
        task = task or Task()
        role = Role(
            training,
            (task.loss or self.blueprint.traced).trained if training else task.outputs,
            task.dropout or not (training and self._random),
            None if task.loss is None else task.loss.compute,
        )
        cases = self._programs.setdefault((role, shapes_of(batch)), [])
        line = ""
        for guards, program in cases:
            line = guards.broken(batch) if guards else ""
            if not line:
                return program
        if len(cases) == MOST_CASES:
            reason = f"it branches on values of the batch, and {len(cases)} batches of one shape all differed"
            remedy = (
                "Collate batches so that this value is the same for most, or rewrite that line with tensor operations"
            )
            raise TraceError("line", line, reason, remedy)
        with self.mesh.pulse.doing("capturing the model for a new kind of batch"):
            cases.append(self._make(batch, role))
        return cases[-1][1]

    def outside(self, batch: Batch, training: bool, task: Task | None = None) -> Outside | None:
        """Return the first number of a batch that has no row in what its program looks up in; None if all have."""
        return self._lookups[self(batch, training, task)].outside(batch)

    def touched(self, batch: Batch, task: Task | None = None) -> frozenset[str]:
        """Return the names of the parameters, of all stages, to which training with a batch gives a gradient."""
        return self._touched[self(batch, True, task)]

    def all(self) -> list[Program]:
        """Every program so far."""
        return [program for cases in self._programs.values() for _, program in cases]

    def _make(self, batch: Batch, role: Role) -> tuple[Guards | None, Program]:
        parts, guards = self.blueprint.parts(batch, role, self.stage, self.mesh)
        program = Program(
            tuple(parts.segments(self.parameters, self.sink)),
            parts.prelude,
            parts.sources,
            parts.targets,
            results=parts.results,
            named=parts.named,
        )
        self._lookups[program] = parts.lookups
        self._touched[program] = parts.touched
        return guards, program
