"""How a captured model is cut into units, sharded and planned, and the programs that one rank runs
of it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import nn

from ..cluster import CLUSTERS, Cluster
from ..config.checks import (
    check_context_parallel,
    check_experts,
    check_needs,
    check_offloading,
    check_recompute,
    check_schedule,
    check_sharding,
)
from ..config.fp8 import Fp8, check_fp8
from ..config.model_states import check_model_states
from ..config.parallel import A2A
from ..config.unflushed import refuse_unflushed
from ..errors import PlanError, TraceError
from ..graph.behind import put_behind_exchanges
from ..graph.capture.captured import Captured
from ..graph.capture.fast_trace import gc_paused
from ..graph.capture.guards import Guards
from ..graph.capture.outputs import LossFunction
from ..graph.fusion.four_bit import check_cuts
from ..graph.fusion.fp8 import check_shards, fp8_weights
from ..graph.fusion.fuse import fuse
from ..graph.ir.nodes import is_random
from ..graph.kept_state import StateOf
from ..graph.lowering.context import REPEATED
from ..graph.lowering.lookups import Lookups, Outside, lookups_of
from ..graph.lowering.prelude import Prelude
from ..graph.lowering.rewrite import rewrite
from ..graph.lowering.split import Parts, split
from ..graph.lowering.undropped import undropped
from ..graph.measure import measure
from ..graph.partition.cut import Chain, align, cut, cut_layers
from ..graph.sharding.shard import Sharding, TensorRules, shard
from ..models.gpt_module import GPTModule
from ..parallel.mesh import Mesh
from ..plan import LAYERS, Plan, TensorSharding, Unit
from ..plan.fit import check_chain
from ..planner.make import ProgressCallback, plan_chain
from ..planner.predict import priced
from ..planner.request import Request
from ..planner.tables import by_family
from ..runtime.program import Program
from ..segment import Common
from .compiled import CompiledBundles
from .lengths import KnownLengths
from .precision import HALVES
from .traced import Batch, OwnLoss, Traced, shapes_of
from .unused import Unused

COUNT = "count of the loss"  # beside the common values that a batch is turned into
_NAMED = 3  # units that a sentence names
MOST_CASES = 16  # programs for batches of one shape that branch differently on their values


def make_blueprint(
    traced: Traced,
    request: Request,
    cluster: Cluster = CLUSTERS["cpu"],
    *,
    state_of: StateOf | None = None,
    pins: Mapping[str, TensorSharding] | None = None,
    progress: ProgressCallback = lambda share: None,
) -> "Blueprint":
    """Plan a captured model.

    request:  its micro-batch size and dtype are not read, but those of the capture; so is an unset
              sequence length.
    cluster:  what it is planned for.
    state_of: ``state_bytes`` of each parameter, where they differ.
    pins:     see ``shard``.
    progress: see ``report_progress`` of ``plan_chain``.

    Raises PlanError.
    """
    parallel = request.parallel
    check_needs(parallel)
    check_context_parallel(parallel)
    check_experts(parallel, request.grid.copies)
    check_recompute(parallel)
    check_offloading(parallel)
    check_model_states(parallel, request.fp8 is not None)
    check_schedule(parallel)
    check_fp8(request.fp8, parallel)
    if not is_gpt(traced.model):
        refuse_unflushed(parallel.pipeline_schedule)
    check_sharding(parallel)
    samples, length = traced.size
    if request.sequence_length is None:
        request = replace(request, sequence_length=length)
    request = replace(request, micro_batch_size=samples, dtype=traced.dtype)
    chain, sharding, units = measured(traced, request, cluster, state_of, pins)
    plan = plan_chain(
        units,
        request,
        cluster,
        shardings=tuple(sharding.tensors.values()),
        reasons=tuple(sharding.reasons.items()),
        frozen_bytes=frozen_bytes(traced),
        report_progress=progress,
    )
    return Blueprint(traced, chain, sharding, plan)


def measured(
    traced: Traced,
    request: Request,
    cluster: Cluster,
    state_of: StateOf | None = None,
    pins: Mapping[str, TensorSharding] | None = None,
    captured: Captured | None = None,
) -> tuple[Chain, Sharding, tuple[Unit, ...]]:
    """Return how a captured model is cut and sharded as requested, and its units.

    state_of, pins: see ``make_blueprint``.
    captured:       in the place of the model's own capture, one with some of its layers.

    Raises PlanError.
    """
    captured = captured or traced.captured
    parallel = request.parallel
    tp = request.grid.tp
    chain = chain_of(captured, request.graph_sharding, traced.model)
    rules = TensorRules.parse(request.rules)
    sharding = shard(
        captured,
        tp,
        rules,
        pins=pins,
        vocabulary_multiple=request.vocabulary_multiple,
        experts=parallel.expert_ranks,
        shards=parallel.expert_shards,
        room=parallel.moe_expert_rank_capacity_factor,
    )
    check_four_bit(captured, sharding, request.fp8, parallel.offload_model_states)
    units = measure(
        captured,
        chain,
        sharding,
        tp,
        fused_attention=cluster.device.fused_attention,
        loss_chunk=request.loss_chunk,
        recompute_activations=parallel.recomputes_activations,
        fp8=fp8_weights(captured, traced.model, request.fp8),
        positions=traced.positions,
        state_of=state_of,
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        cp=request.grid.cp,
        cp_comm_type=parallel.cp_comm_type,
        cp_inner=parallel.cp_inner,
        compile_pointwise=parallel.compile_pointwise,
    )
    return chain, sharding, units


def check_four_bit(captured: Captured, sharding: Sharding, fp8: Fp8 | None, on_host: bool) -> None:
    """Raise PlanError for what weights in 4 bits cannot be planned with."""
    if not captured.four_bit:
        return
    name = min(captured.four_bit)
    reason = f"weights such as {name} are in 4 bits"
    if fp8 is not None:
        remedy = "Leave it out, or load the model without quantization_config"
        raise PlanError("--fp8-format", fp8.format, reason, remedy)
    if on_host:
        remedy = "Leave it out: adapters have little optimizer state"
        raise PlanError("offload_model_states", True, reason, remedy)
    check_cuts(captured.four_bit, sharding.tensors, sharding.tp)


def is_gpt(model: nn.Module) -> bool:
    """Whether a model is the GPT that flags describe, which says into which units plans cut it."""
    return isinstance(model, GPTModule)


def chain_of(captured: Captured, algorithm: str, model: nn.Module) -> Chain:
    """Cut a captured model by an algorithm of ``cut``, or into the units that it names."""
    if algorithm == LAYERS and isinstance(model, GPTModule):
        return cut_layers(captured, model.unit_names)
    return cut(captured, algorithm)


def frozen_bytes(traced: Traced) -> float:
    """Bytes per element of the frozen weights but for those in 4 bits, on average; 0 where there
    are none.

    A weight that is rounded for computing is in memory twice: rounded, and in the dtype of the
    user's model.
    """
    captured = traced.captured
    sizes: dict[str, tuple[int, int]] = {}
    for name in captured.shapes.keys() - captured.trainable - captured.four_bit.keys():
        own = traced.model.get_parameter(name).dtype
        computed = captured.dtypes[name]
        rounds = own == torch.float32 and computed in HALVES
        sizes[name] = (
            computed.itemsize + (own.itemsize if rounds else 0),
            prod(captured.shapes[name]),
        )
    count = sum(values for _, values in sizes.values())
    return sum(itemsize * values for itemsize, values in sizes.values()) / count if count else 0.0


def blueprint_from_plan(
    traced: Traced, plan: Plan, state_of: StateOf | None = None, vocabulary_multiple: int = 1
) -> "Blueprint":
    """Apply a stored or edited plan to a captured model. The plan's predictions are computed anew.

    state_of:            see ``make_blueprint``.
    vocabulary_multiple: see ``shard``.

    Raises PlanError, naming the first difference, if the plan is one of another model or cannot be
    followed.
    """
    captured = traced.captured
    tp = plan.grid.tp
    model = traced.model
    wide = isinstance(model, GPTModule) and model.fp32_residual
    if plan.fp32_residual != wide:
        reason = "the model's own code decides the dtype of its residuals"
        raise PlanError("plan: fp32_residual", plan.fp32_residual, reason, f"Set it to {wide}")
    if plan.is_of_gpt and not is_gpt(model):
        reason = "it is a plan of the GPT of merak-pretrain"
        remedy = "Make a plan of this model"
        raise PlanError("plan: graph_sharding", repr(plan.graph_sharding), reason, remedy)
    if plan.schedule.updates is not None and not is_gpt(model):
        reason = "only the GPT of merak-pretrain updates weights while micro-batches are in flight"
        raise PlanError("plan: schedule.updates", plan.schedule.name, reason, "Use 1f1b")
    chain = chain_of(captured, plan.graph_sharding, model)
    check_chain(plan, chain.names)
    pins = {tensor.name: tensor for tensor in plan.shardings}
    sharding = shard(
        captured,
        tp,
        pins=pins,
        vocabulary_multiple=vocabulary_multiple,
        complete=True,
        experts=plan.expert_ranks,
        shards=plan.expert_shards,
        room=plan.expert_room,
    )
    check_four_bit(captured, sharding, plan.fp8, plan.offload_model_states)
    units = measure(
        captured,
        chain,
        sharding,
        tp,
        fused_attention=plan.cluster.device.fused_attention,
        loss_chunk=plan.loss_chunk,
        recompute_activations=plan.recompute_activations,
        fp8=fp8_weights(captured, model, plan.fp8),
        positions=traced.positions,
        state_of=state_of,
        sequence_parallel=plan.sequence_parallel and tp > 1,
        cp=plan.grid.cp,
        cp_comm_type=plan.cp_comm_type,
        cp_inner=plan.cp_inner,
        compile_pointwise=plan.compile_pointwise,
    )
    return Blueprint(traced, chain, sharding, priced(replace(plan, units=units)))


def followed(
    traced: Traced,
    plan: Plan,
    pins: Mapping[str, TensorSharding],
    vocabulary_multiple: int,
) -> "Blueprint":
    """Apply a plan that says nothing of weights to a captured model, and complete it by how these
    are sharded.

    pins, vocabulary_multiple: as for ``shard``.

    Raises PlanError if no weight can be sharded.
    """
    captured = traced.captured
    chain = chain_of(captured, plan.graph_sharding, traced.model)
    check_chain(plan, chain.names)
    tp = plan.grid.tp
    sharding = shard(captured, tp, pins=pins, vocabulary_multiple=vocabulary_multiple)
    tensors = tuple(sharding.tensors.values())
    reasons = by_family(sharding.reasons.items())
    return Blueprint(traced, chain, sharding, replace(plan, shardings=tensors, reasons=reasons))


@dataclass(frozen=True)
class ProgramRole:
    """What a program of a stage computes.

    outputs: the names of what it returns.
    drops:   whether dropout is applied, if the model has any.
    compute: computes the outputs; None: the model and its loss do.
    padded:  whether ranks exchange as many rows of experts as there is room for, if the plan has any.
    """

    training: bool
    outputs: tuple[str, ...]
    drops: bool = True
    compute: LossFunction | None = None
    padded: bool = True


@dataclass(frozen=True)
class ModelTask:
    """What a training step or an evaluation computes.

    loss:    computes losses and outputs; None: the model does, with the loss that it was traced
             with.
    outputs: names of the outputs of an evaluation.
    dropout: whether training applies dropout.
    """

    loss: OwnLoss | None = None
    outputs: tuple[str, ...] = ("loss",)
    dropout: bool = True


class Blueprint:
    """A plan with the captured model that it is for, its cut into units and its sharding; the same
    on every rank.

    chain, sharding: of the first capture; captures of other shapes, and for evaluation, are cut and
                     sharded alike.
    fused:           per fused operation, the largest number of them in one program.
    partial:         replicated parameters of whose gradient each tensor-parallel rank computes a
                     partial sum.
    """

    def __init__(self, traced: Traced, chain: Chain, sharding: Sharding, plan: Plan):
        self.traced = traced
        self.chain = chain
        self.sharding = sharding
        self.plan = plan
        self.fused: Counter[str] = Counter()
        self.partial: tuple[str, ...] = ()
        self.unused = Unused()
        self.compiled = CompiledBundles()
        # whether ranks divide sequences, of which every program is then another part
        parts = plan.grid.cp * (plan.grid.tp if plan.sequence_parallel else 1)
        self.divided = parts > 1
        # where they gather, each may have a part from both ends of a sequence
        ends = 2 if plan.grid.cp > 1 and plan.cp_comm_type != A2A else 1
        self.lengths = KnownLengths(parts * ends)
        # All programs must agree, whatever they branch to, and of whatever length they are.
        if plan.grid.tp > 1 and (traced.captured.guards or plan.sequence_parallel):
            self.partial = tuple(
                name for name, tensor in sharding.tensors.items() if tensor.dim is None
            )

    def replicated_weights(self) -> tuple[str, ...]:
        """A sentence per family of matrices that are replicated over the tensor-parallel ranks."""
        if self.plan.grid.tp == 1:
            return ()
        tensors = self.sharding.tensors
        reasons = self.sharding.reasons
        matrices = [
            name for name, tensor in tensors.items() if len(tensor.shape) > 1 and tensor.dim is None
        ]
        return tuple(
            f"{name} is {reason}."
            for name, reason in by_family((name, reasons[name]) for name in matrices)
        )

    def repeated_work(self) -> tuple[str, ...]:
        """A sentence on what every context-parallel rank computes in full, if that is much."""
        units = self.plan.units
        total = sum(unit.flops for unit in units)
        repeated = [unit for unit in units if unit.repeated_flops > REPEATED * unit.flops]
        share = sum(unit.repeated_flops for unit in units) / max(total, 1)
        if share <= REPEATED:
            return ()
        names = ", ".join(unit.name for unit in repeated[:_NAMED])
        more = f" and {len(repeated) - _NAMED:,} more" if len(repeated) > _NAMED else ""
        return (
            f"Context parallelism: every rank repeats {share:.0%} of its FLOPs, in {names}{more}: "
            "parts of them can be divided neither by positions nor by heads.",
        )

    def beside_fp8(self) -> tuple[str, ...]:
        """A sentence per family of matrices that are not multiplied in fp8, where others are."""
        chosen = fp8_weights(self.traced.captured, self.traced.model, self.plan.fp8)
        if chosen is None:
            return ()
        return tuple(
            f"{name} is not multiplied in fp8: {reason}."
            for name, reason in by_family(chosen.reasons.items())
        )

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

    def parts(
        self, batch: Batch, role: ProgramRole, stage: int, mesh: Mesh
    ) -> tuple[Parts, Guards | None]:
        """The part of the graph that ``stage`` runs for batches of this shape, and guards that they
        must meet, too.
        """
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

    def _captured(
        self, batch: Batch, role: ProgramRole, stage: int, mesh: Mesh
    ) -> tuple[Captured, Parts]:
        traced = self.traced
        arguments = (role, stage, mesh)
        first = traced.captured
        if self._as_first(batch, role):
            sharding = self._with_room(self.sharding, role)
            return first, self._parts(first, self.chain, sharding, *arguments)
        captured = traced.capture(batch, role.training, role.outputs, role.compute)
        unknown = [name for name in captured.trainable if name not in first.shapes]
        if unknown:
            reason = (
                "this batch uses it, but the first batch, which determined its placement, did not"
            )
            raise PlanError(
                "parameter", min(unknown), reason, "Start with a batch that uses every parameter"
            )
        touched = first.untouched & captured.trainable - captured.untouched
        if role.training and role.compute is None and touched:
            reason = (
                "this batch gives it a gradient, but the first batch did not, and it was "
                "left out of updates"
            )
            raise PlanError(
                "parameter",
                min(touched),
                reason,
                "Start with a batch that gives every parameter a gradient",
            )
        if role.training:
            self.unused.warn(first.trainable, captured.trainable, mesh)
            if captured.trainable <= captured.untouched:
                # autograd raises here, too, and a graph without parameters cannot be cut
                reason = "it gives none of the trainable parameters a gradient"
                remedy = (
                    "Compute it from the model's outputs, without detach() and outside of "
                    "torch.no_grad()"
                )
                raise TraceError("loss", "(of this batch)", reason, remedy)
        found = chain_of(captured, self.plan.graph_sharding, traced.model)
        chain = align(found, self.chain)
        sharding = self._with_room(self._sharded(captured), role)
        return captured, self._parts(captured, chain, sharding, *arguments)

    def _as_first(self, batch: Batch, role: ProgramRole) -> bool:
        """Whether the first capture is that of a batch, which needs no other one then."""
        traced = self.traced
        guards = traced.captured.guards
        if role.compute is not None or shapes_of(batch) != traced.example:
            return False
        if guards and guards.broken(batch):
            return False
        model = traced.model
        alike = isinstance(model, GPTModule) and model.evaluates_as_it_trains
        return role.training or alike and role.outputs == traced.trained

    def _sharded(self, captured: Captured) -> Sharding:
        """Shard another capture like the first one."""
        tp = self.plan.grid.tp
        return shard(
            captured,
            tp,
            pins=self.sharding.tensors,
            experts=self.plan.expert_ranks,
            shards=self.plan.expert_shards,
            room=self.plan.expert_room,
        )

    def _with_room(self, sharding: Sharding, role: ProgramRole) -> Sharding:
        return sharding if role.padded else replace(sharding, room=None)

    def _parts(
        self,
        captured: Captured,
        chain: Chain,
        sharding: Sharding,
        role: ProgramRole,
        stage: int,
        mesh: Mesh,
    ) -> Parts:
        rewritten = rewrite(
            captured,
            chain,
            sharding,
            mesh.tp_rank,
            tp=self.plan.grid.tp,
            partial=self.partial,
            sequence_parallel=self.plan.sequence_parallel,
            cp_rank=mesh.cp_rank,
            cp=self.plan.grid.cp,
            cp_comm_type=self.plan.cp_comm_type,
            cp_inner=self.plan.cp_inner,
            expert_rank=0 if mesh.experts is None else mesh.experts.rank,
        )
        first = self.traced.captured
        if not role.drops or captured is first and not role.training:
            undropped(rewritten.graph)
        summed = rewritten.partial
        if captured is first:
            self.partial = summed
        extra = [name for name in summed if name not in self.partial and name in first.shapes]
        if role.training and extra:
            reason = (
                "its gradient is a partial sum for this batch, but was complete for the first batch"
            )
            raise PlanError(
                "sharding of",
                extra[0],
                reason,
                "Start with a batch like this one, or replicate the weight",
            )
        plan = self.plan
        part = plan.stages[stage]
        fp8 = fp8_weights(captured, self.traced.model, plan.fp8)
        if fp8 is not None:
            check_shards(rewritten.graph, fp8, sharding.tensors, plan.grid.tp)
        self.fused |= fuse(
            rewritten.graph,
            plan.loss_chunk,
            plan.recompute_activations,
            continued=part.continued,
            fp8=fp8,
            four_bit=captured.four_bit,
        )
        put_behind_exchanges(rewritten)
        if plan.compile_pointwise:
            self.compiled.add(rewritten, part.units, mesh)
        parts = split(rewritten, part.units, mesh.device, lookups_of(captured))
        return replace(parts, touched=captured.trainable - captured.untouched)


@dataclass(frozen=True)
class Counting:
    """A prelude that also counts what a batch's loss is summed over.

    count: returns that number, of the batch.
    """

    prelude: Prelude
    count: Callable[[Batch], torch.Tensor]
    device: torch.device

    def state(self) -> tuple[torch.Tensor, ...] | None:
        return self.prelude.state()

    def restore(self, state: tuple[torch.Tensor, ...] | None) -> None:
        self.prelude.restore(state)

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        counted = self.count(batch).to(self.device, non_blocking=True)
        return self.prelude(batch) | {COUNT: counted}

    @staticmethod
    def read(common: Common) -> torch.Tensor:
        return common[COUNT]


class Programs:
    """The programs of one stage. Called with a batch and a task, returns the program.

    count: see ``Counting``; None where losses are complete.

    A batch is captured if it has a new shape, or breaks the guards of all programs for its shape.

    Attributes:
    padded: see ``ProgramRole``; it is that of the next calls.

    Raises TraceError where a model branches on values that differ in every batch.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        stage: int,
        mesh: Mesh,
        parameters: Mapping[str, nn.Parameter],
        sink,
        count: Callable[[Batch], torch.Tensor] | None = None,
    ):
        self.blueprint = blueprint
        self.stage = stage
        self.count = count
        self.mesh = mesh
        self.parameters = parameters
        self.sink = sink
        self.padded = True
        self._random = any(map(is_random, blueprint.traced.captured.module.graph.nodes))
        self._programs: dict[tuple, list[tuple[Guards | None, Program]]] = {}
        self._lookups: dict[Program, Lookups] = {}
        self._touched: dict[Program, frozenset[str]] = {}

    def __call__(self, batch: Batch, training: bool, task: ModelTask | None = None) -> Program:
        task = task or ModelTask()
        role = ProgramRole(
            training,
            (task.loss or self.blueprint.traced).trained if training else task.outputs,
            task.dropout or not (training and self._random),
            None if task.loss is None else task.loss.compute,
            self.padded,
        )
        cases = self._programs.setdefault((role, shapes_of(batch)), [])
        line = ""
        for guards, program in cases:
            line = guards.broken(batch) if guards else ""
            if not line:
                return program
        if len(cases) == MOST_CASES:
            reason = (
                f"it branches on values of the batch, and {len(cases)} batches of one shape "
                "all differed"
            )
            remedy = (
                "Collate batches so that this value is the same for most, or rewrite that "
                "line with tensor operations"
            )
            raise TraceError("line", line, reason, remedy)
        with self.mesh.pulse.doing("capturing the model for a new kind of batch"):
            cases.append(self._make(batch, role))
        return cases[-1][1]

    def outside(
        self, batch: Batch, training: bool, task: ModelTask | None = None
    ) -> Outside | None:
        """Return the first number of a batch that has no row in what its program looks up in; None
        if all have.
        """
        return self._lookups[self(batch, training, task)].outside(batch)

    def touched(self, batch: Batch, task: ModelTask | None = None) -> frozenset[str]:
        """Return the names of the parameters, of all stages, to which training with a batch gives a
        gradient.
        """
        return self._touched[self(batch, True, task)]

    def all(self) -> list[Program]:
        """Every program so far."""
        return [program for cases in self._programs.values() for _, program in cases]

    def _make(self, batch: Batch, role: ProgramRole) -> tuple[Guards | None, Program]:
        parts, guards = self.blueprint.parts(batch, role, self.stage, self.mesh)
        count = self.count
        program = Program(
            tuple(parts.segments(self.parameters, self.sink)),
            parts.prelude if count is None else Counting(parts.prelude, count, self.mesh.device),
            parts.sources,
            parts.targets,
            results=parts.results,
            count=None if count is None else Counting.read,
            named=parts.named,
            by_host=parts.by_host,
            codes=parts.codes,
            fixed=parts.prelude.fixed,
        )
        self._lookups[program] = parts.lookups
        self._touched[program] = parts.touched
        return guards, program
