"""A captured model whose groups of pointwise operations are compiled, on one rank and on several."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_merak.config import Config, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.planner import plan
from megatron_merak.stages.graphs import check_graphs
from tests.engines import engine_of, step
from tests.graph.tiny import randomise, tiny
from tests.models.families import FAMILIES
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LENGTH = 128  # scores are large enough


def steps(rank, grid, **parallel):
    """Losses and gradient norms of three steps, the plan's units, and what this rank says of
    compiling.
    """
    torch.set_num_threads(1)
    real, _, batch = tiny("gemma2", batch=2, length=LENGTH, max_position_embeddings=LENGTH)
    model = randomise(real())
    settings = ParallelConfig(
        pipeline_model_parallel_size=grid.pp, tensor_model_parallel_size=grid.tp, **parallel
    )
    others = {"optimizer": OptimizerConfig(clip_grad=0.0)}  # stages sum a norm in another order
    mesh = build_mesh(grid, rank, CPU)
    engine = engine_of(model, batch, mesh, others=others, microbatches=4, parallel=settings)
    graphs = counters["stats"]["unique_graphs"]
    found = [step(engine, [batch] * 4, 1e-3, 0.1) for _ in range(3)]
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again while it trains"
    losses = [each.loss for each in found]
    norms = [each.grad_norm for each in found]
    notes = [note for note in engine.notes if note.startswith("--compile-pointwise")]
    return losses, norms, engine.plan.units, notes


def ranks(rank, world_size):
    found = {}
    for pp, tp, more in ((2, 1, {}), (2, 1, {"recompute_granularity": "full"}), (1, 2, {})):
        for compiles in (False, True):
            key = (pp, tp, bool(more), compiles)
            found[key] = steps(rank, Grid(pp=pp, tp=tp), compile_pointwise=compiles, **more)
    return found


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_layouts_agree_and_are_as_near_to_eager_as_one_rank_is():
    alone = {compiles: steps(0, Grid(), compile_pointwise=compiles) for compiles in (False, True)}
    assert not alone[False][3] and "1 group " in alone[True][3][0]
    first, second = run_ranks(ranks, 2, timeout=1100)
    for key, (losses, norms, units, _) in first.items():
        assert (losses, norms, units) == second[key][:3]
        if key[1] == 1:  # tensor-parallel ranks sum products in another order
            assert losses == alone[key[-1]][0], key
        assert losses == pytest.approx(alone[False][0], rel=1e-6), key
        assert norms == pytest.approx(alone[False][1], rel=1e-6), key


def test_what_it_cannot_be_combined_with():
    parallel = ParallelConfig(compile_pointwise=True)
    train = TrainConfig(micro_batch_size=1, global_batch_size=1)
    gpt = Config(model=FAMILIES["llama"], parallel=parallel, train=train)
    with pytest.raises(ConfigError, match="--compile-pointwise True: each part of the GPT"):
        plan(gpt, 1)
    with pytest.raises(PlanError, match="compile_pointwise True: each part of the GPT"):
        replace(plan(replace(gpt, parallel=ParallelConfig()), 1), compile_pointwise=True)
    captured = replace(
        plan(replace(gpt, parallel=ParallelConfig()), 1),
        graph_sharding="cut",
        compile_pointwise=True,
    )
    with pytest.raises(ConfigError, match="--cuda-graph-impl local: .* --compile-pointwise"):
        check_graphs(captured)


WITHOUT = """
import torch
from tests.stages.test_compiled import Grid, steps
steps(0, Grid(), compile_pointwise=True)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_a_compiler_the_flag_is_refused_by_name(tmp_path):
    variables = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=os.environ | variables, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and "--compile-pointwise True: torch.compile failed here" in last
    assert last.endswith("name it in CXX, or leave it out.")
