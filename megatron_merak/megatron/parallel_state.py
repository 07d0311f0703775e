"""Megatron-LM's ``parallel_state``: which groups of ranks this process is in, and its place there.

``initialize_model_parallel`` makes the groups, or ``initialize_from_mesh`` those of a MerakTrainer
or an Engine; every rank calls one of them, once, after torch.distributed is initialised. Ranks are
numbered as Megatron-LM numbers them (Shoeybi et al., "Megatron-LM", 2019; Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021).
"""

from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigError, LaunchError
from ..parallel.mesh import Mesh
from .groups import (
    EMBEDDING,
    POSITIONS,
    Grids,
    Groups,
    Members,
    Membership,
    first,
    first_and_last,
    grids,
    make_groups,
)
from .process import PROCESS

_ORDER = "tp-cp-ep-dp-pp"
_AXES = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
_SETTERS = {f"set_{axis}_parallel_{what}" for axis in _AXES for what in ("rank", "world_size")}
# Of Megatron-LM's names: why they are not here.
_WITHOUT = dict.fromkeys(
    (*_SETTERS, "set_data_parallel_rank", "set_virtual_pipeline_model_parallel_world_size"),
    "ranks and sizes are those of the groups: initialize_model_parallel makes these",
)
_WITHOUT |= dict.fromkeys(
    (
        "get_global_memory_buffer",
        "destroy_global_memory_buffer",
        "get_global_symmetric_memory_buffer",
        "destroy_global_symmetric_memory_buffer",
    ),
    "collectives allocate what they return",
)
_WITHOUT |= dict.fromkeys(
    (
        "get_intra_distributed_optimizer_instance_group",
        "get_inter_distributed_optimizer_instance_group",
        "get_hierarchical_context_parallel_groups",
        "get_hybrid_data_context_parallel_groups",
    ),
    "data- and context-parallel ranks have one group each",
)


def __getattr__(name: str) -> object:
    """Refuse, by name, what Megatron-LM's module has and this one has not."""
    if name in _WITHOUT:
        raise ConfigError("parallel_state", name, _WITHOUT[name], "Leave it out")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = _ORDER,
    get_embedding_ranks: Members | None = None,
    get_position_embedding_ranks: Members | None = None,
    create_gloo_process_groups: bool = True,
    **others: object,
) -> None:
    """Make the groups of every rank of the job. Collective.

    tensor_model_parallel_size:           ranks over which a layer is sharded.
    pipeline_model_parallel_size:         ranks over which layers are divided.
    virtual_pipeline_model_parallel_size: stages of each of these; None: one.
    context_parallel_size:                ranks over which a sequence is divided.
    expert_model_parallel_size:           ranks over which experts are divided, of those that are
                                          data- and context-parallel elsewhere.
    expert_tensor_parallel_size:          ranks over which an expert is sharded; None: as a layer.
    distributed_timeout_minutes:          of a collective of these groups.
    order:                                of ranks over the axes, the first varying fastest.
    get_embedding_ranks:                  of the ranks of a pipeline, those with the embedding;
                                          None: the first and the last.
    get_position_embedding_ranks:         likewise, of positions; None: the first.
    create_gloo_process_groups:           whether data-parallel ranks have groups for CPU tensors.

    Raises LaunchError where the job's ranks do not divide, and ConfigError for Megatron-LM's other
    arguments unless they have their defaults.
    """
    _check_others(others)
    if not dist.is_initialized():
        reason = "torch.distributed is not initialised"
        remedy = "Call torch.distributed.init_process_group first"
        raise LaunchError("initialize_model_parallel", "(called)", reason, remedy)
    numbered = grids(
        dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
    )
    _enter(
        numbered,
        timedelta(minutes=distributed_timeout_minutes),
        virtual_pipeline_model_parallel_size,
        get_embedding_ranks or first_and_last,
        get_position_embedding_ranks or first,
        host=create_gloo_process_groups,
    )


def initialize_from_mesh(
    mesh: Mesh, virtual_pipeline_model_parallel_size: int | None = None
) -> None:
    """Make the groups that Megatron-LM's functions name, for the ranks of a mesh, such as
    ``trainer.mesh``. Collective.

    virtual_pipeline_model_parallel_size: stages of each pipeline rank; None: one.
    """
    grid = mesh.grid
    numbered = grids(grid.size, tp=grid.tp, pp=grid.pp, cp=grid.cp, order=grid.order)
    if mesh.experts is not None:
        numbered = grids(
            grid.size,
            tp=grid.tp,
            pp=grid.pp,
            cp=grid.cp,
            ep=mesh.experts.ranks // mesh.experts.shards,
            etp=mesh.experts.shards,
            order=grid.order.replace("dp", "ep-dp"),
        )
    _enter(
        numbered,
        mesh.timeout,
        virtual_pipeline_model_parallel_size,
        first_and_last,
        first,
        host=True,
    )


def _enter(
    numbered: Grids,
    timeout: timedelta | None,
    virtual_stages: int | None,
    embedding: Members,
    positions: Members,
    host: bool,
) -> None:
    if PROCESS.groups is not None:
        reason = "the groups of this process are initialised"
        raise LaunchError(
            "parallel_state", "(in use)", reason, "Call destroy_model_parallel before"
        )
    if virtual_stages is not None and numbered.dense.pp < 2:
        raise ConfigError(
            "virtual_pipeline_model_parallel_size",
            virtual_stages,
            "there is one pipeline rank",
            "Leave it out, or use more pipeline ranks",
        )
    groups = make_groups(
        numbered,
        dist.get_rank(),
        timeout,
        embedding=embedding,
        positions=positions,
        host=host,
    )
    PROCESS.enter(groups, virtual_stages)


def _check_others(others: dict[str, object]) -> None:
    """Raise ConfigError for arguments that ask for what is not here."""
    defaults = {
        "pipeline_model_parallel_comm_backend": None,
        "use_sharp": False,
        "hierarchical_context_parallel_sizes": None,
        "hybrid_context_parallel": False,
        "num_distributed_optimizer_instances": 1,
        "nccl_communicator_config_path": None,
        "high_priority_stream_groups": None,
        "sharp_enabled_group": None,
        "create_all_gather_group": False,
    }
    for name, value in others.items():
        if name not in defaults:
            raise TypeError(f"initialize_model_parallel() has no argument {name!r}")
        if value != defaults[name]:
            raise ConfigError(name, value, "groups have no such setting here", "Leave it out")


def destroy_model_parallel() -> None:
    """Forget the groups of this process; they end with the job's own group."""
    PROCESS.leave()


def is_initialized() -> bool:
    """Whether this process has its groups."""
    return PROCESS.groups is not None


def model_parallel_is_initialized() -> bool:
    """Whether this process has its groups."""
    return is_initialized()


def is_unitialized() -> bool:
    """Whether this process has no groups yet; spelled as in Megatron-LM."""
    return not is_initialized()


def _groups() -> Groups:
    if PROCESS.groups is None:
        reason = "the groups of this process are not initialised"
        remedy = "Call initialize_model_parallel on every rank first"
        raise LaunchError("parallel_state", "(not initialised)", reason, remedy)
    return PROCESS.groups


def _own(name: str) -> Membership:
    named = _groups().named
    if name not in named:
        reason = "this rank is not in it"
        raise LaunchError("group", name, reason, "Ask for it on its own ranks only")
    return named[name]


def _group(name: str, check_initialized: bool = True) -> dist.ProcessGroup | None:
    if not check_initialized and (PROCESS.groups is None or name not in PROCESS.groups.named):
        return None
    return _own(name).group


def _size(name: str) -> int:
    return len(_own(name).ranks)


def _rank(name: str) -> int:
    return _own(name).ranks.index(dist.get_rank())


def _size_or_zero(name: str) -> int:
    """The size of a group; 0 without torch.distributed, as Megatron-LM has it."""
    return _size(name) if dist.is_initialized() else 0


def _rank_or_zero(name: str) -> int:
    return _rank(name) if dist.is_initialized() else 0


def _data(with_context_parallel: bool, partial: bool = False) -> str:
    if partial:
        reason = "there is one instance of the distributed optimizer"
        raise ConfigError("partial_data_parallel", partial, reason, "Leave it out")
    return "dp-cp" if with_context_parallel else "dp"


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group of the ranks that have a replica's weights together."""
    return _group("mp", check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group over which layers are sharded."""
    return _group("tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group of the stages of a pipeline."""
    return _group("pp", check_initialized)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> dist.ProcessGroup | None:
    """The group of the ranks that have the same weights and other samples; with context parallelism
    also those that have other parts of the same ones.
    """
    if independent_all_gather:
        reason = "data-parallel ranks have one group"
        raise ConfigError("independent_all_gather", True, reason, "Leave it out")
    return _group(_data(with_context_parallel, partial_data_parallel))


def has_separate_all_gather_group() -> bool:
    """Whether parameters are gathered over a group of their own: never."""
    return False


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> dist.ProcessGroup:
    """``get_data_parallel_group`` for CPU tensors."""
    return _on_host(_data(with_context_parallel, partial_data_parallel))


def _on_host(name: str) -> dist.ProcessGroup:
    host = _groups().host
    if name not in host:
        reason = "create_gloo_process_groups was False"
        raise LaunchError("group for CPU tensors", name, reason, "Leave that out")
    return host[name].group


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group over which sequences are divided."""
    return _group("cp", check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """The ranks of the job over which sequences are divided."""
    return None if _group("cp", check_initialized) is None else list(_own("cp").ranks)


def get_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group of the ranks of a pipeline that have the embedding."""
    return _group(EMBEDDING, check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group of the ranks of a pipeline that have the embedding of positions."""
    return _group(POSITIONS, check_initialized)


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> dist.ProcessGroup | None:
    """The group over which fp8 scales are reduced."""
    if tp_only_amax_red:
        return _group("tp-cp" if with_context_parallel else "tp")
    return _group("tp-dp-cp" if with_context_parallel else "tp-dp")


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> dist.ProcessGroup | None:
    """The group of tensor- and data-parallel ranks."""
    return _group("tp-dp-cp" if with_context_parallel else "tp-dp", check_initialized)


def get_tensor_and_context_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup | None:
    """The group of tensor- and context-parallel ranks."""
    return _group("tp-cp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    """Number of ranks over which layers are sharded."""
    return _size("tp")


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline ranks."""
    return _size("pp")


def get_tensor_model_parallel_rank() -> int:
    """Index of this rank among those over which layers are sharded."""
    return _rank("tp")


def get_pipeline_model_parallel_rank() -> int:
    """Index of this rank's stage."""
    return _rank("pp")


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the first stage: of the pipeline ranks, or of all virtual stages.

    vp_stage: index of the virtual stage that is asked for, where they are not ignored.
    """
    if not ignore_virtual and PROCESS.virtual_stages is not None and _stage(vp_stage) != 0:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this is the last stage, see ``is_pipeline_first_stage``."""
    stages = PROCESS.virtual_stages
    if not ignore_virtual and stages is not None and _stage(vp_stage) != stages - 1:
        return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _stage(vp_stage: int | None) -> int:
    if vp_stage is None:
        reason = "there are virtual stages"
        raise ConfigError("vp_stage", None, reason, "Give the index of the one that is meant")
    return vp_stage


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank has the embedding; where virtual stages count, whether its stage has it."""
    group = None if PROCESS.groups is None else PROCESS.groups.named.get(EMBEDDING)
    if group is None:
        return False
    if ignore_virtual:
        return True
    # Of a group of one rank the first answer counts.
    if dist.get_rank() == group.ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    if dist.get_rank() == group.ranks[-1]:
        return is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return True


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank has the embedding of positions."""
    return PROCESS.groups is not None and POSITIONS in PROCESS.groups.named


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Index of the virtual stage that is being built; None without virtual stages."""
    return PROCESS.virtual_stage


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Note which virtual stage is being built."""
    PROCESS.build(rank)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of virtual stages of a pipeline rank; None without."""
    return PROCESS.virtual_stages


def get_tensor_model_parallel_src_rank() -> int:
    """The job's rank of the first of this rank's tensor-parallel ranks."""
    return _own("tp").ranks[0]


def get_model_parallel_src_rank() -> int:
    """The job's rank of the first rank of this replica."""
    return _own("mp").ranks[0]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """The job's rank of the first of this rank's data-parallel ranks."""
    return _own(_data(with_context_parallel)).ranks[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """The job's rank of the first stage of this pipeline."""
    return _own("pp").ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """The job's rank of the last stage of this pipeline."""
    return _own("pp").ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """The job's rank of the stage after this one; after the last, of the first."""
    ranks = _own("pp").ranks
    return ranks[(_rank("pp") + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    """The job's rank of the stage before this one; before the first, of the last."""
    return _own("pp").ranks[_rank("pp") - 1]


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Number of data-parallel ranks."""
    return _size_or_zero(_data(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Index of this rank among the data-parallel ranks."""
    return _rank_or_zero(_data(with_context_parallel, partial_data_parallel))


def get_context_parallel_world_size() -> int:
    """Number of ranks over which sequences are divided."""
    return _size_or_zero("cp")


def get_context_parallel_rank() -> int:
    """Index of this rank among those over which sequences are divided."""
    return _rank_or_zero("cp")


def get_tensor_and_context_parallel_world_size() -> int:
    """Number of tensor- and context-parallel ranks."""
    return _size_or_zero("tp-cp")


def get_tensor_and_context_parallel_rank() -> int:
    """Index of this rank among the tensor- and context-parallel ranks."""
    return _rank_or_zero("tp-cp")


def get_expert_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group over which experts are divided."""
    return _group("ep", check_initialized)


def get_expert_model_parallel_src_rank() -> int:
    """The job's rank of the first of the ranks over which experts are divided."""
    return _own("ep").ranks[0]


def get_expert_model_parallel_world_size() -> int:
    """Number of ranks over which experts are divided."""
    return _size_or_zero("ep")


def get_expert_model_parallel_rank() -> int:
    """Index of this rank among those over which experts are divided."""
    return _rank_or_zero("ep")


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The group over which an expert is sharded."""
    return _group("etp", check_initialized)


def get_expert_tensor_parallel_world_size() -> int:
    """Number of ranks over which an expert is sharded."""
    return _size("etp")


def get_expert_tensor_parallel_rank() -> int:
    """Index of this rank among those over which an expert is sharded."""
    return _rank("etp")


def get_expert_tensor_and_model_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup | None:
    """The group over which experts are divided and sharded."""
    return _group("tp-ep", check_initialized)


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Number of ranks over which experts are divided and sharded."""
    return _size_or_zero("tp-ep")


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Index of this rank among those over which experts are divided and sharded."""
    return _rank_or_zero("tp-ep")


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup | None:
    """The group of the ranks that have all experts of a model together."""
    return _group("tp-ep-pp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> dist.ProcessGroup | None:
    """The group of the ranks that have the same experts."""
    _data(False, partial_expert_data_parallel)
    return _group("expert-dp", check_initialized)


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> dist.ProcessGroup | None:
    """Another name of ``get_expert_data_parallel_group``."""
    return get_expert_data_parallel_group(True, partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(
    partial_expert_data_parallel: bool = False,
) -> dist.ProcessGroup:
    """``get_expert_data_parallel_group`` for CPU tensors."""
    _data(False, partial_expert_data_parallel)
    return _on_host("expert-dp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Index of this rank among those that have the same experts."""
    _data(False, partial_expert_data_parallel)
    return _rank_or_zero("expert-dp")


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Number of ranks that have the same experts."""
    _data(False, partial_expert_data_parallel)
    return _size_or_zero("expert-dp")


def get_all_ranks() -> str:
    """This rank's index among tensor-, data-, context-, pipeline- and expert-parallel ranks, joined
    by underscores.
    """
    names = ("tp", "dp", "cp", "pp", "ep")
    return "_".join(str(_rank(name)) for name in names)
