"""Into how many groups the replicas of a script's arguments are divided, and what of it is
refused.
"""

import os
from dataclasses import dataclass

import pytest

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.instances import instances_of
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.parallel.launch import World
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks


@dataclass
class Asked:
    """What arguments say, of a job that does not run."""

    world_size: int
    node: int = 0
    fsdp: str | None = None
    num_distributed_optimizer_instances: int | None = None
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_sharding_strategy: str | None = None
    use_distributed_optimizer: bool = False
    fsdp_config: dict | None = None
    rank_order: str | None = None
    deepspeed: dict | None = None
    parallelism_config: object = None
    offload_model_states: bool = False

    sharding = MerakArguments.sharding

    @property
    def world(self) -> World:
        return World(0, self.world_size, None, ranks_here=self.node)


HYBRID = "hybrid_shard"
TP4, PP2 = {"tensor_model_parallel_size": 4}, {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("asked", "instances"),
    [
        (Asked(16, 8), 1),
        (Asked(16, 8, "full_shard"), 1),
        (Asked(16, 8, HYBRID), 2),
        (Asked(16, 8, "hybrid_shard_zero2 auto_wrap"), 2),
        (Asked(8, 8, HYBRID), 1),
        (Asked(1, 0, HYBRID), 1),
        (Asked(64, 8, HYBRID, **TP4), 8),
        (Asked(32, 8, HYBRID, **PP2), 2),
        (Asked(16, 8, HYBRID, **PP2), 1),  # the replicas of a stage are one node
        (Asked(12, 4, HYBRID, **PP2), 3),  # six replicas: halves of three would lie in two nodes
        (Asked(16, 8, HYBRID, 4), 4),
        (Asked(16, 0, HYBRID, 2), 2),
        (Asked(16, 0, None, 8, data_parallel_sharding_strategy="optim"), 8),
        (Asked(16, 0, None, 2, use_distributed_optimizer=True), 2),
        (Asked(16, 0, None, 1), 1),
    ],
)
def test_instances_are_nodes_unless_a_number_says_otherwise(asked, instances):
    assert instances_of(asked) == instances


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            Asked(8, 0, HYBRID),
            "fsdp: hybrid_shard .*LOCAL_WORLD_SIZE is not set.*torchrun, or set .*=1 or 2 or 4",
        ),
        (
            Asked(16, 4, HYBRID, **TP4),
            "no two adjacent ones of the 4 data-parallel ranks are .* node of 4 ranks. Set .*=1 or 2,",
        ),
        (
            Asked(8, 8, HYBRID, 3),
            "instances 3: does not divide the 8 data-parallel ranks. Use 2 or 4",
        ),
        (Asked(8, 8, HYBRID, 16), "instances 16: does not divide the 8 data-parallel ranks. Use 4"),
        (
            Asked(8, 8, HYBRID, 8),
            "instances 8: an instance would be one of the 8 .* Use 4, or the strategy no_shard",
        ),
        (
            Asked(8, 8, None, 2),
            "instances 2: no_shard shards nothing .* Choose a sharding strategy",
        ),
        (Asked(1, 8, HYBRID, 2), "instances 2: there is one data-parallel rank"),
        (Asked(8, 8, HYBRID, 0), "instances 0: it counts groups of ranks"),
        (Asked(8, 8, HYBRID, "2"), "instances '2': it counts groups of ranks"),
    ],
)
def test_what_replicas_cannot_be_divided_into_is_refused(asked, told):
    with pytest.raises(ConfigError, match=told):
        instances_of(asked)


def test_arguments_refuse_it_when_they_are_made():
    with pytest.raises(
        ConfigError, match="num_distributed_optimizer_instances 2: there is one data-parallel rank"
    ):
        MerakArguments(
            "unused",
            use_cpu=True,
            report_to="none",
            fsdp=HYBRID,
            num_distributed_optimizer_instances=2,
        )


def in_unequal_nodes(rank, world_size):
    os.environ["LOCAL_WORLD_SIZE"] = "2" if rank < 2 else "4"
    arguments = MerakArguments(
        "unused", use_cpu=True, report_to="none", disable_tqdm=True, fsdp=HYBRID
    )
    with pytest.raises(ConfigError) as caught:
        MerakTrainer(tiny_llama(0), arguments, collate, samples(4))
    return str(caught.value)


@pytest.mark.slow
def test_nodes_of_unequal_size_are_told_before_groups_are_made():
    told = run_ranks(in_unequal_nodes, 4)
    assert set(told) == {
        "num_distributed_optimizer_instances 1: rank 2 has it, rank 0 has 2. Start all ranks with the same arguments."
    }
