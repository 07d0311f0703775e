"""A pretraining job of any HuggingFace causal language model: capture, plan, build, run, and save it as HuggingFace."""

import dataclasses
import datetime
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.save import check_finite
from ..checkpoint.store import Shard
from ..cluster import Cluster
from ..config import DataConfig, HFConfig, of_worker
from ..data.build import build_datasets, build_tokenizer
from ..data.tokenizer import Tokenizer
from ..errors import DataError
from ..graph.ir.operators import flops
from ..optimizer.loss_scale import scaler_of_run
from ..parallel.agree import together
from ..parallel.buffers import Flat
from ..parallel.launch import World
from ..parallel.mesh import Mesh, build_mesh, control_group
from ..parallel.nodes import find_nodes, located
from ..pipeline_parallel.search.progress import SEARCHING, Progress
from ..planner.make import grid_of
from ..runtime.executor import Executor
from ..stages.captured import CapturedTrainer
from ..stages.devices import cluster_of
from ..stages.optimizer_state import OptimizerOf, adamw_of
from ..stages.parameter_groups import groups_of_run
from ..stages.step_report import StepReport
from .console import told
from .hf_batches import token_count
from .hf_model import blueprint_of, build_model, known_tokens, outer_names, traced_of
from .job import Job, agree, opening, throughput
from .outputs import check_outputs
from .run_job import run_job
from .served import mesh_of_worker
from .state import RunState

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def pretrain_hf(config: HFConfig, world: World, notices: tuple[str, ...] = ()) -> None:
    """Run the job on this rank. Raises a MerakError on every rank alike, before training where that can be known.

    notices: further lines for the first rank to print at the start.
    """
    role, workers = world.role, 1 if world.role is None else world.role.workers
    of_worker(config, workers).validate(world.size)
    model, asked = build_model(config.model), config
    config, tokenizer = with_tokenizer(config, model)
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    control = control_group(world.size, timeout)
    agree(config, control)
    own = of_worker(config, workers)
    nodes, grid = find_nodes(world, control), grid_of(own, world.size)
    where = (world.rank, world.device, timeout, world.clock, world.collectives, control)
    mesh = build_mesh(grid, *where, own.parallel.num_distributed_optimizer_instances)
    mesh = mesh if role is None else mesh_of_worker(mesh, config, role)
    with together(mesh.control, "cpu"):
        check_outputs(config, world.is_last)
        datasets = build_datasets(config, tokenizer, world.size if role is None else role.size)
    with together(mesh.control, "cpu"):
        cluster = located(cluster_of(world, config.parallel.device_profile), nodes)

    def make(optimizer_of: OptimizerOf) -> HFJob:
        trainer = TokenTrainer(model, config, mesh, cluster, optimizer_of)
        if world.rank == 0 and mesh.worker == 0:
            told(opening(config, trainer.plan, world, nodes, (*notices, *trainer.notes())))
        return HFJob(trainer, datasets)

    run_job(make, config, world, lambda trainer: throughput(config, trainer.plan, world, trainer.flops()), asked)


def with_tokenizer(config: HFConfig, model: nn.Module) -> tuple[HFConfig, Tokenizer]:
    """The run's tokenizer, and the configuration with what ``--model`` says about it. Raises DataError."""
    data, known_ids = config.data, known_tokens(model)
    ids = config.model.vocab_size
    if data.tokenizer_type == "NullTokenizer" or (data.tokenizer_type is None and data.mock_data):
        extra = data.tokenizer_type is not None  # a NullTokenizer adds the end of a document
        ids = known_ids - extra if ids is None else ids
        if ids + extra > known_ids:
            reason = f"the model's embedding has {known_ids} rows" + ", and NullTokenizer adds a token" * extra
            raise DataError("--vocab-size", ids, reason, f"Use at most {known_ids - extra}")
    else:
        data, ids = _own_tokenizer(data, Path(config.model.model)), None
    config = dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, vocab_size=ids))
    tokenizer = build_tokenizer(config)
    if tokenizer.vocab_size > known_ids:
        reason = f"it has ids up to {tokenizer.vocab_size - 1}, and the model's embedding has {known_ids} rows"
        raise DataError("--tokenizer-model", data.tokenizer_model, reason, "Use the model's own tokenizer")
    return config, tokenizer


def _own_tokenizer(data: DataConfig, model: Path) -> DataConfig:
    """The tokenizer in the model's directory, where none is named."""
    if data.tokenizer_model is not None:
        return data
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        remedy = "Use HuggingFaceTokenizer with --tokenizer-model, or NullTokenizer"
        raise DataError("--tokenizer-type", data.tokenizer_type or "(missing)", f"{model} has no tokenizer", remedy)
    return dataclasses.replace(data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(model))


class TokenTrainer(RunState):
    """A captured model that trains on samples of GPT data sets."""

    def __init__(
        self,
        model: nn.Module,
        config: HFConfig,
        mesh: Mesh,
        cluster: Cluster,
        optimizer_of: OptimizerOf = adamw_of,
    ):
        """``cluster``: what it is planned for. ``optimizer_of``: who keeps the optimizer's state. Collective over all
        ranks."""
        traced, self.batches = traced_of(model, config, mesh)
        with together(mesh.control, "cpu"), Progress(SEARCHING, shown=mesh.rank == 0) as progress:
            blueprint = blueprint_of(traced, of_worker(config, mesh.workers), mesh.grid.size, cluster, progress)
        interval = config.train.check_weight_hash_across_dp_replicas_interval
        self.captured = CapturedTrainer(
            blueprint,
            mesh,
            optimizer=config.optimizer,
            seed=config.train.seed,
            group_of=groups_of_run(config.optimizer, outer_names(model)),
            replica_check_interval=interval,
            scaler=scaler_of_run(config.train),
            optimizer_of=optimizer_of,
        )
        super().__init__(config, self.captured.plan, mesh)
        self.buffer, self.optimizer = self.captured.buffer, self.captured.optimizer
        self.gatherer = self.captured.parameters.gatherer

    def notes(self) -> tuple[str, ...]:
        """What the capture brought to light."""
        return self.captured.notes

    def executor(self, micro_batches: int) -> Executor:
        return self.captured.executor(micro_batches)

    def flops(self) -> int:
        """Of a step's forward and backward as the plan has it, over all ranks; work that ranks repeat counts once."""
        forward = sum(map(flops, self.captured.blueprint.traced.captured.module.graph.nodes))
        return 3 * forward * self.plan.num_microbatches * self.plan.grid.dp

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> StepReport:
        rates = self.rates()
        sums = self.captured.backward(self._made(batches))
        result = self.captured.update(rates, sums, self.local_zeros())
        self.count(batches, result.skipped)
        return self.report(result.loss, rates, result, result.zeros)

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """Mean token loss of one global batch without dropout, on every rank."""
        found = self.captured.evaluate([self.batches(batch) for batch in batches])
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        if found is not None:
            losses = torch.stack([result["loss"].double() for result in found])
            counts = torch.ones_like(losses)
            if self.config.train.calculate_per_token_loss:
                counts = losses.new_tensor([token_count(batch) for batch in batches])
                losses = losses.where(counts > 0, 0.0)  # a mean over no targets is no number
            sums += torch.stack([(losses * counts).sum(), counts.sum()])
        for group in (self.mesh.dp, self.mesh.pp):  # only one pipeline rank has the last stage, and any may report
            if group is not None:
                dist.all_reduce(sums, group=group)
        return (sums[0] / sums[1].clamp(min=1)).item()

    def _made(self, batches: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """The model's batches; with --calculate-per-token-loss each target counts alike, whatever its micro-batch."""
        if not self.config.train.calculate_per_token_loss:
            return [self.batches(batch) for batch in batches]
        count = torch.tensor(float(sum(map(token_count, batches))), device=self.mesh.device)
        if self.mesh.dp is not None:
            dist.all_reduce(count, group=self.mesh.dp)
        return [self.batches(batch, count.clamp(min=1).cpu()) for batch in batches]

    def others(self) -> Sequence[Shard]:
        return self.captured.others()

    def parts(self, flat: Flat, names: Collection[str]) -> Iterable[Shard]:
        return self.captured.shards(flat, names)

    def described(self) -> dict[str, Any] | None:
        config = getattr(self.captured.model, "config", None)
        return None if config is None else json.loads(config.to_json_string(use_diff=False))

    def load(self, root: str | Path, iteration: int | None = None, say: Callable[[str], object] | None = None) -> int:
        loaded = super().load(root, iteration, say)
        self.captured.parameter_shards.round_frozen()
        self.captured.iteration = self.iteration
        return loaded


class HFJob(Job):
    """The job's loop, and at its end the model as a HuggingFace directory."""

    def finish(self) -> None:
        directory = self.config.checkpoint.save_hf
        if directory is not None:
            check_finite(self.trainer.kinds(True), self.mesh.control, "cpu")
            self.trainer.captured.save_hf(directory, self._tokenizer())
            self.say(f"saved {directory} for HuggingFace")

    def _tokenizer(self):
        """The tokenizer that belongs to the model, to be saved with it."""
        given = self.config.data.tokenizer_model or self.config.model.model
        if self.mesh.rank > 0 or not any((Path(given) / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(given, local_files_only=True, trust_remote_code=False)
