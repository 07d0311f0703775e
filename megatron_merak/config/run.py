"""The configuration of a run."""

import dataclasses
from typing import Any, Self, TypeVar

from .backend import check_backend
from .batches import Batches, batches_of, check_length, check_sizes
from .checks import (
    check_checkpoint,
    check_compiled,
    check_context_parallel,
    check_conversations,
    check_data,
    check_divided_experts,
    check_experts,
    check_model,
    check_needs,
    check_offloading,
    check_optimizer,
    check_pipeline,
    check_precision,
    check_ranks,
    check_recompute,
    check_recomputed_activations,
    check_rows_of_experts,
    check_schedule,
    check_sequence_parallel,
    check_sharding,
    check_sources,
    check_tensor_parallel,
    check_tokenizer_files,
    left,
)
from .fp8 import check_fp8
from .hf import HFModelConfig
from .instances import check_instances
from .model_states import check_model_states
from .optimizer import OptimizerConfig
from .parallel import UNFLUSHED, ParallelConfig
from .rank_order import check_order
from .sections import (
    CheckpointConfig,
    DataConfig,
    HFCheckpointConfig,
    HFDataConfig,
    LoggingConfig,
    ModelConfig,
    TrainConfig,
)
from .servers import check_servers, check_workers, worker_note
from .settings import known_keys
from .streams import StreamConfig, check_streams
from .unflushed import check_unflushed, refuse_unflushed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings that runs of all models have, one section per concern. ``model`` is refined by
    subclasses.
    """

    model: ModelConfig | HFModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    streams: StreamConfig = StreamConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def couples_samples(self) -> str:
        """What is of whole micro-batches as far as settings tell; see ``ModelConfig``."""
        return ""

    @property
    def routed_experts(self) -> int | None:
        """Number of experts of a layer, as far as settings tell."""
        return None

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas on ``world_size`` ranks."""
        parallel = self.parallel
        return (world_size - parallel.num_parameter_servers) // parallel.ranks_of_replica

    def batches(self, world_size: int) -> Batches:
        """Return the samples of every optimizer step. Raises ConfigError."""
        return self.batches_over(self.data_parallel_size(world_size))

    def batches_over(self, replicas: int) -> Batches:
        """Return the samples of every optimizer step, given the number of model replicas. Raises
        ConfigError.
        """
        return batches_of(self.train, self.model.seq_length, replicas)

    def global_batch_size(self, world_size: int) -> int:
        """Return the samples per optimizer step; of the largest step, if they grow."""
        return self.batches(world_size).largest

    def iterations(self, batches: Batches) -> int:
        """Return the optimizer steps of the run, given the samples of each; 0 if it does
        not train.
        """
        train = self.train
        if train.train_samples is None:
            return train.train_iters or 0
        return batches.steps(train.train_samples)

    def phases(self, world_size: int) -> list[tuple[int, int]]:
        """Return (samples per step, steps) of a run of --train-samples, in order."""
        samples = self.train.train_samples
        return [] if samples is None else [*self.batches(world_size).phases(samples)]

    def num_microbatches(self, world_size: int) -> int:
        """Return the micro-batches per replica and step; of the largest step, if they grow."""
        samples = self.train.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size) // samples

    def validate(self, world_size: int, *, training: bool = True) -> None:
        """Check the settings against each other and against ``world_size`` ranks, without
        communication.

        training: False, for planning, needs neither data, tokenizer nor learning rate.

        Raises ConfigError; the remedy names the nearest values that work.
        """
        self.check_model(world_size)
        check_precision(self.train)
        check_needs(self.parallel)
        check_needs(self.logging)
        check_needs(self.optimizer)
        check_servers(
            self.parallel, self.train, self.checkpoint, self.logging, optimizer=self.optimizer
        )
        (check_workers if self.parallel.num_parameter_servers else check_ranks)(
            self.parallel, world_size
        )
        check_order(self.parallel.rank_order, self.parallel.use_tp_pp_dp_mapping, "--rank-order")
        batches = self.batches(world_size)
        replicas = self.data_parallel_size(world_size)
        # checks what is to come, later
        resumes = self.checkpoint.load is not None and not self.checkpoint.finetune
        check_sizes(self.train, batches, replicas, batches.sizes[-1][0] if resumes else 0)
        check_length(self.train, batches)
        check_context_parallel(self.parallel)
        copies = replicas * self.parallel.context_parallel_size
        check_experts(self.parallel, copies, self.routed_experts)
        check_recompute(self.parallel)
        check_offloading(self.parallel)
        check_model_states(self.parallel, self.train.fp8 is not None)
        check_schedule(self.parallel)
        check_sharding(self.parallel)
        check_fp8(self.train.fp8, self.parallel)
        check_instances(self.parallel, replicas * self.parallel.context_parallel_size)
        check_backend(self.parallel)
        check_checkpoint(self.checkpoint, self.parallel)
        if training:
            check_optimizer(self.optimizer, self.train)
            self.check_data()
            check_streams(self.streams, self.data, self.parallel)

    def check_model(self, world_size: int) -> None:
        """Check the model section by itself and against the degrees of parallelism. Raises
        ConfigError, whose remedies work on as many ranks.
        """
        raise NotImplementedError

    def check_data(self) -> None:
        """Check the sources of samples. Raises ConfigError."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return sections and their values, JSON-safe; ``from_dict`` returns an equal
        configuration.
        """
        return {
            name: {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in section.items()
            }
            for name, section in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, sections: Any) -> Self:
        """Undo ``to_dict``; missing settings have their defaults.

        Raises ConfigError for an unknown key, a missing required value or a value of the wrong
        type.
        """
        types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        known_keys("configuration", sections, types)
        return cls(
            **{
                name: section_type.from_dict(sections.get(name, {}))
                for name, section_type in types.items()
            }
        )

    def ignored(self) -> tuple[str, ...]:
        """Return sentences on settings that have no effect, or another one than they say."""
        parallel = self.parallel
        alone = parallel.tensor_model_parallel_size == 1
        overlap = parallel.tp_comm_overlap
        overlaps = overlap not in ("weight-gradient", "auto")
        flags = {
            "--sequence-parallel": alone and parallel.sequence_parallel,
            f"--tp-comm-overlap {overlap}": overlaps and not parallel.exchanges_in_layers,
        }
        why = "has no effect: --tensor-model-parallel-size is 1."
        lines = [f"{flag} {why}" for flag, present in flags.items() if present]
        if parallel.cp_comm_type is not None and parallel.context_parallel_size == 1:
            why = "has no effect: --context-parallel-size is 1."
            lines.append(f"--cp-comm-type {parallel.cp_comm_type} {why}")
        if parallel.ddp_bucket_size is not None and parallel.sharding in (
            "optim_grads",
            "optim_grads_params",
        ):
            why = "has no effect: sharded gradients are reduced one unit of the model at a time."
            lines.append(f"--ddp-bucket-size {parallel.ddp_bucket_size} {why}")
        if parallel.data_parallel_strategy == "ps-async" and self.data.num_workers:
            why = (
                "has no effect: a worker of --data-parallel-strategy ps-async loads the part "
                "that it claimed."
            )
            lines.append(f"--num-workers {self.data.num_workers} {why}")
        return (*lines, *self.optimizer.stuck_moments())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """A run of the GPT whose shape flags define."""

    model: ModelConfig

    @property
    def is_priced_by_graph(self) -> bool:
        """Whether a plan's numbers come from the graph of the model: the formulas for its shape know
        no experts, no ranks that divide sequences, and no fp8.
        """
        return (
            self.model.num_experts is not None
            or self.parallel.context_parallel_size > 1
            or self.train.fp8 is not None
        )

    @property
    def couples_samples(self) -> str:
        return self.model.couples_samples

    @property
    def routed_experts(self) -> int | None:
        return self.model.num_experts

    def check_model(self, world_size: int) -> None:
        check_model(self.model)
        parallel = self.parallel
        tensor = parallel.tensor_model_parallel_size
        stages = parallel.pipeline_model_parallel_size
        ranks = world_size - parallel.num_parameter_servers
        check_tensor_parallel(
            self.model,
            tensor,
            left(ranks, parallel.ranks_of_replica // tensor),
            whole_experts=parallel.expert_ranks > 1,
        )
        replicas = left(ranks, parallel.ranks_of_replica)
        copies = None if replicas is None else replicas * parallel.context_parallel_size
        check_divided_experts(self.model, parallel, copies)
        check_rows_of_experts(self.model, self.train)
        check_recomputed_activations(self.model, self.parallel)
        check_compiled(self.parallel)
        check_sequence_parallel(
            self.model.seq_length, self.model.max_position_embeddings, self.parallel
        )
        check_pipeline(self.model, stages, left(ranks, parallel.layer_ranks))
        if parallel.pipeline_schedule in UNFLUSHED:
            check_unflushed(
                parallel.pipeline_schedule,
                self.model,
                self.train,
                self.optimizer,
                checkpoint=self.checkpoint,
                tp=tensor,
                cp=parallel.context_parallel_size,
                replicas=self.data_parallel_size(world_size),
            )

    def check_data(self) -> None:
        check_data(self.data, self.model, bool(self.streams.stream_path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFConfig(RunConfig):
    """A run of a HuggingFace model, whose shape ``--model`` defines; checks that need the shape
    follow when it is read.
    """

    model: HFModelConfig
    data: HFDataConfig = HFDataConfig()
    checkpoint: HFCheckpointConfig = HFCheckpointConfig()

    def check_model(self, world_size: int) -> None:
        """Check what can be checked before the model is read."""
        check_sequence_parallel(self.model.seq_length, None, self.parallel)
        refuse_unflushed(self.parallel.pipeline_schedule)

    def check_data(self) -> None:
        check_sources(self.data, bool(self.streams.stream_path))
        check_tokenizer_files(self.data)
        if self.data.sft:
            check_conversations(self.data, self.train)


Run = TypeVar("Run", bound=RunConfig)


def planned_part(config: Run, world_size: int) -> tuple[Run, int, tuple[str, ...]]:
    """Return the settings and the number of ranks that a job's plan is made for, and what it does
    not say.

    They are those of the job; with parameter servers, those of one worker. Raises ConfigError.
    """
    if not config.parallel.served:
        return config, world_size, ()
    config.validate(world_size, training=False)
    workers = config.data_parallel_size(world_size)
    return (
        of_worker(config, workers),
        config.parallel.ranks_of_replica,
        (worker_note(config.parallel, workers),),
    )


def of_worker(config: Run, workers: int) -> Run:
    """Return the configuration of one worker: of a job of its own, with its part of every batch."""
    train = config.train
    size = None if train.global_batch_size is None else train.global_batch_size // workers
    parallel = dataclasses.replace(
        config.parallel,
        data_parallel_strategy="allreduce",
        num_parameter_servers=0,
        ps_max_staleness=None,
        ps_snapshot_interval=None,
    )
    return dataclasses.replace(
        config, parallel=parallel, train=dataclasses.replace(train, global_batch_size=size)
    )
