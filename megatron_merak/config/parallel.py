"""The settings that distribute a run over ranks."""

import dataclasses

from .backends import BACKENDS
from .rank_order import PIPELINE_INSIDE, normal
from .settings import InPlan, Needs, Section, setting

SCHEDULES = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "shifted",
    "early-recompute",
    "zb-h1",
    "zb-v",
    "auto",
)
UNFLUSHED = ("pipedream", "pipedream-2bw")  # schedules that update weights on their way
# What ranks that divide sequences exchange for attention: heads, or keys and values, of all at once
# or passed on from rank to rank; or heads among neighbours, whose keys and values are passed on.
A2A = "a2a"
A2A_P2P = "a2a+p2p"
ALL_GATHER = "all_gather"
P2P = "p2p"
CP_COMM_TYPES = (A2A, A2A_P2P, ALL_GATHER, P2P)
RINGS = (A2A_P2P, P2P)
OVERLAPS = ("none", "weight-gradient", "sub-pipeline", "pair", "auto")
STRATEGIES = ("allreduce", "ps-sync", "ps-async")  # how data-parallel replicas combine gradients
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # cumulative, in this order
_EMULATED = Needs(
    "distributed_backend", ("emu",), reason="has no effect with --distributed-backend {found}"
)
_SERVED = Needs(
    "data_parallel_strategy",
    ("ps-sync", "ps-async"),
    remedy="Add --data-parallel-strategy, or leave it out",
)
_GRAPHS = Needs("cuda_graph_impl", ("local",))
_RECOMPUTED = Needs(
    "recompute_granularity",
    ("full", "selective"),  # the latter with capacity alone
    reason="has no effect without --recompute-granularity full",
    remedy="Add --recompute-granularity full, or leave it out",
)
_TWO_VERSIONS = Needs("pipeline_schedule", ("pipedream-2bw",))
_COUNTED = Needs(
    "recompute_method",
    ("uniform", "block"),
    reason="has an effect only with --recompute-method uniform or block",
    remedy="Choose one of them, or leave it out",
)
# of the GPT of flags: why, and what to do
COMPILES_NOTHING = (
    "each part of the GPT of merak-pretrain is an operation with a kernel of its own",
    "Leave it out",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Distribution over ranks. The data-parallel degree is the number of ranks divided by the
    tensor, context and pipeline degrees.
    """

    tensor_model_parallel_size: int = setting(1, least=1, plan=InPlan("grid.tp"))
    """Tensor-parallel degree: number of ranks over which every layer is sharded."""
    context_parallel_size: int = setting(1, least=1, plan=InPlan("grid.cp"))
    """Context-parallel degree: number of ranks that share each sequence. Every
    rank computes its part of the positions, and its heads where positions meet
    (see --cp-comm-type).
    """
    cp_comm_type: str | None = setting(
        None,
        choices=CP_COMM_TYPES,
        plan=InPlan("cp_comm_type", taken=True),
    )
    """What context-parallel ranks exchange for attention: heads, of which each then has its own of
    all positions (a2a), or keys and values of all positions, for its own queries: gathered
    (all_gather), or passed from rank to rank, while a part of attention is computed with each (p2p).
    a2a+p2p: neighbours exchange heads, and keys and values of these are passed on between groups of
    neighbours (unset: a2a, or all_gather where they do not divide the heads)."""
    hierarchical_context_parallel_sizes: tuple[str, ...] = setting(
        (), plan=InPlan("cp_sizes"), needs=Needs("cp_comm_type", (A2A_P2P,))
    )
    """For --cp-comm-type a2a+p2p: the number of neighbours that exchange heads, and the number of
    groups of these, whose product is --context-parallel-size."""
    pipeline_model_parallel_size: int = setting(1, least=1, plan=InPlan("grid.pp"))
    """Pipeline-parallel degree: number of pipeline ranks; the layers are cut into stages
    by cost.
    """
    rank_order: str | None = setting(None, ours=True, plan=InPlan("grid.order"))
    """Order in which ranks are assigned to the axes of parallelism, fastest-varying first, joined
    by dashes. tp-dp-pp (Megatron-LM's tp-cp-ep-dp-pp) places replicas on adjacent ranks and
    pipelines across nodes; tp-pp-dp places pipelines inside nodes and replicas across them (unset:
    tp-dp-pp)."""
    use_tp_pp_dp_mapping: bool = setting(False)
    """The same as --rank-order tp-pp-dp."""
    plan: str | None = setting(None, ours=True)
    """Run the plan in this JSON file, which tools/plan.py writes and which may be edited; flags
    that the plan decides may be left out (unset: make a plan from the flags)."""
    parallel: str | None = setting(None, ours=True, makes_plan=True)
    """auto: search the degrees, micro-batch size, schedule, recomputation, overlap and sharding with
    which a step of --global-batch-size takes least time on the ranks of the job; auto,tp=2,pp=4
    pins some, as --fix of merak-plan search does, which shows the choice before (unset: as the
    flags say)."""
    parallel_verify: int | None = setting(None, least=2, ours=True, needs=Needs("parallel"))
    """Run so many of the plans that the search expects to be fastest for some steps on the ranks of
    the job, and train with the one that was fastest, from the beginning; one that fails, as where
    memory ends, is passed over (unset: train with the first, untried)."""
    pipeline_schedule: str | None = setting(
        None, choices=(*SCHEDULES, *UNFLUSHED), ours=True, makes_plan=True
    )
    """Pipeline schedule: the order of forwards, backwards, recomputations and weight gradients.
    auto: the fastest by the model of all of these and of searched ones, within the memory of a rank
    (see --device-memory-gb) or, where that is not known, what 1f1b needs. pipedream and
    pipedream-2bw update weights while micro-batches are in flight, with stale gradients; auto never
    chooses them (unset: 1f1b, or that of --schedule-file)."""
    pipeline_update_interval: int | None = setting(
        None, least=1, ours=True, makes_plan=True, needs=_TWO_VERSIONS
    )
    """Micro-batches of each of the updates that a step has with --pipeline-schedule pipedream-2bw:
    at least the pipeline-parallel size (unset: the pipeline-parallel size)."""
    schedule_file: str | None = setting(None, ours=True, makes_plan=True)
    """File with a pipeline schedule, instead of --pipeline-schedule: text, or CSV of
    torch.distributed.pipelining, with one line of ops per rank; see docs/schedule_files.md."""
    num_virtual_stages_per_pipeline_rank: int | None = setting(None, least=1, makes_plan=True)
    """Stages per pipeline rank (unset: 2 if the schedule is interleaved or zb-v, the fastest of 1
    to 3 if it is auto, else 1)."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None, least=1, makes_plan=True
    )
    """Micro-batches that a rank runs on one of its stages before the next stage (unset: the
    pipeline-parallel size).
    """
    sequence_parallel: bool = setting(False, plan=InPlan("sequence_parallel"))
    """Shard norms, dropout and residuals along the sequence over the tensor-parallel ranks, which
    otherwise replicate them."""
    expert_model_parallel_size: int = setting(
        1, least=1, plan=InPlan("expert_parallel", taken=True)
    )
    """Expert-parallel degree: number of ranks that divide the experts of each layer, and exchange
    the rows of tokens: the tensor-parallel ranks, which then need --sequence-parallel, of one or
    more replicas or contexts."""
    expert_tensor_parallel_size: int | None = setting(
        None, least=1, plan=InPlan("expert_tensor_parallel")
    )
    """Number of ranks over which each expert is sharded, beside those that divide experts (unset: 1
    with --expert-model-parallel-size, else the tensor-parallel size)."""
    moe_expert_rank_capacity_factor: float | None = setting(
        None, least=1, plan=InPlan("expert_room", taken=True)
    )
    """Let ranks that divide experts exchange equal numbers of rows, of which the host reads none:
    so many times those that each would get of each other one if all got as many, with zeros behind
    those that there are. A rank with more ends the run (unset: as many rows as there are)."""
    tp_comm_overlap: str = setting(
        "weight-gradient", choices=OVERLAPS, bare="auto", megatron=False, plan=InPlan("overlap")
    )
    """What overlaps tensor-parallel collectives: nothing, weight gradients, the other half of the
    micro-batch, or another micro-batch; with auto, or no value, the cost model chooses."""
    distributed_backend: str = setting("auto", choices=("auto", *BACKENDS), megatron="nccl")
    """Communication backend. auto: nccl on GPUs, merak_shm on CPUs. merak_shm: gloo, with shared
    memory for tensor and data parallelism within a host. merak_peer: nccl, with our own kernels for
    reductions of up to 8 MiB and the copy engine between stages within a host. gloo_cuda: lets
    ranks share GPUs, for debugging. emu: gloo with modelled times. mpi: on CPUs, the MPI that
    mpirun is of, through mpi4py."""
    emulate: str | None = setting(None, ours=True, needs=_EMULATED)
    """Cluster that --distributed-backend emu models: a name, or a JSON file."""
    distributed_timeout_minutes: int = setting(10, least=1)
    """Minutes after which an unfinished collective is an error. A training step may stand still for
    as long (with the
    default: 10 minutes in the first one, then ten times the longest one, at least 1)."""
    preflight: bool = setting(False, ours=True)
    """Before the model is built let every rank exchange messages with the others, as
    merak-preflight does, and end the job if a host or a link is slow, or the directory of --save
    is not the same on all hosts."""
    no_overlap_grad_reduce: bool = setting(
        False, megatron=True, ours=True, plan=InPlan("overlap_grad_reduce", on=False, taken=True)
    )
    """Reduce gradients after the backward pass instead of during it; sharded gradients are always
    reduced during it.
    """
    ddp_bucket_size: int | None = setting(None, least=1, plan=InPlan("bucket_size"))
    """Gradient elements reduced in one collective (unset: max(40e6, 1e6 x data-parallel size)); no
    effect if gradients are sharded, which are reduced one unit of the model at a time."""
    grad_reduce_in_bf16: bool = setting(False, plan=InPlan("grad_reduce_in_bf16", taken=True))
    """Send gradients between data-parallel ranks in bf16, which halves the bytes; every rank
    accumulates them in fp32."""
    use_distributed_optimizer: bool = setting(False)
    """Shard optimizer state over data-parallel ranks (ZeRO stage 1): each rank updates its shard of
    every parameter bucket, then shards are all-gathered. Same as --data-parallel-sharding-strategy
    optim."""
    data_parallel_sharding_strategy: str | None = setting(
        None, choices=SHARDINGS, plan=InPlan("sharding")
    )
    """What is sharded over data-parallel ranks: nothing; optimizer state (ZeRO stage 1); also
    gradients (stage 2, reduce-scattered in every micro-batch); or also weights (stage 3, FSDP,
    all-gathered before every forward and backward) (unset: no_shard, optim with
    --use-distributed-optimizer, or optim_grads_params with --offload-model-states)."""
    num_distributed_optimizer_instances: int = setting(
        1, least=1, plan=InPlan("sharding_instances", taken=True)
    )
    """Number of groups of adjacent data-parallel ranks, each with a full copy of the sharded state;
    gradients are reduce-scattered within a group, then all-reduced across groups (1: shard over all
    ranks)."""
    no_overlap_param_gather: bool = setting(
        False, ours=True, plan=InPlan("overlap_param_gather", on=False, taken=True)
    )
    """All-gather updated parameters at the end of the step instead of during the next forward;
    sharded weights are always gathered unit by unit."""
    data_parallel_strategy: str = setting("allreduce", choices=STRATEGIES, ours=True)
    """How data-parallel replicas combine gradients: by collectives (allreduce), or on parameter
    servers that wait for all replicas (ps-sync) or for none (ps-async); see
    docs/parameter_server.md."""
    num_parameter_servers: int = setting(0, least=0, ours=True, needs=_SERVED)
    """Dedicated parameter-server ranks, the last ranks of the job; 0: every rank of a worker also
    serves a part.
    """
    ps_max_staleness: int | None = setting(None, least=0, ours=True, needs=_SERVED)
    """Drop a gradient of ps-async if more than this many others were applied since its weights were
    read (unset: 4 x the number of workers)."""
    ps_snapshot_interval: int | None = setting(None, least=1, ours=True, needs=_SERVED)
    """Updates between snapshots of a parameter server, written below --save; a restarted server
    resumes from its snapshot (unset: 100)."""
    recompute_granularity: str | None = setting(
        None, choices=("full", "selective"), makes_plan=True
    )
    """What the backward recomputes instead of storing: the activations of entire layers (full), or
    the input of the second matrix of feed-forward layers (selective), which costs hardly any time.
    Attention stores no scores, except for dropout on a CPU (unset: recompute nothing)."""
    recompute_method: str | None = setting(
        None,
        choices=("uniform", "block", "stage-aware", "capacity"),
        makes_plan=True,
        needs=_RECOMPUTED,
    )
    """Which layers are recomputed: all, in runs of --recompute-num-layers of which only the input
    is stored (uniform); the first --recompute-num-layers of each stage (block); by Merak's ratio
    rule (stage-aware); as few as fit into --device-memory-gb, with rebalanced stages (capacity)
    (unset: all, one by one). With --recompute-granularity selective only capacity, which then
    recomputes the layers that do not fit by that alone."""
    recompute_num_layers: int | None = setting(None, least=1, makes_plan=True, needs=_COUNTED)
    """Layers per run, or per stage; see --recompute-method."""
    compile_pointwise: bool = setting(
        False, ours=True, plan=InPlan("compile_pointwise", taken=True)
    )
    """Compile the pointwise operations of a captured model that no other fusion takes, such as soft
    caps and masks of scores, by torch.compile: one function for each group, of which the backward
    keeps the inputs alone. Needs a C++ compiler, on GPUs Triton."""
    cpu_offloading: bool = setting(False, ours=True, makes_plan=True)
    """Offload activations to host memory where they do not fit into --device-memory-gb, as many as
    the cost model finds cheaper than to recompute them; with --cpu-offloading-num-layers, those of
    so many layers."""
    cpu_offloading_num_layers: int = setting(0, least=0, makes_plan=True)
    """Number of layers, the first ones of each pipeline stage, whose activations are copied to host
    memory after their forward, and back before their backward."""
    cuda_graph_impl: str = setting(
        "none",
        choices=("none", "local"),
        not_yet={"transformer_engine": "Use local"},
    )
    """Record the kernels of one step in CUDA graphs and replay them in all later ones (local): the
    host then launches a graph for each op of the schedule. On a CPU recorded calls are repeated, as
    a trial. For ranks that do not divide layers, and models without dropout."""
    cuda_graph_warmup_steps: int = setting(3, least=1, needs=_GRAPHS)
    """Steps that run without graphs before one is recorded."""
    offload_model_states: bool = setting(
        False, ours=True, plan=InPlan("offload_model_states", taken=True)
    )
    """Keep weights, gradients and optimizer state in host memory, as shards of
    --data-parallel-sharding-strategy optim_grads_params, also of a single replica: the weights of a
    unit of the model are copied to the device before they are used, one unit ahead, its gradients
    to the host, where the optimizer runs."""
    device_memory_gb: float | None = setting(None, above=0, ours=True, makes_plan=True)
    """Memory that a rank may use, in GiB; stages are cut so that each fits (unset: what the
    device has, if known, without --memory-reserve-gb)."""
    memory_reserve_gb: float | None = setting(None, least=0, ours=True, makes_plan=True)
    """Memory of a device, in GiB, that plans leave for what they do not count: the driver's context,
    buffers of NCCL and cuBLAS, gaps of the allocator (unset: 4 or, if that is less, a quarter)."""
    device_profile: str | None = setting(None, ours=True, makes_plan=True)
    """JSON file of merak-probe with rates measured on this device, to plan with."""

    @property
    def graph_warm_up(self) -> int | None:
        """Steps before one is recorded in CUDA graphs; None: none is."""
        return None if self.cuda_graph_impl == "none" else self.cuda_graph_warmup_steps

    @property
    def layer_ranks(self) -> int:
        """Number of ranks that compute each layer together."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def exchanges_in_layers(self) -> bool:
        """Whether ranks send each other parts of a layer's activations."""
        return self.layer_ranks > 1 or self.expert_ranks > 1

    @property
    def cp_inner(self) -> int:
        """Number of neighbours among context-parallel ranks that exchange heads beside a ring; 1: none
        do. Given sizes must be valid.
        """
        sizes = self.hierarchical_context_parallel_sizes
        divided = self.context_parallel_size > 1 and self.cp_comm_type == A2A_P2P
        return int(sizes[0]) if sizes and divided else 1

    @property
    def ranks_of_replica(self) -> int:
        """Number of ranks of one replica of the model."""
        return self.layer_ranks * self.pipeline_model_parallel_size

    @property
    def expert_shards(self) -> int:
        """Number of ranks that shard each of the experts that ranks divide."""
        shards = self.expert_tensor_parallel_size
        whole = self.expert_model_parallel_size == 1
        if shards is None or whole and shards == self.tensor_model_parallel_size:
            return 1
        return shards

    @property
    def expert_tensor_parallel(self) -> int | None:
        """What plans say of ``expert_shards``; None where no ranks divide experts."""
        return None if self.expert_ranks == 1 else self.expert_shards

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that have all experts of a layer together, where any divide them."""
        return self.expert_model_parallel_size * self.expert_shards

    @property
    def expert_group(self) -> int:
        """Number of ranks that exchange rows, other than the tensor-parallel ones; 1: none do."""
        own = self.expert_shards == 1 and self.expert_ranks <= self.tensor_model_parallel_size
        return 1 if own else self.expert_ranks

    @property
    def served(self) -> bool:
        """Whether parameter servers keep the optimizer's state."""
        return self.data_parallel_strategy != "allreduce"

    @property
    def order(self) -> str:
        """The effective rank order, with all axes; a given order must be valid."""
        if self.use_tp_pp_dp_mapping:
            return PIPELINE_INSIDE
        return normal(self.rank_order, self.context_parallel_size)

    @property
    def sharding(self) -> str:
        """The effective sharding strategy."""
        alone = "optim" if self.use_distributed_optimizer else "no_shard"
        unset = SHARDINGS[-1] if self.offload_model_states else alone
        return self.data_parallel_sharding_strategy or unset

    @property
    def recomputes_activations(self) -> bool:
        """Whether only the activations of feed-forward layers are recomputed."""
        return self.recompute_granularity == "selective"
