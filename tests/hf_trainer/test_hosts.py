"""MerakTrainer on several hosts: its plan is one for these, and groups that leave theirs
are told.
"""

import io
import os
from contextlib import redirect_stderr

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks


def build(rank, world_size, directory):
    # as torchrun says it to ranks of two hosts
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    degrees = {"tensor_model_parallel_size": 2, "rank_order": "dp-tp-pp"}
    args = MerakArguments(directory, use_cpu=True, ddp_backend="gloo", report_to="none", **degrees)
    trainer = MerakTrainer(tiny_llama(), args, collate, samples(4))
    with redirect_stderr(io.StringIO()) as said:
        plan = trainer.engine.plan
    return said.getvalue(), plan.cluster.ranks_per_node, plan.grid.order


def test_hosts_are_told_and_planned_for(tmp_path):
    (said, *first), (nothing, *second) = run_ranks(build, 2, str(tmp_path))
    assert first == second == [1, "dp-tp-cp-pp"] and nothing == ""
    assert (
        "Tensor-parallel groups of 2 ranks reach over hosts of 1: collectives of every layer"
        in said
    )
    assert (
        "A tensor_model_parallel_size that divides 1 keeps them inside, with rank_order tp-dp-pp."
        in said
    )
