"""How a captured model is cut, divided and planned, and the programs that one rank runs of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..cluster import CLUSTERS, Cluster
from ..config import OptimizerConfig, ParallelConfig
from ..errors import PlanError, TraceError
from ..graph.capture import capture
from ..graph.captured import Captured
from ..graph.cut import Chain, align, cut
from ..graph.fuse import fuse
from ..graph.guards import Guards
from ..graph.measure import measure
from ..graph.nodes import is_op, is_random
from ..graph.rewrite import rewrite
from ..graph.shard import Sharding, TensorRules, shard
from ..graph.split import Parts, split
from ..graph.undropped import undropped
from ..parallel.mesh import Mesh
from ..pipeline_parallel.ops import Schedule
from ..plan import Grid, Plan
from ..planner.make import choices, plan_chain
from ..planner.tables import by_family
from ..runtime.program import Program
from ..tensor_parallel import group_rank
from .guard import unguarded
from .precision import cast_of, check_operands
from .unused import Unused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Batch = Mapping[str, Any]
MOST_CASES = 16  # programs for batches of one shape


@dataclass(frozen=True)
class CapturedSettings:
    """What a captured model is trained with beside its data.

    micro_batches: per step and replica, where a step does not say otherwise. dtype: of parameters and activations,
    but for the fp32 part of a bf16 model. cluster: what the plan is made for. loss_chunk: rows whose logits exist at a
    time, 0 for all. replica_check_interval: optimizer steps between two comparisons of the replicas' weights, 0 for
    none. autocast: a model that does not run with parts of different dtypes computes in ``dtype`` alone.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    micro_batches: int = 1
    seed: int = 1234
    dtype: str = "float32"
    cluster: Cluster = CLUSTERS["cpu"]
    graph_sharding: str = "cut"
    tensor_parallel_rules: str = ""
    vocabulary_multiple: int = 1
    loss_chunk: int = 0
    replica_check_interval: int = 100
    autocast: bool = False


def batch_size(batch: Batch) -> tuple[int, int]:
    """Samples of a batch, and the length of its longest sequence of tokens (0 where there is none)."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0]
    length = max((value.shape[1] for value in tensors if value.dim() > 1 and not value.is_floating_point()), default=0)
    return tensors[0].shape[0], length


def shapes_of(batch: Batch) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """What of a batch a capture depends on."""
    tensors = [(name, value) for name, value in sorted(batch.items()) if isinstance(value, Tensor)]
    return tuple((name, tuple(value.shape), value.dtype) for name, value in tensors)


def without_full_mask(batch: Batch) -> Batch:
    """The batch without an attention mask that masks nothing: collators add one, and attention is faster without."""
    mask = batch.get("attention_mask")
    full = isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all())
    return {name: value for name, value in batch.items() if name != "attention_mask"} if full else batch


class Blueprint:
    """Everything about a model that follows from its graph; the same on every rank.

    The first capture, of ``example``, decides how weights are divided and where the chain is cut; captures of other
    shapes, and of evaluation, follow it. fused: of each fused operation, the most in one program. partial: parameters
    that every rank holds and whose gradient is summed over the ranks.
    schedule: what the settings' schedule file holds, where it has been read. Raises TraceError and PlanError.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Batch,
        settings: CapturedSettings,
        grid: Grid,
        schedule: Schedule | None = None,
    ):
        self.model, self.settings, self.grid = model, settings, grid
        self.fused: Counter[str] = Counter()
        self.partial: tuple[str, ...] = ()
        self.unused = Unused()
        self._shared: dict[str, Tensor] = {}
        self._cast = cast_of(model, DTYPES[settings.dtype])
        try:
            self.captured = self._first(example)
        except TraceError:
            if self._cast is not None or not settings.autocast:
                raise
            self._cast = DTYPES[settings.dtype]
            captured = self._first(example)
            note = f"The model does not run with the dtypes of its weights: all compute in {settings.dtype}."
            self.captured = replace(captured, notes=(*captured.notes, note))
        self.example = shapes_of(self.prepared(example))
        self._check_dtypes()
        self.chain = cut(self.captured, settings.graph_sharding)
        self.sharding = shard(
            self.captured, grid.tp, TensorRules.parse(settings.tensor_parallel_rules),
            vocabulary_multiple=settings.vocabulary_multiple,
        )  # fmt: skip
        if self.captured.guards and grid.tp > 1:  # other cases may use weights otherwise, and all must agree
            self.partial = tuple(name for name, tensor in self.sharding.tensors.items() if tensor.dim is None)
        fused = settings.cluster.device.fused_attention
        self.units = measure(self.captured, self.chain, self.sharding, grid.tp, fused, settings.loss_chunk)
        self.plan = self._plan(example, schedule)

    def _first(self, example: Batch) -> Captured:
        """The capture of the first batch; decides whether a mask that masks nothing is left out."""
        maskless = self._without_mask(example) if "attention_mask" in example else None
        self.drops_full_mask = maskless is not None
        whole = len(self.prepared(example)) < len(example)
        return maskless if whole else self._capture(example, training=True, outputs=("loss",))

    def _without_mask(self, example: Batch) -> Captured | None:
        """The capture without an attention mask, None where leaving out one that masks nothing could change a value:
        where the model makes a mask of its own from the token ids then."""
        bare = {name: value for name, value in example.items() if name != "attention_mask"}
        try:
            captured = self._capture(bare, training=True, outputs=("loss",))
        except TraceError:
            return None
        tokens = [n for n in captured.module.graph.find_nodes(op="placeholder") if n.target == "input_ids"]
        looked_up = all(is_op(user, "embedding") for node in tokens for user in node.users)
        return captured if looked_up and not captured.guards else None

    def prepared(self, batch: Batch) -> Batch:
        """The batch as it is captured and run."""
        return without_full_mask(batch) if self.drops_full_mask else batch

    def _capture(self, batch: Batch, training: bool, outputs: Sequence[str]) -> Captured:
        with unguarded(self.model):
            captured = capture(self.model, batch, training=training, dtype=self._cast, outputs=outputs)
        check_operands(captured)
        self._share(captured)
        return captured

    def share_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Let every capture, those made already included, read and change these tensors, by the buffers' names."""
        self._shared = dict(buffers)
        self._share(self.captured)

    def _share(self, captured: Captured) -> None:
        for name in captured.buffers:
            if name in self._shared:
                path, _, key = name.rpartition(".")
                setattr(captured.module.get_submodule(path), key, self._shared[name].detach())

    def _check_dtypes(self) -> None:
        for name, dtype in self.captured.dtypes.items():
            if name in self.captured.trainable and dtype not in DTYPES.values():
                reason = f"its dtype is {str(dtype).removeprefix('torch.')}, and weights train in {' or '.join(DTYPES)}"
                raise TraceError("parameter", name, reason, "Cast the model, or freeze it")

    def whole_weights(self) -> tuple[str, ...]:
        """A sentence per family of matrices that every tensor-parallel rank holds whole."""
        if self.grid.tp == 1:
            return ()
        tensors, reasons = self.sharding.tensors, self.sharding.reasons
        matrices = by_family((name, reasons[name]) for name, tensor in tensors.items() if len(tensor.shape) > 1)
        return tuple(f"{name} is {reason}." for name, reason in matrices if reason.startswith("whole"))

    def _plan(self, example: Batch, schedule: Schedule | None) -> Plan:
        samples, length = batch_size(example)
        settings = self.settings
        return plan_chain(
            self.units,
            self.grid,
            microbatches=settings.micro_batches,
            micro_batch_size=samples,
            sequence_length=length,
            dtype=settings.dtype,
            cluster=settings.cluster,
            shardings=tuple(self.sharding.tensors.values()),
            reasons=tuple(self.sharding.reasons.items()),
            **choices(settings.parallel, settings.micro_batches, schedule),
        )

    def stages_of(self) -> dict[str, tuple[int, ...]]:
        """The stages whose units use each parameter, ascending."""
        held: dict[str, list[int]] = {}
        for stage, part in enumerate(self.plan.stages):
            for unit in part.units:
                for name in self.chain.parameters[unit]:
                    stages = held.setdefault(name, [])
                    if stage not in stages:
                        stages.append(stage)
        return {name: tuple(stages) for name, stages in held.items()}

    def parts(
        self, batch: Batch, training: bool, outputs: Sequence[str], stage: int, mesh: Mesh, drops: bool = True
    ) -> tuple[Parts, Guards | None]:
        """The work of ``stage`` on batches of this shape, and what else must hold of them. ``drops``: with dropout."""
        first, how = self.captured, (stage, mesh, training, drops)
        if training and shapes_of(batch) == self.example and not (first.guards and first.guards.broken(batch)):
            return self._parts(first, self.chain, self.sharding, *how), first.guards
        captured = self._capture(batch, training, outputs)
        unknown = [name for name in captured.trainable if name not in first.shapes]
        if unknown:
            reason = "this batch uses it, and the first one, which decided where it goes, did not"
            raise PlanError("parameter", min(unknown), reason, "Start with a batch that uses every parameter")
        if training:
            self.unused.tell(first.trainable, captured.trainable, mesh)
        chain = align(cut(captured, self.settings.graph_sharding), self.chain)
        rules = TensorRules.parse(self.settings.tensor_parallel_rules)
        sharding = shard(captured, self.grid.tp, rules, self.sharding.tensors, self.settings.vocabulary_multiple)
        return self._parts(captured, chain, sharding, *how), captured.guards

    def _parts(
        self,
        captured: Captured,
        chain: Chain,
        sharding: Sharding,
        stage: int,
        mesh: Mesh,
        training: bool,
        drops: bool,
    ) -> Parts:
        rewritten = rewrite(captured, chain, sharding, group_rank(mesh.tp), self.grid.tp, self.partial)
        if not drops:
            undropped(rewritten.graph)
        if captured is self.captured:
            self.partial = rewritten.partial
        extra = [name for name in rewritten.partial if name not in self.partial and name in self.captured.shapes]
        if training and extra:
            reason = "its gradient is partial for this batch, and was whole for the first one"
            raise PlanError(
                "sharding of", extra[0], reason, "Start with a batch like this one, or replicate the weight"
            )
        self.fused |= fuse(rewritten.graph, self.settings.loss_chunk)
        return split(rewritten, self.plan.stages[stage].units, mesh.device)


class Programs:
    """The programs of one stage, captured when a batch comes that has a new shape or breaks the guards of all others.

    wanted: the outputs that evaluation hands out. drops: whether training drops values at random. Raises TraceError
    where a model decides by values that are other ones in every batch.
    """

    def __init__(self, blueprint: Blueprint, stage: int, mesh: Mesh, parameters: Mapping[str, nn.Parameter], sink):
        self.blueprint, self.stage, self.mesh, self.parameters, self.sink = blueprint, stage, mesh, parameters, sink
        self.wanted: tuple[str, ...] = ("loss",)
        self.drops = True
        self._random = any(map(is_random, blueprint.captured.module.graph.nodes))
        self._made: dict[tuple, list[tuple[Guards | None, Program]]] = {}

    def __call__(self, batch: Batch, training: bool) -> Program:
        outputs = ("loss",) if training else self.wanted
        drops = self.drops or not (training and self._random)
        made = self._made.setdefault((training, outputs, drops, shapes_of(batch)), [])
        line = ""
        for guards, program in made:
            line = guards.broken(batch) if guards else ""
            if not line:
                return program
        if len(made) == MOST_CASES:
            reason = f"it decides by values of the batch, and {len(made)} batches of one shape were all different"
            remedy = (
                "Collate batches so that this value is the same for most, or rewrite that line with tensor operations"
            )
            raise TraceError("line", line, reason, remedy)
        made.append(self._make(batch, training, outputs, drops))
        return made[-1][1]

    def made(self) -> list[Program]:
        """Every program so far."""
        return [program for cases in self._made.values() for _, program in cases]

    def _make(
        self, batch: Batch, training: bool, outputs: tuple[str, ...], drops: bool
    ) -> tuple[Guards | None, Program]:
        parts, guards = self.blueprint.parts(batch, training, outputs, self.stage, self.mesh, drops)
        return guards, Program(
            tuple(parts.segments(self.parameters, self.sink)),
            parts.prelude,
            parts.sources,
            parts.targets,
            parts.results,
            named=parts.named,
        )
