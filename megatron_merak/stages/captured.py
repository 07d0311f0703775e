"""Train any captured model on this rank: its parameter shards, its programs, its optimizer."""

import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint import store
from ..checkpoint.behind import Staging
from ..checkpoint.hf import save_hf
from ..checkpoint.hf_copies import HFCopies, copy_hf, read_all
from ..checkpoint.manifest import BUFFER
from ..checkpoint.save import check_finite
from ..config import OptimizerConfig
from ..errors import CheckpointError, MerakError, PlanError
from ..optimizer.base import Rates, StepResult
from ..optimizer.loss_scale import LossScaler, is_state
from ..parallel.agree import alike, gather_json, together
from ..parallel.buffers import Bucket, Flat, ShardedState
from ..parallel.mesh import Mesh
from ..runtime.halves import halve
from ..runtime.offload import HostMemory
from ..runtime.stage import Stage
from .adapters import has_adapters, save_adapters
from .blueprint import Blueprint, ModelTask, Programs
from .constants import (
    META,
    Constants,
    check_same_constants,
    constant_shards,
    constants_of,
    described,
)
from .documents import without
from .graphs import check_graphs, check_program
from .guard import unguarded
from .kernels import check_fp8_products, check_kernels
from .named_outputs import named_outputs
from .optimizer_state import OptimizerOf, adamw_of, optimizer_kinds, weights_kind
from .outside import refusal
from .parameter_groups import GroupOf, matrices_and_others
from .parameter_shards import ParameterShards
from .running import RunningStatistics
from .same_plan import check_same_plan
from .saved_run import check_same_optimizer, is_count
from .traced import Batch, OwnLoss, shapes_of
from .trained_model import TrainedModel
from .trials import difference, snapshot
from .user_model import UserModel, left_out


@dataclass(frozen=True)
class StateCopies:
    """What `CapturedModel.save` writes, copied.

    iteration: of the checkpoint.
    kinds:     this rank's parts.
    meta:      what the checkpoint says of its run.
    """

    iteration: int
    kinds: Mapping[str, store.StateKind]
    meta: dict[str, Any]


class CapturedModel(TrainedModel):
    """A captured model. Building one is collective over all ranks. For the other arguments see
    `TrainedModel`.

    blueprint: the traced model and its plan.
    optimizer: betas, epsilon and clipping; learning rate and weight decay come with each step.
    seed:      of initial weights and dropout.
    group_of:  the parameter group of each parameter; each step gives the rates of all groups.
    """

    # see ``Programs``
    count: Callable[[Batch], Tensor] | None = None

    def __init__(
        self,
        blueprint: Blueprint,
        mesh: Mesh,
        *,
        optimizer: OptimizerConfig | None = None,
        seed: int = 1234,
        group_of: GroupOf = matrices_and_others,
        replica_check_interval: int = 100,
        graph_warm_up: int | None = None,
        scaler: LossScaler | None = None,
        optimizer_of: OptimizerOf = adamw_of,
    ):
        with together(mesh.control, "cpu"):
            check_kernels(mesh.device)
            if graph_warm_up is not None:
                check_graphs(blueprint.plan)
            check_fp8_products(mesh.device, blueprint.plan.fp8)
        self.blueprint = blueprint
        self.seed = seed
        plan = blueprint.plan
        self.model = blueprint.traced.model
        self.accepts_num_items = blueprint.traced.accepts_num_items
        example = blueprint.traced.batch
        check_same_plan(plan, mesh.control)
        sums = self.count is not None  # so that losses of halves add up
        if plan.overlap == "sub-pipeline" and not (sums or self.accepts_num_items):
            reason = (
                "the losses of two halves do not add up: the model's forward takes no "
                "num_items_in_batch"
            )
            raise PlanError(
                "--tp-comm-overlap", "sub-pipeline", reason, "Use pair, or weight-gradient"
            )
        # Whether micro-batches run in halves; None: the first step tries it.
        loss_only = len(blueprint.traced.trained) == 1  # other outputs would come in halves, too
        requested = loss_only and plan.overlap == "sub-pipeline"
        shares = sums or "num_items_in_batch" in example
        self.halves: bool | None = False
        if requested and shares and len(halve(example)) > 1:
            self.halves = True if sums else None
        self.running = RunningStatistics(blueprint, mesh)
        with together(mesh.control, "cpu"):  # memory may end here, and others would wait
            self.parameter_shards = ParameterShards(blueprint, mesh, group_of)
        self.parameter_shards.fill(seed)
        parameters = self.parameter_shards.rank_parameters()
        self.programs = {
            stage: Programs(
                blueprint,
                stage,
                mesh,
                self.parameter_shards.parameters,
                sink=parameters.weights,
                count=self.count,
            )
            for stage in self.parameter_shards.stages
        }
        offloads = any(plan.stages[index].offload for index in self.programs)
        host = HostMemory(mesh.device) if offloads else None
        stages = {}
        for index, programs in self.programs.items():
            stages[index] = Stage(
                index,
                programs,
                parameters,
                plan.stages[index].runs,
                mesh,
                seed,
                split=self._split,
                overlap=plan.overlap != "none",
                units=plan.stages[index].units,
                offload=plan.stages[index].offload,
                host=host,
            )
        super().__init__(
            plan,
            mesh,
            stages,
            parameters,
            optimizer=optimizer or OptimizerConfig(),
            scaler=scaler,
            optimizer_of=optimizer_of,
            replica_check_interval=replica_check_interval,
            graph_warm_up=graph_warm_up,
        )
        with together(mesh.control, "cpu"):
            for programs in self.programs.values():
                program = programs(example, True)
                if graph_warm_up is not None:
                    check_program(program)
        self.user_model: UserModel | None = None

    def share_weights(self) -> UserModel:
        """Give the user's model the trained weights where this rank has all of them; else make
        reading one raise.
        """
        shards = self.parameter_shards
        self.user_model = UserModel(
            self.model, self.exported, self.mesh, shards.follow_edits, sharded=shards.shares_weights
        )
        return self.user_model

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the capture, in sentences."""
        captured = self.blueprint.traced.captured
        fused = self.blueprint.fused
        counts = ", ".join(f"{count} {name}" for name, count in sorted(fused.items()))
        notes = (f"Captured {captured.how}.", *captured.notes, f"Fused: {counts or 'nothing'}.")
        if self.plan.overlap == "sub-pipeline" and self.halves is False:
            notes += (
                "Micro-batches run whole: halves need two samples, and losses that are shares of "
                "the step's.",
            )
        if self.plan.compile_pointwise:
            notes += (self.blueprint.compiled.note,)
        notes += self.blueprint.replicated_weights()
        return notes + self.blueprint.repeated_work() + self.blueprint.beside_fp8()

    def shards(self, flat: Flat, names: Collection[str] | None = None) -> Iterator[store.Shard]:
        """See `TrainedModel`."""
        return self.parameter_shards.shards(flat, names)

    def _split(self, batch: Batch) -> Sequence[Batch]:
        """The parts in which a prepared micro-batch runs: its halves if the plan says so and their
        losses add up.
        """
        shares = self.count is not None or "num_items_in_batch" in batch
        return halve(batch) if self.halves and shares else [batch]

    def _try_halves(self, batches: Sequence[Batch], task: ModelTask | None) -> None:
        """Decide whether micro-batches run in halves: if the loss and gradient of one are the sums
        of its halves'.
        """
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        batch = max(prepared, key=lambda batch: len(halve(batch)))
        if 1 in gather_json(len(halve(batch)), self.mesh.control, "cpu"):
            return
        self.halves = False
        mismatch = difference(self, batch, halve(batch), None if task is None else task.loss)
        self.halves = None if mismatch is None else not mismatch
        if mismatch and self.mesh.rank == 0:
            what = "micro-batches run whole, although sub-pipeline splits them in halves"
            warnings.warn(f"{what}: their losses do not add up ({mismatch}).", stacklevel=2)

    def read(self, batch: Batch) -> Batch:
        """The batch without the entries that the model does not read."""
        return without(batch, self.blueprint.traced.unread)

    def backward(
        self,
        batches: Sequence[Batch],
        weights: Sequence[float] | None = None,
        task: ModelTask | None = None,
    ) -> Tensor | None:
        """Compute one step's gradient, and return its loss without waiting for the device.

        batches: this replica's micro-batches.
        weights: factors of their losses.
        task:    what is computed; None: the loss that the model was traced with.

        Returns what `Replicas.reduce` does, for ``update`` to read beside the gradient norm. The
        loss of the step is the weighted sum of those of its micro-batches if ``weights`` are given;
        their sum if they are shares of it (see `Traced.adds_up`); else their mean. In fp16 the
        gradient stays multiplied by the loss scale.
        """
        with self.mesh.pulse.in_step(self.iteration + 1):
            return self._backward(batches, weights, task)

    def _backward(
        self,
        batches: Sequence[Batch],
        weights: Sequence[float] | None,
        task: ModelTask | None,
    ) -> Tensor | None:
        if self.halves is None:
            self._try_halves(batches, task)
        self.parameters.start_step()
        executor = self.executor(len(batches), True)
        sums = weights is not None or self.blueprint.traced.adds_up(batches[0])
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        self._agree_on_room(prepared)
        scale = self.optimizer.begin()
        loss = executor.run(
            prepared, self.iteration, weights=weights, loss_scale=scale, sum_losses=sums, task=task
        )
        self.mesh.pulse.at("gradient reduction")
        self.parameters.finish_step()
        self.running.count(len(batches))
        value = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if loss is not None:
            value += loss.total if sums else loss.mean / (len(batches) * self.mesh.summed)
        reduced = self.replicas.reduce(value)
        if self.mesh.pp is None:
            return reduced
        value = reduced[:1].clone()
        dist.all_reduce(value, group=self.mesh.pp)
        return torch.cat((value, reduced[1:]))

    @property
    def settled(self) -> bool:
        return self.halves is not None

    def snapshot(self) -> Callable[[], None]:
        return snapshot(self)

    def loss(self, values: Sequence[float]) -> float:
        """See `TrainedModel`. Raises PlanError if the weights of replicas differ."""
        return self.replicas.loss(values)

    def touched(self, batches: Sequence[Batch], task: ModelTask | None = None) -> set[str]:
        """Return the names of the parameters, of all stages, to which one of these batches gives a
        gradient.
        """
        programs = next(iter(self.programs.values()))
        prepared = map(self.blueprint.traced.prepared, batches)
        parts = [part for batch in prepared for part in self._split(batch)]
        return {name for part in parts for name in programs.touched(part, task)}

    def freeze(self, names: Collection[str], idle: Collection[str] | None = None) -> None:
        """Let parameters take no part in updates until the next call, and all others again.

        names: of trained parameters, as `named_parameters` of the user's model has them.
        idle:  those that get no gradient in the step; None: those to which the first batch gives
               none.

        Gradients of frozen ones are computed and not used: what was captured with them serves when
        they train again.

        What gets no gradient takes no part either: torch's optimizers skip it, so that it does not
        decay.
        """
        captured = self.blueprint.traced.captured
        idle = captured.untouched if idle is None else idle
        self.optimizer.freeze([*(captured.aliases.get(name, name) for name in names), *idle])

    @property
    def thawable(self) -> list[str]:
        """All names of the parameters that may be frozen and thawed, since their gradients are
        computed.
        """
        captured = self.blueprint.traced.captured
        own = sorted(captured.trainable)
        return own + [
            alias for alias, name in captured.aliases.items() if name in captured.trainable
        ]

    def update(
        self, rates: Rates, reduced: Tensor | None = None, zeros: Tensor | None = None
    ) -> StepResult:
        if self.user_model is not None:
            self.user_model.mark_stale()
        result = super().update(rates, reduced, zeros)
        if self.user_model is not None and self.user_model.shared:
            self.gatherer.finish()  # the user may read the model
        return result

    def evaluate(
        self,
        batches: Sequence[Batch],
        outputs: Sequence[str] = ("loss",),
        loss: OwnLoss | None = None,
    ) -> list[dict[str, Tensor]] | None:
        """Run forward without dropout; return the outputs by name per micro-batch, None but on
        ranks of the last stage.

        outputs: names. "*" means all but the loss, "!name" excludes one. A tensor inside a tuple or
                 dictionary has its index or key appended: "hidden_states.0".
        loss:    computes the loss and the outputs; None: the model does.

        Collective over data-parallel ranks that shard parameters or divide experts; these may have
        fewer batches than others, or none. Of those that divide experts each computes as many.
        """
        count = self._most(len(batches))
        if not count:
            return None
        executor = self.executor(count, False)
        task = ModelTask(loss, tuple(outputs))
        own = len(batches)
        if self.mesh.experts is not None:
            batches = [*batches, *[self.blueprint.traced.batch] * (count - own)]
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        padded = {programs: programs.padded for programs in self.programs.values()}
        self._agree_on_room(prepared)
        executor.run(prepared, self.iteration, training=False, task=task)
        found = named_outputs(executor, self.programs, prepared, False, task=task)
        for programs, before in padded.items():
            programs.padded = before
        return None if found is None else found[:own]

    def reported(
        self, batches: Sequence[Batch], task: ModelTask | None = None
    ) -> list[dict[str, Tensor]] | None:
        """Return what the last `backward`, of these arguments, computed, in the form of `evaluate`.

        Per micro-batch its loss times its weight, and the outputs that an ``OwnLoss`` reports.
        """
        prepared = [*map(self.blueprint.traced.prepared, batches)]
        return named_outputs(self.executor(len(batches)), self.programs, prepared, True, task=task)

    def _agree_on_room(self, batches: Sequence[Batch]) -> None:
        """Let copies of a layer that divide its experts exchange rows as they come where their batches
        have other shapes than each other, and so room for other numbers.
        """
        if self.plan.expert_room is None or self.mesh.experts is None:
            return
        padded = alike(repr([*map(shapes_of, batches)]), self.mesh.control)
        for programs in self.programs.values():
            programs.padded = padded

    def _most(self, batches: int) -> int:
        """The largest number of batches of any replica where replicas shard parameters or divide
        experts, else this one's.
        """
        group = self.mesh.shard_group
        alike = self.buffer.sharding < ShardedState.PARAMETERS and self.mesh.experts is None
        if alike or group is None:
            return batches
        most = torch.tensor(batches, device=self.mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return int(most)

    def admit(
        self, batches: Sequence[Batch], training: bool, task: ModelTask | None = None
    ) -> None:
        """Capture the programs that ``batches`` need and that do not exist yet. Raises TraceError.

        training: whether they are for training or for evaluation. task: what is computed; None: the
                  loss.
        """
        for programs in self.programs.values():
            for batch in batches:
                programs(self.blueprint.traced.prepared(batch), training, task)

    def refuse_outside(
        self, batches: Sequence[Batch], training: bool, task: ModelTask | None = None
    ) -> None:
        """Raise DataError for a number of a batch, which is on the CPU, that has no row in what it
        is looked up in.

        The arguments are those of ``admit``. What cannot be captured is left to the pass that needs
        it.
        """
        programs = next(iter(self.programs.values()))
        for number, batch in enumerate(batches):
            prepared = self.blueprint.traced.prepared(batch)
            for part in self._split(prepared) if training else [prepared]:
                try:
                    found = programs.outside(part, training, task)
                except MerakError:
                    continue
                if found is not None:
                    raise refusal(found, batch, number)

    def difference(self, one: Batch, others: Sequence[Batch]) -> str | None:
        """How loss and gradients of batch ``one`` differ from the sums of those of ``others``; see
        ``trials``.
        """
        return difference(self, one, others)

    @property
    def captures(self) -> tuple[int, int]:
        """How many programs of this rank were captured, and how many were derived from those of
        other lengths.
        """
        return self.blueprint.lengths.captured, self.blueprint.lengths.derived

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
        """The global rank from which a replica's evaluation outputs are taken: the first that runs
        its last stage.
        """
        schedule = self.plan.schedule
        grid = self.mesh.grid
        return grid.rank(dp=replica, pp=schedule.rank_of(schedule.stages - 1))

    def share_statistics(self) -> None:
        """Copy the first replica's running statistics to all, for an evaluation. Collective over
        all ranks.
        """
        self.running.share()

    def exported(self) -> list[store.Shard]:
        """Return the shards of weights and running statistics, in the dtypes of the user's model.
        Collective.

        fp32 weights that replicas shard are all-gathered into the gradient's memory. Where that has
        room for one unit only, the ``fetch`` of a shard all-gathers its unit.
        """
        buffer = self.buffer
        gatherer = self.gatherer
        exported = [*self.others()]
        gathered: list[Sequence[Bucket]] = []

        def fetch(buckets: Sequence[Bucket]) -> None:
            if gathered != [buckets]:
                gatherer.gather(buckets)
                if self.parameter_shards.shares_exact:
                    gatherer.full(buffer.master, buckets)
                gathered[:] = [buckets]

        turns = buffer.turns(buffer.main_grad)
        for buckets in turns:
            for flat in (buffer.data, buffer.main_grad):
                buffer.allocate(flat, buckets)
            shards = self.parameter_shards.exported(
                [name for bucket in buckets for name in bucket.names]
            )
            exported += [replace(shard, fetch=partial(fetch, buckets)) for shard in shards]
        fetch(turns[0] if turns else ())
        return exported

    def _state(self) -> dict[str, store.StateKind]:
        gatherer = self.gatherer
        # the base model is not saved: it is not trained
        others = () if has_adapters(self.model) else self.others()
        kinds = {"model": weights_kind(gatherer, self.shards, others)}
        return kinds | optimizer_kinds(self.optimizer, gatherer, self.shards)

    def others(self) -> list[store.Shard]:
        """Shards of what checkpoints have beside the trained parameters: frozen weights, running
        statistics.
        """
        return [*self.parameter_shards.others(), *self.running_state()]

    def running_state(self) -> Sequence[store.Shard]:
        return [*self.running.shards()]

    def constants(self) -> Constants:
        # the base model of adapters is not saved
        if has_adapters(self.model):
            return {}
        with unguarded(self.model):
            return constants_of(self.model, self.running.names)

    def after_load(self) -> None:
        self.parameter_shards.round_frozen()
        if self.user_model is not None:
            self.user_model.mark_stale()

    def check_finite(self) -> None:
        """Raise NumericsError on every rank if a trained weight or its optimizer state is not
        finite.
        """
        check_finite(self._state(), self.mesh.control, "cpu")

    def save(self, root: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint under ``root`` and return its directory. Collective.

        extra: anything that JSON can represent; `load` returns it.

        Raises on every rank CheckpointError, and PlanError if replicas have different weights.
        """
        self.replicas.check()
        meta = self._meta(extra)
        return store.save(
            root, self.iteration, self._saved(), meta, group=self.mesh.control, device="cpu"
        )

    def _meta(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "optimizer_steps": self.optimizer.steps,
            "plan": self.plan.to_dict(),
            "extra": dict(extra or {}),
            "loss_scale": self.optimizer.scaler.state(),
            "optimizer": self.optimizer.name,
            "missed_steps": dict(self.optimizer.missed),
            META: described(self.constants()),
        }

    def _saved(self) -> dict[str, store.StateKind]:
        """What a checkpoint has: what is loaded from it, and buffers that never change."""
        shards = constant_shards(self.constants(), owner=self.mesh.rank == 0)
        return self._state() | ({BUFFER: store.StateKind.of(shards)} if shards else {})

    def copied(self, staging: Staging, extra: Mapping[str, Any] | None = None) -> StateCopies:
        """Return copies of what `save` would write now, which stay until the next call.
        Collective.

        Raises on every rank what `save` does for numbers and replicas.
        """
        self.replicas.check()
        kinds = self._saved()
        check_finite(kinds, self.mesh.control, "cpu")
        staged = staging.copies(kinds, self.mesh.control, "cpu")
        return StateCopies(self.iteration, staged, self._meta(extra))

    def load(
        self,
        root: str | Path,
        iteration: int | None = None,
        verify: bool = True,
        check: Callable[[dict[str, Any]], object] = lambda extra: None,
    ) -> dict[str, Any]:
        """Load a checkpoint, written under any parallel layout, from ``root``; return its
        ``extra``. Collective.

        iteration: None: the last one.
        verify:    whether to compare the files with their checksums.
        check:     is called with ``extra`` on every rank before a weight is changed, and may raise.

        Raises CheckpointError.
        """

        def checked(meta: dict[str, Any]) -> None:
            scale = meta.get("loss_scale")
            sound = is_count(meta.get("optimizer_steps")) and isinstance(meta.get("extra"), dict)
            missed = meta.get("missed_steps", {})
            sound = sound and isinstance(missed, dict) and all(map(is_count, missed.values()))
            if not (sound and (scale is None or is_state(scale))):
                reason = (
                    "optimizer_steps, extra or loss_scale is missing from what it says of "
                    "its run, or of another kind"
                )
                raise CheckpointError(
                    "training state", root, reason, "Resume from another checkpoint"
                )
            check_same_optimizer(meta, self.optimizer)
            check_same_constants(meta, self.constants())
            check(meta["extra"])

        meta = store.load(
            root, self._state(), self.mesh.control, "cpu", iteration, verify, check=checked
        )
        self.after_load()
        self.optimizer.missed = meta.get("missed_steps", {})
        self.optimizer.steps, self.iteration = meta["optimizer_steps"], meta["iteration"]
        self.optimizer.scaler.load(meta.get("loss_scale"))
        return meta["extra"]

    def save_hf(self, directory: str | Path, processing_class=None, omitted: str = "") -> None:
        """Write a directory that ``from_pretrained`` of transformers, or of peft, loads.
        Collective.

        Weights have the dtypes of the user's model. omitted: the name of a submodule to leave out,
        "" for none.
        """
        self.replicas.check()
        weights = self.exported()
        control = self.mesh.control
        user_model = self.user_model
        if not has_adapters(self.model):
            with unguarded(self.model), left_out(self.model, omitted):
                save_hf(
                    directory,
                    self.model,
                    weights,
                    control,
                    device="cpu",
                    processing_class=processing_class,
                )
        elif user_model is not None and user_model.shared:
            save_adapters(
                Path(directory),
                self.model,
                (),
                (),
                group=control,
                processing_class=processing_class,
            )
        else:
            with nullcontext() if user_model is None else user_model.lend(), unguarded(self.model):
                save_adapters(
                    Path(directory),
                    self.model,
                    weights,
                    self.buffer.slots,
                    group=control,
                    processing_class=processing_class,
                )

    def copied_hf(
        self, staging: Staging, processing_class: Any = None, omitted: str = ""
    ) -> HFCopies:
        """Return copies of what `save_hf` would write now, which stay until the next call.
        Collective.

        Adapters are written into a temporary directory first, and read from there.
        """
        control = self.mesh.control
        if has_adapters(self.model):
            with tempfile.TemporaryDirectory(prefix="merak-") as place:
                self.save_hf(place, processing_class, omitted)
                with together(control, "cpu"):
                    return HFCopies(read_all(Path(place)) if self.mesh.rank == 0 else {})
        self.replicas.check()
        weights = self.exported()
        with unguarded(self.model), left_out(self.model, omitted):
            return copy_hf(self.model, weights, staging, control, processing_class)
