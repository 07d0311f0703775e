"""The engine on parts of the sequence: where collectives are launched among the products that hide
them.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from tests.models.families import FAMILIES
from tests.oplog import OpLog
from tests.ranks import run_ranks
from tests.runtime.test_engine import Machine

GATHER, SCATTER = "_allgather_base_", "_reduce_scatter_base_"


def order(rank, world_size):
    """The products and collectives of one layer, forward and backward, and what evaluation
    sends.
    """
    config = replace(FAMILIES["llama"], num_layers=1)
    machine = Machine(config, (), dist.group.WORLD, rank, sequence_parallel=True)
    with OpLog() as forward:
        state = machine.start()
        machine.forward(state)
    state.add_grad("loss", torch.ones(()))
    with OpLog() as backward:
        machine.engine.backward(state)
    with OpLog() as evaluation:
        state = machine.start(training=False)
        machine.forward(state)
    assert state.leftovers() == []
    return forward.collectives, backward.names, evaluation.collectives


def test_a_gradient_is_on_its_way_before_the_weight_gradients():
    forward = [SCATTER, *[GATHER, SCATTER] * 2, GATHER, GATHER]  # the last: statistics of the loss
    # The gradient's parts and those of the input are gathered; the reduce-scatter of the input
    # gradient is launched before the weight gradients.
    head = [GATHER, "mm", SCATTER, "addmm_"]
    feed = [GATHER, GATHER, "mm", "mm", SCATTER, *["addmm_"] * 3]
    attention = [GATHER, GATHER, "mm", "mm", SCATTER, *["addmm_"] * 4]
    backward = [*head, *feed, *attention, GATHER, "add_rows_"]
    assert run_ranks(order, 2) == [(forward, backward, forward)] * 2
