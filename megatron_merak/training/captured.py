"""Training any captured model on this rank: its shards, its programs, its optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..checkpoint import store
from ..checkpoint.hf import ModuleSource, fill, save_hf
from ..graph.capture import accepts_num_items
from ..optimizer.adamw import AdamW
from ..parallel.buffers import BufferEntry, ParameterBuffer, default_bucket_elements
from ..parallel.mesh import Mesh
from ..pipeline_parallel.builders import BUILDERS
from ..pipeline_parallel.passes import add_communication
from ..plan import TensorSharding
from ..runtime.executor import Executor
from ..runtime.parameters import StageParameters
from ..runtime.stage import Stage
from .blueprint import DTYPES, Batch, Blueprint, CapturedSettings, Programs
from .build import tie_groups
from .initialise import Initialiser
from .trainer import StepReport, forward_only

Decay = Callable[[str, tuple[int, ...]], bool]


def decay_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Megatron-LM's rule: vectors (norms, biases) have no weight decay."""
    return len(shape) > 1


@dataclass(frozen=True)
class Held:
    """One parameter of this rank: how it is divided, its storage (padding included), whether this stage writes it."""

    sharding: TensorSharding
    storage: Tensor
    owner: bool

    def shard(self, mesh: Mesh, storage: Tensor) -> store.Shard:
        tensor, tp = self.sharding, mesh.grid.tp
        shape = tensor.local_shape(mesh.tp_rank, tp)
        view = storage if tensor.dim is None else storage.narrow(tensor.dim, 0, shape[tensor.dim])
        owner = self.owner and mesh.dp_rank == 0
        return store.Shard(tensor.name, tensor.shape, tensor.dim, tensor.intervals(mesh.tp_rank, tp), view, owner)


def stored_shape(tensor: TensorSharding, tp: int) -> tuple[int, ...]:
    """The shape of a rank's part with its padding."""
    if tensor.dim is None:
        return tensor.shape
    extent = tensor.shape[tensor.dim] if tensor.padded is None else tensor.padded
    return tensor.shape[: tensor.dim] + (extent // tp,) + tensor.shape[tensor.dim + 1 :]


class CapturedTrainer:
    """A model of any kind, its optimizer and the executors of its plan.

    model: any module, with weights or without (``init_empty_weights``, ``from_pretrained``); it is not changed.
    example: one micro-batch, which decides cuts and shards. decay: which parameters take weight decay.
    ``iteration``: optimizer steps done. Building is collective over all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Batch,
        settings: CapturedSettings,
        mesh: Mesh,
        decay: Decay = decay_matrices,
    ):
        self.model, self.settings, self.mesh = model, settings, mesh
        self.accepts_num_items = accepts_num_items(model)
        self.blueprint = Blueprint(model, example, settings, mesh.grid)
        self.plan = self.blueprint.plan
        self._hold(decay)
        self._materialise()
        self.optimizer = AdamW(self.buffer, settings.optimizer, mesh.model)
        self._executors: dict[tuple, Executor] = {}
        self.executor(settings.micro_batches, True)
        self.iteration = 0

    def _hold(self, decay: Decay) -> None:
        """Storage for this stage's parameters; those that the loss does not use are kept by the first stage."""
        mesh, blueprint, settings = self.mesh, self.blueprint, self.settings
        (index,) = self.plan.stages_of(mesh.pp_rank)
        stages_of, tensors = blueprint.stages_of(), blueprint.sharding.tensors
        groups = tie_groups({(name,): stages for name, stages in stages_of.items()}, self.plan, mesh)
        dtype, trainable = DTYPES[settings.dtype], blueprint.captured.trainable
        entries, self.held, frozen = [], {}, {}
        counted = {
            name: stages[0] == index and (tensors[name].dim is not None or mesh.tp_rank == 0)
            for name, stages in stages_of.items()
        }
        seen: dict[str, None] = {}
        for unit in self.plan.stages[index].units:
            names = [name for name in blueprint.chain.parameters[unit] if name not in seen]
            seen |= dict.fromkeys(names)
            entries.append(
                [
                    BufferEntry(n, stored_shape(tensors[n], mesh.grid.tp), decay(n, tensors[n].shape), counted[n])
                    for n in names
                    if n in trainable
                ]
            )
        bucket = settings.parallel.ddp_bucket_size or default_bucket_elements(mesh.grid.dp)
        self.buffer = ParameterBuffer(entries, dtype, mesh.device, bucket)
        for name in seen:
            if name in trainable:
                storage = self.buffer.parameter(name)
            else:
                kind = blueprint.captured.dtypes[name]
                storage = frozen[name] = torch.zeros(
                    stored_shape(tensors[name], mesh.grid.tp), dtype=kind, device=mesh.device
                )
            self.held[name] = Held(tensors[name], storage, counted[name])
        parameters = {name: nn.Parameter(held.storage, name in trainable) for name, held in self.held.items()}
        self._keep_spare(index, stages_of)
        names = {parameters[name]: name for name in seen if name in trainable}
        replicated = frozenset(name for name in seen if tensors[name].dim is None)
        ties = tuple((n, groups[stages_of[n]]) for n in seen if n in trainable and len(stages_of[n]) > 1)
        overlap = not settings.parallel.no_overlap_grad_reduce
        self.parameters = StageParameters(self.buffer, names, mesh, replicated, ties, overlap)
        self.programs = Programs(blueprint, index, mesh, parameters, self.parameters.weights)
        recompute = self.plan.stages[index].recompute
        self.stage = Stage(index, self.programs, self.parameters, recompute, mesh, settings.seed)

    def _keep_spare(self, index: int, used: Mapping[str, Any]) -> None:
        """Parameters that the loss does not use are carried along, so that nothing is lost on the way to disk."""
        aliases = self.blueprint.captured.aliases
        for name, parameter in self.model.named_parameters():
            if index == 0 and name not in used and name not in aliases:
                sharding = TensorSharding(name, tuple(parameter.shape))
                storage = torch.zeros(parameter.shape, dtype=parameter.dtype, device=self.mesh.device)
                self.held[name] = Held(sharding, storage, self.mesh.tp_rank == 0)

    @torch.no_grad()
    def _materialise(self) -> None:
        """Fill the shards: from where the model was loaded, from the model itself, or by its own random rule."""
        source = getattr(self.model, "merak_source", None)
        if source is None:
            source = ModuleSource(self.model)
            empty = {name for name, p in self.model.named_parameters() if isinstance(p, FakeTensor)}
        else:
            empty = set()
        available = frozenset(source.names()) - empty
        shards = list(self.shards())
        fill([shard for shard in shards if shard.name in available], source)
        drawn = [shard for shard in shards if shard.name not in available]
        initialiser = Initialiser(self.model) if drawn else None
        for shard in drawn:
            full = initialiser.draw(shard.name, self.settings.seed)
            if shard.dim is not None:
                full = torch.cat([full.narrow(shard.dim, a, b - a) for a, b in shard.intervals], shard.dim)
            shard.tensor.copy_(full)

    def executor(self, micro_batches: int, training: bool = True) -> Executor:
        """What runs steps of so many micro-batches."""
        key = (micro_batches, training)
        if key not in self._executors:
            schedule = self.plan.schedule
            if micro_batches != schedule.microbatches:
                schedule = BUILDERS[self.settings.parallel.pipeline_schedule](len(self.plan.stages), micro_batches)
            schedule = add_communication(schedule if training else forward_only(schedule))
            pipes = next(iter(self._executors.values())).pipes if self._executors else None
            stages = {self.stage.index: self.stage}
            self._executors[key] = Executor(stages, schedule, self.mesh, self.accepts_num_items, pipes)
        return self._executors[key]

    def gradients(self, batches: Sequence[Batch]) -> float:
        """One step's loss, known to every rank, and, in ``buffer.main_grad``, its gradient.

        With ``num_items_in_batch`` in the batches (and a model that takes it) losses of micro-batches are shares of
        the step's loss and add up; else the step's loss is their mean.
        """
        self.parameters.start_step()
        executor = self.executor(len(batches), True)
        executor.per_token = "num_items_in_batch" in batches[0]
        loss = executor.run(batches, self.iteration)
        self.parameters.finish_step()
        value = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if loss is not None:
            value += loss.total if executor.per_token else loss.mean / (len(batches) * self.mesh.grid.dp)
        for group in (self.mesh.dp, self.mesh.pp):
            if group is not None:
                dist.all_reduce(value, group=group)
        return value.item()

    def step(self, batches: Sequence[Batch], rate: float, decay: float) -> StepReport:
        """Train on this replica's micro-batches, of any shapes; every rank of the replica passes the same ones."""
        loss = self.gradients(batches)
        result = self.optimizer.step(rate, decay)
        self.iteration += 1
        return StepReport(loss, result.grad_norm, rate, result.skipped)

    def evaluate(self, batches: Sequence[Batch], outputs: Sequence[str] = ("loss",)) -> list[dict[str, Tensor]] | None:
        """Forward without dropout: per micro-batch the named outputs, on ranks of the last stage, else None."""
        self.programs.wanted = tuple(outputs)
        executor = self.executor(len(batches), False)
        if executor.run(batches, self.iteration, training=False) is None:
            return None
        names = [name for name in outputs if name != "loss"]  # results have their values' names, in this order
        found = [dict(zip(names, result.values(), strict=True)) for result in executor.results]
        return [{"loss": loss[0]} | result for loss, result in zip(executor.losses, found, strict=True)]

    def shards(self, flat: Tensor | None = None) -> Iterator[store.Shard]:
        """``flat`` ([buffer.size]: gradients, optimizer state) as shards of HuggingFace tensors; None: all weights."""
        for name, held in self.held.items():
            if flat is None:
                yield held.shard(self.mesh, held.storage)
            elif name in self.buffer.slots:
                yield held.shard(self.mesh, self.buffer.view(flat, name))

    def _state(self) -> dict[str, list[store.Shard]]:
        return {"model": list(self.shards())} | {
            k: list(self.shards(flat)) for k, flat in self.optimizer.state().items()
        }

    def save(self, root: str | Path, extra: Mapping[str, Any] | None = None) -> Path:
        """Write the training state under ``root``; ``extra`` is JSON. Collective; raises CheckpointError everywhere."""
        meta = {"optimizer_steps": self.optimizer.steps, "plan": self.plan.to_dict(), "extra": dict(extra or {})}
        return store.save(root, self.iteration, self._state(), meta, self.mesh.control, "cpu")

    def load(self, root: str | Path, iteration: int | None = None) -> dict[str, Any]:
        """Resume from ``root``, written under any layout. Returns ``extra``. Collective; raises CheckpointError."""
        meta = store.load(root, self._state(), self.mesh.control, "cpu", iteration)
        self.optimizer.steps, self.iteration = meta["optimizer_steps"], meta["iteration"]
        return meta["extra"]

    def save_hf(self, directory: str | Path, processing_class=None) -> None:
        """Write a directory that ``from_pretrained`` of plain transformers opens. Collective."""
        save_hf(directory, self.model, list(self.shards()), self.mesh.control, "cpu", processing_class=processing_class)
