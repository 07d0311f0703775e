"""The Plan: every decision about how a model runs on a cluster, frozen and storable.

Automatic choices end in a ``Plan``, and the runtime reads only a ``Plan``. It is plain data:
hashable, equal by value, exact through JSON, small enough to be written by hand, and free of torch.
``plan_table`` shows it.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_merak.cluster import CLUSTERS, Cluster
from megatron_merak.config.fp8 import FP8_FORMATS, FP8_RECIPES, Fp8
from megatron_merak.config.model_states import refused_on_host
from megatron_merak.config.parallel import (
    A2A_P2P,
    COMPILES_NOTHING,
    CP_COMM_TYPES,
    OVERLAPS,
    SHARDINGS,
)
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.pipeline_parallel.ops import Schedule, ops_of
from megatron_merak.plan.parts import DTYPE_BYTES, Grid, StagePlan, Unit, held_parameters
from megatron_merak.plan.precision import refused_of, refused_with_fp8
from megatron_merak.plan.replicas import (
    Shards,
    check_experts,
    check_instances,
    refused_together,
)
from megatron_merak.plan.sharding import TensorSharding
from megatron_merak.plan.stored import build, record, rows_of
from megatron_merak.strict_json import parse

LAYERS = "layers"  # a ``graph_sharding``: into the units that the GPT of flags names


@dataclass(frozen=True)
class Plan:
    """Rank grid, chain of units, stages, tensor-parallel table and schedule of one training step.

    schedule:              compute ops only; communication is derived from it.
    sequence_length:       0 if samples are no token sequences.
    dtype:                 of activations and parameters, see ``DTYPE_BYTES``.
    shardings:             of all tensors.
    cluster:               for which the predictions are made, see ``planner.priced``.
    predicted_time:        of a step, in seconds.
    predicted_bubble:      idle fraction of its forwards and backwards.
    predicted_bytes:       each stage's peak on one rank.
    predicted_host_bytes:  each stage's peak of a rank's host memory; empty where nothing is there.
    reasons:               why tensors are sharded as they are, by pattern of their names.
    overlap:               what runs while tensor-parallel collectives are in flight, see
                           ``--tp-comm-overlap``; never "auto".
    sequence_parallel:     whether norms and residuals are sharded along the sequence.
    cp_comm_type:          what ranks that divide sequences exchange, see ``--cp-comm-type``; what they
                           do is in each unit.
    cp_inner:              with ``a2a+p2p``, the number of neighbours among these that exchange heads;
                           else 1.
    expert_parallel:       parts that the experts of a layer are divided into; 1: each rank has all, or
                           its shard of each.
    expert_shards:         ranks that shard each expert of such a part.
    expert_room:           how many times the rows that such a rank gets of another one if all get as many
                           it has room for; None: for as many as there are.
    overlap_grad_reduce:   whether gradients are reduced during the backward.
    bucket_size:           number of elements that are reduced at a time.
    sharding:              what data-parallel ranks shard, see
                           ``--data-parallel-sharding-strategy``.
    sharding_instances:    groups of neighbouring replicas, each of which shards among its own.
    overlap_param_gather:  whether full weights that replicas update in shards are gathered during
                           the next forward, not at the end of a step.
    loss_chunk:            tokens whose logits exist at a time; 0: all.
    recompute_activations: whether the activations of feed-forward parts are recomputed, whatever
                           else is.
    graph_sharding:        how the graph of the model is cut into units; ``layers``: into those that
                           the GPT of flags names.
    grad_reduce_in_bf16:   whether replicas send gradients in bf16.
    fp32_residual:         whether the residual stream of a 16-bit GPT of flags is fp32.
    state_bytes:           optimizer state of a parameter on average, beside an fp32 copy of a
                           16-bit one; 8 for AdamW.
    frozen_bytes:          memory of a weight that is not trained, on average; 0: the weight in
                           ``dtype``.
    schedule_note:         from what "auto" chose the schedule, in words; empty for others.
    fp8_format:            to what operands of linear layers are rounded, see ``--fp8-format``; None:
                           they have ``dtype``.
    fp8_recipe:            what has a scale of its own, see ``--fp8-recipe``.
    bf16_layers:           layers at the start and at the end whose operands have ``dtype``.
    offload_model_states:  whether weights, gradients and optimizer state are in host memory.
    compile_pointwise:     whether groups of pointwise operations are compiled, see ``graph.fusion``.
    """

    grid: Grid
    units: tuple[Unit, ...]
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    micro_batch_size: int
    sequence_length: int
    dtype: str = "float32"
    shardings: tuple[TensorSharding, ...] = ()
    cluster: Cluster = CLUSTERS["cpu"]
    predicted_time: float = 0.0
    predicted_bubble: float = 0.0
    predicted_bytes: tuple[int, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    overlap: str = "weight-gradient"
    sequence_parallel: bool = False
    cp_comm_type: str | None = None
    cp_inner: int = 1
    expert_parallel: int = 1
    expert_shards: int = 1
    expert_room: float | None = None
    overlap_grad_reduce: bool = True
    bucket_size: int = 40_000_000
    sharding: str = "no_shard"
    sharding_instances: int = 1
    overlap_param_gather: bool = True
    loss_chunk: int = 0
    recompute_activations: bool = False
    graph_sharding: str = ""
    grad_reduce_in_bf16: bool = False
    fp32_residual: bool = False
    state_bytes: float = 8.0
    frozen_bytes: float = 0.0
    schedule_note: str = ""
    predicted_host_bytes: tuple[int, ...] = ()
    fp8_format: str | None = None
    fp8_recipe: str = FP8_RECIPES[0]
    bf16_layers: tuple[int, int] = (0, 0)
    offload_model_states: bool = False
    compile_pointwise: bool = False

    def __post_init__(self):
        cuts = [0] + [stage.last for stage in self.stages]
        if [stage.first for stage in self.stages] != cuts[:-1] or cuts[-1] != len(self.units):
            reason = f"they must cover the {len(self.units)} units once, in order"
            raise PlanError(
                "stages",
                [(s.first, s.last) for s in self.stages],
                reason,
                "Start each where one ends",
            )
        if self.schedule.stages != len(self.stages) or len(self.schedule.ranks) != self.grid.pp:
            reason = (
                f"it has {self.schedule.stages} stages on {len(self.schedule.ranks)} ranks, "
                "but the plan has "
            )
            reason += f"{len(self.stages)} stages on {self.grid.pp}"
            raise PlanError(
                "schedule", self.schedule.name, reason, "Build the schedule for the plan's stages"
            )
        if self.schedule.microbatches < 1:
            raise PlanError(
                "schedule", self.schedule.name, "a step has no micro-batch", "Give it one or more"
            )
        for what, each in (
            ("predicted bytes", self.predicted_bytes),
            ("predicted host bytes", self.predicted_host_bytes),
        ):
            if len(each) not in (0, len(self.stages)):
                reason = f"there is one for each of the {len(self.stages)} stages, or none"
                raise PlanError(what, each, reason, "Correct the plan")
        if self.offloads and self.schedule.updates is not None:
            reason = (
                f"with schedule {self.schedule.name} weights change while micro-batches are in "
                "flight, and tapes in host memory may have views of them"
            )
            offloaded = [unit for stage in self.stages for unit in stage.offload]
            raise PlanError("offload", offloaded, reason, "Offload nothing, or use 1f1b")
        rows = Counter(tensor.name for tensor in self.shardings)
        twice = [name for name, count in rows.items() if count > 1]
        if twice:
            raise PlanError(
                "sharding of",
                twice[0],
                "the plan says twice how it is sharded",
                "Keep one of the rows",
            )
        modes = [mode for mode in OVERLAPS if mode != "auto"]
        if self.overlap not in modes:
            raise PlanError(
                "overlap", self.overlap, "there is no such one", f"Use one of {', '.join(modes)}"
            )
        if self.cp_comm_type not in (None, *CP_COMM_TYPES):
            raise PlanError(
                "cp_comm_type",
                self.cp_comm_type,
                "there is no such one",
                f"Use one of {', '.join(CP_COMM_TYPES)}",
            )
        self._check_hierarchy()
        if self.sharding not in SHARDINGS:
            raise PlanError(
                "sharding",
                self.sharding,
                "there is no such one",
                f"Use one of {', '.join(SHARDINGS)}",
            )
        check_instances(self.sharding_instances, self.grid.copies, self.sharding)
        paired = self.shards_gradients and any(
            len(ops_of(entry)) > 1 for entry in self.schedule.entries()
        )
        if error := refused_together(
            self.sharding, self.grid.copies, self.overlap, paired, self.offload_model_states
        ):
            raise error
        refused = refused_on_host(
            self.sharding,
            self.sharding_instances,
            self.expert_ranks,
            fp8=self.fp8_format is not None,
            updates=self.schedule.updates is not None,
        )
        if self.offload_model_states and refused is not None:
            raise PlanError("offload_model_states", True, *refused)
        if self.overlap == "sub-pipeline" and self.micro_batch_size == 1:
            reason = "a micro-batch of one sample has no halves"
            raise PlanError(
                "overlap", self.overlap, reason, "Use pair, or a micro_batch_size of 2 or more"
            )
        leasts = {"bucket_size": 1, "loss_chunk": 0, "micro_batch_size": 1, "sequence_length": 0}
        leasts |= {"state_bytes": 0, "frozen_bytes": 0}
        for name, least in leasts.items():
            if getattr(self, name) < least:
                raise PlanError(
                    name, getattr(self, name), f"it is below {least}", f"Use {least} or more"
                )
        for name, known in (("fp8_format", (None, *FP8_FORMATS)), ("fp8_recipe", FP8_RECIPES)):
            if getattr(self, name) not in known:
                remedy = f"Use one of {', '.join(str(each) for each in known)}"
                raise PlanError(name, getattr(self, name), "there is no such one", remedy)
        if self.dtype not in DTYPE_BYTES:
            raise PlanError(
                "dtype", self.dtype, f"known types are {', '.join(DTYPE_BYTES)}", "Use one of them"
            )
        check_experts(
            self.expert_parallel,
            self.expert_shards,
            self.expert_room,
            self.grid,
            self.sharding_instances,
        )
        if error := refused_of(self.dtype, self.grad_reduce_in_bf16, self.fp32_residual):
            raise error
        if error := refused_with_fp8(
            self.fp8,
            cp=self.grid.cp,
            halves=self.overlap == "sub-pipeline",
            recomputes_activations=self.recompute_activations,
            updates=self.schedule.updates is not None,
        ):
            raise error
        if self.compile_pointwise and self.is_of_gpt:
            raise PlanError("compile_pointwise", True, *COMPILES_NOTHING)

    def _check_hierarchy(self) -> None:
        levels = (self.cp_inner, self.grid.cp // self.cp_inner if self.cp_inner > 0 else 0)
        divided = self.cp_comm_type == A2A_P2P and self.grid.cp > 1
        if self.cp_inner == 1 and not divided:
            return
        if not divided:
            reason = f"it is for cp_comm_type {A2A_P2P} and several context-parallel ranks"
            raise PlanError("cp_inner", self.cp_inner, reason, "Set it to 1")
        if min(levels) < 2 or math.prod(levels) != self.grid.cp:
            reason = f"it does not divide {self.grid.cp} context-parallel ranks into several groups"
            remedy = "Use a divisor, neither 1 nor all, or another cp_comm_type"
            raise PlanError("cp_inner", self.cp_inner, reason, remedy)

    @property
    def cp_sizes(self) -> tuple[str, ...]:
        """The setting that ``cp_inner`` is made of."""
        if self.cp_inner == 1:
            return ()
        return str(self.cp_inner), str(self.grid.cp // self.cp_inner)

    @property
    def fp8(self) -> Fp8 | None:
        """How linear layers compute in fp8; None: they do not."""
        if self.fp8_format is None:
            return None
        return Fp8(self.fp8_format, self.fp8_recipe, self.bf16_layers)

    @property
    def is_of_gpt(self) -> bool:
        """Whether it is a plan of the GPT that the flags of merak-pretrain describe."""
        return self.graph_sharding in ("", LAYERS)

    @property
    def offloads(self) -> bool:
        """Whether units keep anything in host memory."""
        return any(stage.offload for stage in self.stages)

    @property
    def num_microbatches(self) -> int:
        return self.schedule.microbatches

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.num_microbatches * self.grid.dp

    @property
    def expert_copies(self) -> int:
        """Number of ranks with the same weights of a layer that divide its experts; 1: none do."""
        return max(1, self.expert_ranks // self.grid.tp)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that have all experts of a layer together, where any divide them."""
        return self.expert_parallel * self.expert_shards

    @property
    def expert_group(self) -> int:
        """Number of ranks that exchange rows, other than the tensor-parallel ones; 1: none do."""
        own = self.expert_shards == 1 and self.expert_ranks <= self.grid.tp
        return 1 if own else self.expert_ranks

    @property
    def expert_tensor_parallel(self) -> int | None:
        """The setting that ``expert_shards`` is made of; None where no ranks divide experts."""
        return None if self.expert_ranks == 1 else self.expert_shards

    def ranks_of(self, tensor: TensorSharding) -> int:
        """Return the number of ranks that shard a tensor."""
        return self.expert_ranks if tensor.experts else self.grid.tp

    @property
    def optimizer_shards(self) -> int:
        """Number of ranks that shard the optimizer state of a parameter."""
        return self.shards.optimizer

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank stores its shard of the gradients only, and a unit's full ones while its
        backward runs.
        """
        return self.shards.brings_gradients

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank stores its shard of the weights only, and a unit's full ones while it
        computes.
        """
        return self.shards.brings_parameters

    @property
    def shards(self) -> Shards:
        return Shards.of(self.sharding, self.shard_ranks, self.offload_model_states)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that shard among themselves: those of one instance."""
        return self.grid.copies // self.sharding_instances

    @property
    def largest_message(self) -> int:
        """Bytes of a micro-batch that cross the boundary of two stages where most do."""
        return max((self.units[s.last - 1].output_bytes for s in self.stages[:-1]), default=0)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient that replicas send."""
        return 2 if self.grad_reduce_in_bf16 else 4

    @property
    def copied(self) -> int:
        """Number of gradients of a bucket that is copied to be sent; 0 if none is."""
        return self.bucket_size if self.grad_reduce_in_bf16 and self.grid.copies > 1 else 0

    def stage_units(self, stage: int) -> tuple[Unit, ...]:
        return self.units[self.stages[stage].first : self.stages[stage].last]

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of one pipeline rank, ascending."""
        return tuple(
            stage for stage in range(len(self.stages)) if self.schedule.rank_of(stage) == pp_rank
        )

    def by_rank(self, of_stages: Sequence[int]) -> list[int]:
        """Return numbers of stages, added up for each pipeline rank; none of no numbers."""
        if not of_stages:
            return []
        ranks = range(self.grid.pp)
        return [sum(of_stages[stage] for stage in self.stages_of(rank)) for rank in ranks]

    def stage_parameters(self, stage: int) -> int:
        """Return the number of values on one rank of a stage, with its own copies of tied
        tensors.
        """
        return held_parameters(self.stage_units(stage))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-safe form; the inverse of ``from_dict``."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("units", "stages", "shardings"):
            plain[name] = [record(item) for item in plain[name]]
        more = {
            "grid": record(self.grid),
            "schedule": self.schedule.to_dict(),
            "cluster": self.cluster.to_dict(),
        }
        return plain | more

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Plan":
        """Parse what ``to_dict`` returns. Raises PlanError for an unknown or missing key, and for
        values that are no plan.

        In a plan written by hand, the cluster, its device and its links may be names of the tables
        in ``cluster``.
        """
        rows = {"units": Unit, "stages": StagePlan, "shardings": TensorSharding}
        values = _renamed(plain) | {"cluster": _cluster(plain)}
        for name, kind in rows.items():
            if name in values:
                values[name] = build(rows_of, {"kind": kind, "rows": values[name]})
        if "grid" in values and "schedule" in values:
            values["grid"] = build(Grid, values["grid"])
            values["schedule"] = build(Schedule.from_dict, {"values": values["schedule"]})
        return build(cls, values)

    def to_json(self) -> str:
        """Return JSON with one row of data per line."""
        lines = []
        for name, value in self.to_dict().items():
            if name in ("units", "stages", "shardings") and value:
                text = "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"
            else:
                text = json.dumps(value)
            lines.append(f"  {json.dumps(name)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        try:
            plain = parse(text)
        except ValueError as error:
            raise PlanError(
                "plan", "JSON", f"it does not parse: {error}", "Correct the text"
            ) from error
        if not isinstance(plain, dict):
            raise PlanError("plan", "JSON", "it is not an object", "Start from a stored plan")
        return cls.from_dict(plain)


def _renamed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stored plan under today's names."""
    values = dict(plain)
    if "sharding" not in values and isinstance(values.get("distributed_optimizer"), bool):
        values["sharding"] = "optim" if values.pop("distributed_optimizer") else "no_shard"
    return values


def _cluster(plain: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a stored plan. Raises PlanError."""
    if "cluster" not in plain and "device" in plain:
        reason = (
            "the plan was stored when plans named a device, and no longer says for which "
            "links it was priced"
        )
        raise PlanError("plan: device", plain["device"], reason, "Make it again with tools/plan.py")
    if "cluster" not in plain:
        reason = "a plan is priced for one"
        raise PlanError(
            "plan: cluster",
            "(missing)",
            reason,
            f"Give its fields, or one of {', '.join(CLUSTERS)}",
        )
    content = plain["cluster"]
    try:
        return (
            CLUSTERS[content]
            if content in tuple(CLUSTERS)
            else Cluster.from_dict(content, "cluster")
        )
    except ConfigError as error:
        raise PlanError(f"plan: {error.what}", error.value, error.reason, error.remedy) from error
