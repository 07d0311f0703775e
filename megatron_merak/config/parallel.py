"""How the work of a run is spread over ranks."""

import dataclasses

from .rank_order import PIPELINE_INSIDE, normal
from .settings import Section, setting

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "shifted", "early-recompute", "zb-h1", "zb-v", "auto")
BACKENDS = ("auto", "gloo", "nccl", "emu", "merak_shm", "merak_peer", "gloo_cuda", "mpi")
OF_GPUS = ("nccl", "merak_peer", "gloo_cuda")  # backends that carry tensors of GPUs
OVERLAPS = ("none", "weight-gradient", "sub-pipeline", "pair", "auto")
STRATEGIES = ("allreduce", "ps-sync", "ps-async")  # how data-parallel replicas come to the same weights
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # each one shards what those before it do


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How the work is spread over ranks; what tensor and pipeline degrees leave over is data parallel."""

    tensor_model_parallel_size: int = setting(1, least=1)
    """Ranks that share every layer."""
    pipeline_model_parallel_size: int = setting(1, least=1)
    """Pipeline stages; the layers are cut between them by cost."""
    rank_order: str | None = setting(None, ours=True)
    """Which axis of parallelism ranks run over first, joined by dashes: tp-dp-pp (Megatron-LM's tp-cp-ep-dp-pp) puts
    replicas beside each other and pipelines across nodes, tp-pp-dp pipelines inside and replicas across (unset:
    tp-dp-pp)."""
    use_tp_pp_dp_mapping: bool = setting(False)
    """The same as --rank-order tp-pp-dp."""
    plan: str | None = setting(None, ours=True)
    """Run this plan, a JSON file that tools/plan.py wrote and that may be edited; flags that it decides can be left
    out (unset: a plan is made from the flags)."""
    pipeline_schedule: str | None = setting(None, choices=SCHEDULES, ours=True)
    """Order of forwards, backwards, recomputations and weight gradients over the pipeline; auto searches for one
    (unset: 1f1b, or what --schedule-file holds)."""
    schedule_file: str | None = setting(None, ours=True)
    """File with a schedule written by hand, as text or as CSV of torch.distributed.pipelining, instead of
    --pipeline-schedule: a rank per line, in the order of its ops; see docs/schedule_files.md."""
    num_virtual_stages_per_pipeline_rank: int | None = setting(None, least=1)
    """Stages that each pipeline rank holds (unset: 2 where the schedule is interleaved or zb-v, else 1)."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(None, least=1)
    """Micro-batches that a stage runs before its rank turns to its next stage (unset: the pipeline-parallel size)."""
    sequence_parallel: bool = setting(False)
    """Divide what tensor parallelism leaves whole (norms, dropout, residuals) over its ranks along the sequence."""
    tp_comm_overlap: str = setting("weight-gradient", choices=OVERLAPS, bare="auto", megatron=False)
    """What runs while tensor-parallel collectives are under way: nothing, weight gradients, the other half of the
    micro-batch, or another micro-batch; auto lets the cost model choose."""
    distributed_backend: str = setting("auto", choices=BACKENDS, megatron="nccl")
    """Collective library; auto is nccl on GPUs and merak_shm on CPUs; merak_shm is gloo, and shared memory for tensor
    and data parallelism within a host; merak_peer is nccl, and within a host our own kernels for sums of up to 8 MiB
    and the copy engine between stages; gloo_cuda lets ranks share GPUs, to debug; emu moves data by gloo and models
    the time; mpi is torch's, where torch was built with it, for fp32 on CPUs."""
    emulate: str | None = setting(None, ours=True)
    """The cluster that --distributed-backend emu models: a name, or a JSON file."""
    distributed_timeout_minutes: int = setting(10, least=1)
    """Minutes after which a collective that does not finish is an error."""
    no_overlap_grad_reduce: bool = setting(False, megatron=True, ours=True)
    """Reduce gradients after the backward pass instead of during it (sharded gradients always during it)."""
    ddp_bucket_size: int | None = setting(None, least=1)
    """Gradient elements reduced in one collective (unset: max(40e6, 1e6 x data-parallel size)); of no effect where
    gradients are sharded, one unit of the model at a time."""
    grad_reduce_in_bf16: bool = setting(False)
    """Send gradients between data-parallel ranks in bf16, half the bytes; they are added up in fp32 on every rank."""
    use_distributed_optimizer: bool = setting(False)
    """Shard optimizer state over data-parallel ranks (ZeRO stage 1): each one updates its shard of every bucket of
    parameters, and gathers the others' shards; the same as --data-parallel-sharding-strategy optim."""
    data_parallel_sharding_strategy: str | None = setting(None, choices=SHARDINGS)
    """What data-parallel ranks share instead of holding all of it: nothing, optimizer state (ZeRO stage 1), gradients
    too (stage 2: reduce-scattered in every micro-batch), or weights too (stage 3, FSDP: all-gathered before every
    forward and backward) (unset: no_shard, or optim with --use-distributed-optimizer)."""
    num_distributed_optimizer_instances: int = setting(1, least=1)
    """Groups of neighbouring data-parallel ranks that shard among themselves, each with a copy of all that the sharding
    strategy shards; gradients are reduce-scattered inside a group, then all-reduced across (1: all ranks share)."""
    no_overlap_param_gather: bool = setting(False, ours=True)
    """Gather updated parameters at the end of the step instead of during the next forward (weights that stay sharded
    are gathered unit by unit in any case)."""
    data_parallel_strategy: str = setting("allreduce", choices=STRATEGIES, ours=True)
    """How data-parallel replicas come to the same weights: they sum their gradients by collectives (allreduce), or send
    them to parameter servers, which wait for all of them (ps-sync) or for none (ps-async); see
    docs/parameter_server.md."""
    num_parameter_servers: int = setting(0, least=0, ours=True)
    """Ranks that only serve parameters, the last ones of the job; 0: every rank of a worker serves a part as well."""
    ps_max_staleness: int | None = setting(None, least=0, ours=True)
    """Drop a gradient of ps-async when more than so many others were applied since its weights were read (unset: 4 x
    the number of workers)."""
    ps_snapshot_interval: int | None = setting(None, least=1, ours=True)
    """Updates between two snapshots of a parameter server, below --save, from which a server that was started again
    goes on (unset: 100)."""
    recompute_granularity: str | None = setting(None, choices=("full", "selective"))
    """Recompute in the backward pass instead of keeping: the activations of whole layers (full), or what enters the
    second matrix of feed-forward parts (selective), which costs hardly any time; attention keeps no scores in any case
    but dropout on a CPU (unset: keep all)."""
    recompute_method: str | None = setting(None, choices=("uniform", "block", "stage-aware", "capacity"))
    """Which layers: all, in runs of --recompute-num-layers of which only the input is kept (uniform); the first
    --recompute-num-layers of each stage (block); Merak's ratio rule (stage-aware); as few as fit into
    --device-memory-gb, with stages balanced anew (capacity) (unset: all, one by one)."""
    recompute_num_layers: int | None = setting(None, least=1)
    """Layers in a run, or per stage; see --recompute-method."""
    device_memory_gb: float | None = setting(None, above=0, ours=True)
    """Memory that a rank may use, in GiB; stages are cut so that each fits (unset: the device's, where it is known)."""
    device_profile: str | None = setting(None, ours=True)
    """Plan with the rates that benchmarks/calibrate.py measured on this device and wrote into this JSON file."""

    @property
    def ranks_of_replica(self) -> int:
        """Ranks that hold the model once."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def served(self) -> bool:
        """Whether parameter servers keep the optimizer's state."""
        return self.data_parallel_strategy != "allreduce"

    @property
    def order(self) -> str:
        """The rank order in effect, with all of its axes; of a given one that is sound."""
        return PIPELINE_INSIDE if self.use_tp_pp_dp_mapping else normal(self.rank_order)

    @property
    def sharding(self) -> str:
        """The sharding strategy in effect."""
        alone = "optim" if self.use_distributed_optimizer else "no_shard"
        return self.data_parallel_sharding_strategy or alone

    @property
    def recomputes_activations(self) -> bool:
        """Those of feed-forward parts alone."""
        return self.recompute_granularity == "selective"
