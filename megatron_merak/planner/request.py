"""What a job asks of its plan; what else planning reads is the model's units and the machine."""

from dataclasses import dataclass

from megatron_merak.config import ParallelConfig, RunConfig
from megatron_merak.config.fp8 import Fp8
from megatron_merak.pipeline_parallel.ops import Schedule
from megatron_merak.plan import Grid
from megatron_merak.planner.offload import Offload
from megatron_merak.planner.recompute import Recompute


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything that a job asks of its plan, by flags or arguments.

    parallel:            degrees and order of ranks, schedule, recomputation, overlap, sharding,
                         memory of a rank.
    replicas:            data-parallel ranks.
    microbatches:        per step and replica.
    micro_batch_size:    samples of a micro-batch.
    sequence_length:     tokens of a sample; None: unknown, or no token sequences.
    dtype:               see ``Plan``.
    fp8:                 how linear layers compute in fp8; None: they do not.
    loss_chunk:          see ``Plan``.
    fp32_residual:       see ``Plan``.
    state_bytes:         see ``Plan``.
    graph_sharding:      how the graph of the model is cut into units.
    rules:               how its weights are sharded, see ``TensorRules.parse``.
    vocabulary_multiple: a captured vocabulary is padded to a multiple of this x tp.
    couples_samples:     what of the model is of whole micro-batches, which so have no halves; empty:
                         nothing that is known.
    schedule:            ops to run unchanged, instead of the schedule that ``parallel`` names.
    """

    parallel: ParallelConfig = ParallelConfig()
    replicas: int = 1
    microbatches: int = 1
    micro_batch_size: int = 1
    sequence_length: int | None = None
    dtype: str = "float32"
    fp8: Fp8 | None = None
    loss_chunk: int = 0
    fp32_residual: bool = False
    state_bytes: float = 8.0
    graph_sharding: str = ""
    rules: str = ""
    vocabulary_multiple: int = 1
    couples_samples: str = ""
    schedule: Schedule | None = None

    @property
    def whole(self) -> str:
        """What is of whole micro-batches, so that they are not computed in halves; empty: nothing."""
        return self.couples_samples or ("scales of fp8" if self.fp8 is not None else "")

    @property
    def grid(self) -> Grid:
        parallel = self.parallel
        return Grid(
            tp=parallel.tensor_model_parallel_size,
            cp=parallel.context_parallel_size,
            dp=self.replicas,
            pp=parallel.pipeline_model_parallel_size,
            order=parallel.order,
        )

    @property
    def recompute(self) -> Recompute:
        parallel = self.parallel
        return Recompute.of(
            parallel.recompute_granularity, parallel.recompute_method, parallel.recompute_num_layers
        )

    @property
    def offload(self) -> Offload:
        layers = self.parallel.cpu_offloading_num_layers
        return Offload(layers, automatic=self.parallel.cpu_offloading and not layers)

    @property
    def bucket_size(self) -> int:
        """Gradient elements that are reduced at a time."""
        return self.parallel.ddp_bucket_size or default_bucket_size(self.replicas)


def default_bucket_size(data_parallel_size: int) -> int:
    """Return Megatron-LM's bucket size in elements, which grows with the ranks to hide the latency
    of a ring.
    """
    return max(40_000_000, 1_000_000 * data_parallel_size)


def request_of(config: RunConfig, world_size: int) -> Request:
    """Return what the flags of any model ask of a plan for ``world_size`` ranks."""
    return Request(
        parallel=config.parallel,
        replicas=config.data_parallel_size(world_size),
        microbatches=config.num_microbatches(world_size),
        micro_batch_size=config.train.micro_batch_size,
        sequence_length=config.model.seq_length,
        dtype=config.train.dtype,
        fp8=config.train.fp8,
        loss_chunk=config.model.cross_entropy_chunk_size,
        state_bytes=config.optimizer.state_bytes,
        couples_samples=config.couples_samples,
    )
