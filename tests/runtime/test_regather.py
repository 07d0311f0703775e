"""Keys and values of other ranks' positions are gathered again in the backward: gradients are those
of a layer that keeps them, and what it keeps is this rank's part.
"""

from unittest import mock

import pytest
import torch

from megatron_merak.config import ParallelConfig
from megatron_merak.graph.lowering import regathered
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.planner.memory import rank_memory
from tests.engines import engine_of
from tests.graph.tiny import randomise, tiny
from tests.measured import MeasuredExecutor
from tests.ranks import run_ranks

MICROBATCHES = 2
SHORT = 512
LAYERS, HEADS, BATCH, DIM = 2, 2, 2, 8  # of keys and values
OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}


def layers(rank, world_size, name, length, ways):
    """Gradients of a captured model, the most bytes that tapes had, and those of its plan, where
    gathered values are gathered again and where they are kept.
    """
    more = {"max_position_embeddings": 512} if name == "bert" else {}
    real, _, example = tiny(name, length=length, **more)
    mesh = build_mesh(Grid(cp=world_size), rank, torch.device("cpu"))
    parallel = ParallelConfig(
        context_parallel_size=world_size, cp_comm_type="all_gather", **dict(ways)
    )
    found = []
    for attends in (regathered._is_attended, lambda *given: False):
        with mock.patch.object(regathered, "_is_attended", attends):
            model = engine_of(
                randomise(real()), example, mesh, parallel=parallel, microbatches=MICROBATCHES
            )
            own = model.executor(MICROBATCHES)
            executor = MeasuredExecutor(own.stages, own.schedule, own.mesh, own.pipes)
            model.executors._executors[MICROBATCHES, True] = executor
            loss = model.gradients([example] * MICROBATCHES)
            planned = rank_memory(model.plan)[0].activations
        grads = model.buffer.main_grad.clone()
        found.append((loss, grads, executor.peak, planned))
    return found


@pytest.mark.parametrize(
    ("name", "length", "ways"),
    [
        ("llama", 16, {}),
        pytest.param("llama", 16, OFFLOAD, marks=pytest.mark.long),
        ("bert", 272, {}),  # whose attention has copies of keys and values
        pytest.param("llama", 1056, {}, marks=pytest.mark.slow),  # torch's own attention
        pytest.param("llama", 1056, OFFLOAD, marks=pytest.mark.slow),
    ],
)
def test_a_layer_keeps_its_own_part_and_has_the_gradients_of_one_that_keeps_all(name, length, ways):
    for again, kept in run_ranks(layers, 2, name, length, tuple(ways.items())):
        assert again[0] == kept[0] and torch.equal(again[1], kept[1])
        if not ways:
            if length <= SHORT:  # on either side of it a CPU keeps something else
                assert again[2] == again[3] and kept[2] == kept[3]
            heads = 4 if name == "bert" else HEADS
            whole = 2 * BATCH * length * heads * DIM * 4  # keys and values
            assert kept[2] - again[2] == LAYERS * whole // 2
