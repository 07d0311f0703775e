"""Weights, gradients and optimizer state in host memory: the bits of a run that keeps them on its
devices.
"""

import pytest
import torch

from megatron_merak.errors import PlanError
from megatron_merak.plan import Grid
from megatron_merak.stages.parameter_shards import check_one_dtype
from tests.choice import later
from tests.engines import step
from tests.graph.tiny import randomise, tiny
from tests.parity.rig import spoil
from tests.ranks import run_ranks
from tests.stages.test_captured import (
    DECAY,
    FULL,
    RATE,
    SPLIT,
    STEPS,
    ZERO,
    micro_batches,
    parts_of,
    told,
    trainer_of,
)

WHOLE = ZERO["optim_grads_params"]
ON_HOST = {"offload_model_states": True}
FROZEN = {"frozen": True}


def run(rank, world_size, name, grid, ways, options):
    """Losses and gradient norms of some steps, the gradient of the first, and the weights behind the
    last.
    """
    torch.set_num_threads(1)
    real, _, batch = tiny(name)
    model = randomise(real()).to(getattr(torch, options.get("dtype", "float32")))
    if options.get("frozen"):
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(number % 3 == 0)
    batches = micro_batches(name)
    trainer = trainer_of(
        model, batch, grid, rank, len(batches), ways, dtype=options.get("dtype", "float32")
    )
    mine = batches[trainer.mesh.dp_rank :: grid.dp]
    spoil(trainer.buffer)
    loss = trainer.gradients(mine)
    gatherer = trainer.parameters.gatherer
    grads = parts_of(trainer, gatherer.full(trainer.buffer.own_gradient()))
    results = [step(trainer, mine, RATE, DECAY) for _ in range(STEPS)]
    gatherer.gather()
    curve = [(each.loss, each.grad_norm) for each in results]
    return loss, grads, curve, parts_of(trainer)


CASES = [
    ("llama", Grid(), {}, {}),
    ("gpt2", Grid(), {}, {"dtype": "bfloat16"}),
    later("gpt2", Grid(pp=2), {}, {}),
    later("llama", Grid(), FULL, {}),
    ("llama", Grid(), {}, FROZEN),
    later("gpt2", Grid(pp=2), FULL, FROZEN | {"dtype": "bfloat16"}),
    ("gpt2", Grid(dp=2), WHOLE, {}),
    later("llama", Grid(tp=2), {}, {}),
    later("t5", Grid(pp=2), SPLIT, {}),
    later("gpt2", Grid(pp=2), {"pipeline_schedule": "interleaved"}, {}),
    ("gpt2", Grid(), {"cpu_offloading_num_layers": 1}, {}),
]


@pytest.mark.parametrize(("name", "grid", "ways", "options"), CASES, ids=told)
def test_model_states_on_the_host_change_no_bit(name, grid, ways, options):
    expected, found = (
        run_ranks(run, grid.size, name, grid, ways | more, options, timeout=200)
        for more in ({}, ON_HOST)
    )
    for (loss, grads, curve, weights), (loss2, grads2, curve2, weights2) in zip(
        expected, found, strict=True
    ):
        assert loss == loss2
        assert [each for each, _ in curve] == [each for each, _ in curve2]
        # a sum in fp64, unit by unit
        norms, norms2 = ([each for _, each in way] for way in (curve, curve2))
        assert norms2 == pytest.approx(norms, rel=1e-14, abs=0)
        for before, after in ((grads, grads2), (weights, weights2)):
            assert [each.name for each in before] == [each.name for each in after]
            assert any(each.tensor.any() for each in before)
            for each, other in zip(before, after, strict=True):
                assert torch.equal(each.tensor, other.tensor), each.name


def test_weights_of_two_dtypes_are_refused():
    check_one_dtype({"a": torch.bfloat16, "b": torch.bfloat16})
    with pytest.raises(PlanError, match="offload_model_states True: parameter b computes in fp32"):
        check_one_dtype({"a": torch.bfloat16, "b": torch.float32})
