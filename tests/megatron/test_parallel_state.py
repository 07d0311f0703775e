"""parallel_state beside megatron-core's: the groups, ranks and sizes that every getter names."""

import inspect
import warnings

import pytest
import torch.distributed as dist

from megatron_merak.errors import ConfigError, LaunchError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.megatron.peers import initialised
from tests.ranks import run_ranks

ON_TWO = [
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2},
    {"context_parallel_size": 2},
]
ON_EIGHT = [
    {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
    },
    {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "order": "tp-cp-ep-pp-dp",
    },
    {"pipeline_model_parallel_size": 4},
]


def called(function, **arguments):
    """What a getter says, comparably: a group as its ranks, an error as such."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = function(**arguments)
        except (AssertionError, LaunchError):
            return "refused"
    return dist.get_process_group_ranks(value) if isinstance(value, dist.ProcessGroup) else value


def getters(module):
    """Its functions that only ask, and with which arguments."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ != module.__name__ or not name.startswith(("get_", "is_")):
            continue
        yield name, {}
        flags = {"with_context_parallel", "tp_only_amax_red"} & {
            *inspect.signature(function).parameters
        }
        yield from ((name, {flag: True}) for flag in sorted(flags))
        if "vp_stage" in inspect.signature(function).parameters:
            for stage in range(module.get_virtual_pipeline_model_parallel_world_size() or 1):
                yield name, {"ignore_virtual": False, "vp_stage": stage}


def compare(_rank, _size, layouts):
    found = set()
    for sizes in layouts:
        theirs, ours = initialised(**sizes)
        for name, arguments in getters(ours):
            mine = called(getattr(ours, name), **arguments)
            other = called(getattr(theirs, name), **arguments)
            assert mine == other, (sizes, name, arguments, mine, other)
            found.add(name)
        for module in (theirs, ours):
            module.destroy_model_parallel()
            assert not module.is_initialized()
        theirs._EMBEDDING_GLOBAL_RANKS = None  # which it forgets to forget
    return found, refused(theirs, ours)


def refused(theirs, ours):
    """What megatron-core has and the package has not, after what it refuses by name."""
    absent = []
    for name, function in inspect.getmembers(theirs, inspect.isfunction):
        if function.__module__ == theirs.__name__ and name.startswith(("get_", "is_", "set_")):
            try:
                getattr(ours, name)
            except ConfigError as error:
                assert error.value == name
            except AttributeError:
                absent.append(name)
    return absent


def test_every_getter_says_what_megatron_core_says():
    for found, absent in run_ranks(compare, 2, ON_TWO):
        assert len(found) == 54
        assert absent == ["get_nccl_options"]


@pytest.mark.long
def test_every_getter_on_eight_ranks():
    run_ranks(compare, 8, ON_EIGHT, timeout=120)


def from_mesh(rank, size):
    from megatron_merak.megatron import mpu

    mpu.initialize_from_mesh(build_mesh(Grid(tp=2, dp=2), rank, "cpu"))
    return mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank()


def test_groups_of_a_mesh():
    assert run_ranks(from_mesh, 4) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def shards_of_mesh(rank, size):
    from megatron_merak.megatron import mpu

    mesh = build_mesh(Grid(dp=4), rank, "cpu", expert_group=4, expert_shards=2)
    mpu.initialize_from_mesh(mesh)
    groups = (mpu.get_expert_tensor_parallel_group(), mpu.get_expert_model_parallel_group())
    return [dist.get_process_group_ranks(group) for group in groups]


def test_groups_of_a_mesh_whose_replicas_shard_each_expert():
    assert run_ranks(shards_of_mesh, 4) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]


def experts_of_mesh(rank, size):
    from megatron_merak.megatron import mpu

    mesh = build_mesh(Grid(tp=2, dp=4), rank, "cpu", expert_group=4)
    mpu.initialize_from_mesh(mesh)
    group = mpu.get_expert_model_parallel_group()
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mesh.experts.group)
    same = mpu.get_expert_data_parallel_group()
    assert dist.get_process_group_ranks(same) == dist.get_process_group_ranks(mesh.experts.same)
    return mpu.get_expert_model_parallel_rank(), mesh.experts.rank


@pytest.mark.long
def test_groups_of_a_mesh_whose_replicas_divide_experts():
    assert run_ranks(experts_of_mesh, 8) == [(rank % 4, rank % 4) for rank in range(8)]


def mistakes(_rank, _size):
    from megatron_merak.megatron import parallel_state

    told = []

    def tell(function, *arguments, **named):
        with pytest.raises((ConfigError, LaunchError)) as error:
            function(*arguments, **named)
        told.append(str(error.value))

    tell(parallel_state.get_tensor_model_parallel_group)
    tell(parallel_state.initialize_model_parallel, 3)
    tell(parallel_state.initialize_model_parallel, use_sharp=True)
    tell(parallel_state.initialize_model_parallel, 1, 1, 2)
    tell(
        parallel_state.initialize_model_parallel,
        1,
        2,
        expert_model_parallel_size=1,
        order="pp-tp-cp-dp",
        virtual_pipeline_model_parallel_size=2,
        num_distributed_optimizer_instances=2,
    )
    parallel_state.initialize_model_parallel(2)
    tell(parallel_state.initialize_model_parallel, 2)
    tell(parallel_state.get_data_parallel_group, partial_data_parallel=True)
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is not None
    return told


def test_mistakes_are_told_before_groups_are_made():
    assert run_ranks(mistakes, 2)[0] == [
        "parallel_state (not initialised): the groups of this process are not initialised. Call "
        "initialize_model_parallel on every rank first.",
        "number of ranks 2: tp x cp x pp is 3, which does not divide it. Use a multiple of 3.",
        "use_sharp True: groups have no such setting here. Leave it out.",
        "virtual_pipeline_model_parallel_size 2: there is one pipeline rank. Leave it out, or use "
        "more pipeline ranks.",
        "num_distributed_optimizer_instances 2: groups have no such setting here. Leave it out.",
        "parallel_state (in use): the groups of this process are initialised. Call "
        "destroy_model_parallel before.",
        "partial_data_parallel True: there is one instance of the distributed optimizer. Leave it "
        "out.",
    ]
