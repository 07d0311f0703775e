"""Training any captured model on this rank: its shards, its programs, its optimizer."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import store
from ..checkpoint.hf import save_hf
from ..checkpoint.save import check_finite
from ..config import OptimizerConfig
from ..errors import CheckpointError, PlanError
from ..optimizer.base import Rates, StepResult
from ..optimizer.loss_scale import LossScaler, is_state
from ..parallel.agree import gather_json, together
from ..parallel.buffers import Bucket, Sharding
from ..parallel.mesh import Mesh
from ..runtime.executor import Executor
from ..runtime.executors import Executors
from ..runtime.halves import halve
from ..runtime.parameters import RankParameters
from ..runtime.stage import Stage
from .adapters import has_adapters, save_adapters
from .blueprint import Blueprint, Programs
from .documents import without
from .guard import unguarded
from .holdings import Holdings
from .kernels import check_kernels
from .named_outputs import named_outputs
from .native import shared_here, tie_groups
from .optimizer_state import OptimizerOf, adamw_of, optimizer_kinds, weights_kind
from .parameter_groups import GroupOf, matrices_and_others
from .proofs import difference
from .replicas import Replicas
from .running import RunningStatistics
from .same_plan import check_same_plan
from .saved_run import check_same_optimizer, is_count
from .step_report import StepReport
from .traced import Batch, OwnLoss
from .user_model import UserModel, left_out


class CapturedTrainer:
    """A model of any kind, its optimizer and the executors of its plan.

    blueprint: the model as it was traced, and its plan, which decides everything but what follows. optimizer: betas,
    epsilon and clipping; rates come with each step. seed: of initial weights and dropout. group_of: the group of each
    parameter, of which each step says learning rate and weight decay. replica_check_interval: optimizer steps between
    two comparisons of the replicas' weights, 0 for none. scaler: of the loss, in fp16. optimizer_of: who keeps the
    optimizer's state.
    ``iteration``: optimizer steps done. Building is collective over all ranks.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        mesh: Mesh,
        *,
        optimizer: OptimizerConfig | None = None,
        seed: int = 1234,
        group_of: GroupOf = matrices_and_others,
        replica_check_interval: int = 100,
        scaler: LossScaler | None = None,
        optimizer_of: OptimizerOf = adamw_of,
    ):
        with together(mesh.control, "cpu"):
            check_kernels(mesh.device)
        self.blueprint, self.mesh, self.seed = blueprint, mesh, seed
        self.model, self.accepts_num_items = blueprint.traced.model, blueprint.traced.accepts_num_items
        example = blueprint.traced.batch
        self.plan = blueprint.plan
        check_same_plan(self.plan, mesh.control)
        self._check_halves()
        # Whether micro-batches run in halves; None: a step will find out.
        one = len(blueprint.traced.trained) == 1  # halves would hand out halves
        asked = one and self.plan.overlap == "sub-pipeline" and "num_items_in_batch" in example
        self.halves: bool | None = None if asked and len(halve(example)) > 1 else False
        self.running = RunningStatistics(self.blueprint, mesh)
        self.holdings = Holdings(self.blueprint, mesh, group_of)
        self.holdings.fill(seed)
        self.buffer, self.shards = self.holdings.buffer, self.holdings.shards
        self.parameters = self._rank_parameters()
        bound = (mesh, self.holdings.parameters, self.parameters.weights)
        self.programs = {stage: Programs(self.blueprint, stage, *bound) for stage in self.holdings.stages}
        self.stages = {stage: self._stage(stage, programs) for stage, programs in self.programs.items()}
        self.optimizer = optimizer_of(self.parameters, optimizer or OptimizerConfig(), scaler)
        self.replicas = Replicas(mesh, self.optimizer, self.parameters.gatherer, replica_check_interval)
        self.executors = Executors(self.stages, self.plan.schedule, mesh, self.accepts_num_items)
        with together(mesh.control, "cpu"):
            for programs in self.programs.values():
                programs(example, True)
        self.iteration = 0
        self.user_model: UserModel | None = None

    def share_weights(self) -> UserModel:
        """From now on the model that was given has the trained weights, or says that it does not."""
        follow, shares = self.holdings.follow_edits, self.holdings.shares_weights
        self.user_model = UserModel(self.model, self.exported, self.mesh, follow, shares)
        return self.user_model

    def _check_halves(self) -> None:
        """Losses of halves add up where they are shares of the step's, or PlanError."""
        if self.plan.overlap == "sub-pipeline" and not self.accepts_num_items:
            reason = "the losses of two halves do not add up: the model's forward takes no num_items_in_batch"
            raise PlanError("--tp-comm-overlap", "sub-pipeline", reason, "Use pair, or weight-gradient")

    @property
    def notes(self) -> tuple[str, ...]:
        """What the capture brought to light, in sentences."""
        captured, fused = self.blueprint.traced.captured, self.blueprint.fused
        found = ", ".join(f"{count} {name}" for name, count in sorted(fused.items()))
        told = (f"Captured {captured.how}.", *captured.notes, f"Fused: {found or 'nothing'}.")
        if self.plan.overlap == "sub-pipeline" and self.halves is False:
            told += ("Micro-batches run whole: halves need two samples, and losses that are shares of the step's.",)
        return told + self.blueprint.whole_weights()

    def _rank_parameters(self) -> RankParameters:
        """Collective: it makes groups for the parameters that several ranks of the pipeline hold."""
        holdings, names, plan, mesh = self.holdings, self.holdings.names, self.plan, self.mesh
        stages_of = {(name,): stages for name, stages in holdings.stages_of.items()}
        groups, shared = tie_groups(stages_of, plan, mesh), shared_here(stages_of, plan, mesh)
        trained = sorted(names.values())  # every rank's order
        return RankParameters(
            self.buffer,
            names,
            mesh,
            holdings.replicated,
            tuple((name, groups[name,]) for name in trained if (name,) in groups),
            plan.overlap_grad_reduce,
            plan.overlap_param_gather,
            self.blueprint.partial,
            {name: shared[name,] for name in trained if (name,) in shared},
            {unit: [name for name in holdings.reads(unit) if name in self.buffer.slots] for unit in holdings.units},
            plan.grad_reduce_in_bf16,
            self.blueprint.sharding.tensors,
        )

    def _stage(self, index: int, programs: Programs) -> Stage:
        runs, behind = self.plan.stages[index].runs, self.plan.overlap != "none"
        given = (index, programs, self.parameters, runs, self.mesh, self.seed)
        return Stage(*given, split=self._parts, overlap=behind, units=self.plan.stages[index].units)

    def _parts(self, batch: Batch) -> list[Batch]:
        """A prepared micro-batch as it runs: in halves where the plan says so and their losses add up."""
        return halve(batch) if self.halves and "num_items_in_batch" in batch else [batch]

    def _try_halves(self, batches: Sequence[Batch]) -> None:
        """Let micro-batches run in halves if the loss and the gradient of one of these are the sums of its halves'."""
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        batch = max(prepared, key=lambda batch: len(halve(batch)))
        if 1 in gather_json(len(halve(batch)), self.mesh.control, "cpu"):
            return
        self.halves = False
        found = difference(self, batch, halve(batch))
        self.halves = None if found is None else not found
        if found and self.mesh.rank == 0:
            what = "micro-batches run whole, although sub-pipeline splits them in halves"
            warnings.warn(f"{what}: their losses do not add up ({found}).", stacklevel=2)

    def read(self, batch: Batch) -> Batch:
        """A batch without entries that the model was shown not to read."""
        return without(batch, self.blueprint.traced.unread)

    def executor(self, micro_batches: int, training: bool = True) -> Executor:
        """What runs steps of so many micro-batches."""
        return self.executors.of(micro_batches, training)

    def gradients(self, batches: Sequence[Batch], weights: Sequence[float] | None = None) -> float:
        """One step's loss, known to every rank, and, in ``buffer.main_grad``, its gradient."""
        told = self.backward(batches, weights)
        self.optimizer.unscale()
        return self.replicas.loss(told.tolist())

    def backward(self, batches: Sequence[Batch], weights: Sequence[float] | None = None) -> Tensor:
        """The loss of ``gradients`` where the host need not wait for it: what ``update`` reads beside the norm. In fp16
        the gradient keeps its loss scale.

        With ``num_items_in_batch`` in the batches (and a model that takes it, or by what a loss of its own says) losses
        of micro-batches are shares of the step's loss and add up; else that is their mean. With ``weights``, it is
        their weighted sum.
        """
        if self.halves is None:
            self._try_halves(batches)
        self.parameters.start_step()
        executor = self.executor(len(batches), True)
        executor.per_token = weights is not None or self.blueprint.traced.adds_up(batches[0])
        prepared, scale = [*map(self.blueprint.traced.prepared, batches)], self.optimizer.begin()
        loss = executor.run(prepared, self.iteration, weights=weights, loss_scale=scale)
        self.parameters.finish_step()
        self.running.count(len(batches))
        value = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if loss is not None:
            value += loss.total if executor.per_token else loss.mean / (len(batches) * self.mesh.summed)
        told = self.replicas.reduce(value)
        if self.mesh.pp is None:
            return told
        value = told[:1].clone()
        dist.all_reduce(value, group=self.mesh.pp)
        return torch.cat((value, told[1:]))

    def step(self, batches: Sequence[Batch], rate: float, decay: float) -> StepReport:
        """Train on this replica's micro-batches, of any shapes; every rank of the replica passes the same ones."""
        result = self.update([(rate, decay), (rate, 0.0)], self.backward(batches))
        return StepReport(result.loss, result.grad_norm, rate, result.skipped)

    def update(self, rates: Rates, told: Tensor | None = None, zeros: Tensor | None = None) -> StepResult:
        """The second half of a step: change the parameters by the gradient.

        told: what ``backward`` returned, and zeros, 0-d: read with the norm, in the step's only host sync.
        """
        if self.user_model is not None:
            self.user_model.stale()
        self.parameters.gatherer.restore_gradient()
        losses, counts, result = self.optimizer.reduce_and_step(told, zeros, rates)
        loss = self.replicas.loss(losses) if losses else None
        self.parameters.gatherer.launch()
        if self.user_model is not None and self.user_model.shared:
            self.parameters.gatherer.finish()  # whoever holds the model may read it
        self.iteration += 1
        self.replicas.note(result.grad_norm, self.iteration)
        return replace(result, loss=loss, zeros=int(counts[0]) if counts else None)

    def evaluate(self, batches: Sequence[Batch], outputs: Sequence[str] = ("loss",)) -> list[dict[str, Tensor]] | None:
        """Forward without dropout: per micro-batch the outputs, by their names, on ranks of the last stage, else None.

        outputs: names, and "*" for all but the loss and those that "!name" names; tensors of a tuple or dictionary are
        called after their place, such as "hidden_states.0". Replicas that share parameters call it together, some of
        them maybe with fewer batches or none.
        """
        for programs in self.programs.values():
            programs.wanted = tuple(outputs)
        count = self._most(len(batches))
        if not count:
            return None
        executor = self.executor(count, False)
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        executor.run(prepared, self.iteration, training=False)
        return named_outputs(executor, self.programs, prepared, False)

    def reported(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]] | None:
        """What the `backward` before computed: per micro-batch its loss, times its weight, and what an ``OwnLoss``
        reports, as of `evaluate`."""
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        return named_outputs(self.executor(len(batches)), self.programs, prepared, True)

    def _most(self, batches: int) -> int:
        """How many batches the replica with most of them has, where replicas need each other's parameters."""
        if self.buffer.sharding < Sharding.PARAMETERS:
            return batches
        most = torch.tensor(batches, device=self.mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.shard_group)
        return int(most)

    @contextmanager
    def computing(self, loss: OwnLoss | None) -> Iterator[None]:
        """Inside, steps and evaluations compute what this says; None: the loss that the model was traced with."""
        for programs in self.programs.values():
            programs.loss = loss
        try:
            yield
        finally:
            for programs in self.programs.values():
                programs.loss = None

    def admit(self, batches: Sequence[Batch], outputs: Sequence[str]) -> None:
        """Capture what an evaluation of ``batches`` needs, where it is new. Raises TraceError."""
        for programs in self.programs.values():
            programs.wanted = tuple(outputs)
            for batch in batches:
                programs(self.blueprint.traced.prepared(batch), False)

    def difference(self, one: Batch, others: Sequence[Batch]) -> str | None:
        """What of loss and gradients a batch does not have in common with others added up; see ``proofs``."""
        return difference(self, one, others)

    @property
    def captures(self) -> tuple[int, int]:
        """How many programs of this rank's stages were captured, and how many were made from those of other lengths."""
        return self.blueprint.lengths.captured, self.blueprint.lengths.made

    @property
    def scaler(self) -> LossScaler:
        return self.optimizer.scaler

    @property
    def dtype(self) -> str:
        return self.plan.dtype

    @property
    def is_causal(self) -> bool:
        return self.blueprint.traced.is_causal

    def output_rank(self, replica: int) -> int:
        """The global rank whose evaluation outputs of a replica count: the first one that runs its last stage."""
        schedule, grid = self.plan.schedule, self.mesh.grid
        return grid.rank(dp=replica, pp=schedule.rank_of(schedule.stages - 1))

    def share_statistics(self) -> None:
        """Before an evaluation: all replicas take the running statistics of the first. Collective over all ranks."""
        self.running.share()

    def exported(self) -> list[store.Shard]:
        """All that is trained, in the dtypes of the model that was given; of sharded fp32 weights a copy in the
        gradient's memory. Where a rank has memory for one unit's at a time, a shard brings its own. Collective."""
        buffer, gatherer, found = self.buffer, self.parameters.gatherer, [*self.others()]
        there: list[Sequence[Bucket]] = []

        def bring(buckets: Sequence[Bucket]) -> None:
            if there != [buckets]:
                gatherer.gather(buckets)
                if self.holdings.shares_exact:
                    gatherer.full(buffer.master, buckets)
                there[:] = [buckets]

        turns = buffer.turns(buffer.main_grad)
        for buckets in turns:
            for flat in (buffer.data, buffer.main_grad):
                buffer.allocate(flat, buckets)
            shards = self.holdings.exported([name for bucket in buckets for name in bucket.names])
            found += [replace(shard, bring=partial(bring, buckets)) for shard in shards]
        bring(turns[0] if turns else ())
        return found

    def _state(self) -> dict[str, store.Kind]:
        gatherer = self.parameters.gatherer
        others = () if has_adapters(self.model) else self.others()  # a base is not trained, and whoever resumes has it
        kinds = {"model": weights_kind(gatherer, self.shards, others)}
        return kinds | optimizer_kinds(self.optimizer, gatherer, self.shards)

    def others(self) -> list[store.Shard]:
        """What a training state has beside the parameters that are trained."""
        return [*self.holdings.others(), *self.running.shards()]

    def check_finite(self) -> None:
        """Raise NumericsError on every rank when a trained weight or its optimizer state is not finite."""
        check_finite(self._state(), self.mesh.control, "cpu")

    def save(self, root: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write the training state under ``root``; ``extra`` is JSON. Collective; raises CheckpointError, and PlanError
        when replicas have different weights, everywhere."""
        self.replicas.check()
        meta = {"optimizer_steps": self.optimizer.steps, "plan": self.plan.to_dict(), "extra": dict(extra or {})}
        meta |= {"loss_scale": self.optimizer.scaler.state(), "optimizer": self.optimizer.name}
        return store.save(root, self.iteration, self._state(), meta, self.mesh.control, "cpu")

    def load(
        self,
        root: str | Path,
        iteration: int | None = None,
        verify: bool = True,
        check: Callable[[dict[str, Any]], object] = lambda extra: None,
    ) -> dict[str, Any]:
        """Resume from ``root``, written under any layout. Returns ``extra``. Collective; raises CheckpointError.

        check: is given ``extra`` on every rank, and may raise, before a weight is changed.
        """

        def checked(meta: dict[str, Any]) -> None:
            scale = meta.get("loss_scale")
            sound = is_count(meta.get("optimizer_steps")) and isinstance(meta.get("extra"), dict)
            if not (sound and (scale is None or is_state(scale))):
                reason = (
                    "optimizer_steps, extra or loss_scale is missing from what it says of its run, or of another kind"
                )
                raise CheckpointError("training state", root, reason, "Resume from another checkpoint")
            check_same_optimizer(meta, self.optimizer)
            check(meta["extra"])

        meta = store.load(root, self._state(), self.mesh.control, "cpu", iteration, verify, check=checked)
        self.holdings.settle()
        if self.user_model is not None:
            self.user_model.stale()
        self.optimizer.steps, self.iteration = meta["optimizer_steps"], meta["iteration"]
        self.optimizer.scaler.load(meta.get("loss_scale"))
        return meta["extra"]

    def save_hf(self, directory: str | Path, processing_class=None, omitted: str = "") -> None:
        """Write a directory that ``from_pretrained`` of plain transformers, or of peft, opens, weights in the dtypes
        of the model that was given. omitted: a submodule that is left out, "" for none. Collective."""
        self.replicas.check()
        weights = self.exported()
        control, held = self.mesh.control, self.user_model
        if not has_adapters(self.model):
            with unguarded(self.model), left_out(self.model, omitted):
                save_hf(directory, self.model, weights, control, "cpu", processing_class=processing_class)
        elif held is not None and held.shared:
            save_adapters(Path(directory), self.model, (), (), control, processing_class)
        else:
            with nullcontext() if held is None else held.lent(), unguarded(self.model):
                save_adapters(Path(directory), self.model, weights, self.buffer.slots, control, processing_class)
