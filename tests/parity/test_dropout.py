"""Dropout: the same masks in every layout of as many tensor-parallel ranks, on all of these outside
of tensor-parallel regions, and other masks on every rank inside them.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak.training.trainer import Trainer
from tests.engines import gradient_step
from tests.ranks import run_ranks

from .batches import replica_batch
from .cases import Case
from .compare import TOLERANCE, distance
from .reference import reference
from .rig import mesh_of, new_trainer, run_all, train

pytestmark = pytest.mark.long

STEPS = 3
BOTH = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "steps": STEPS}
SAME_MASKS = [
    Case("gpt2", dp=2, **BOTH),
    Case("qwen", pp=2, dp=2, schedule="gpipe", **BOTH),
    Case("llama", pp=2, dp=2, recompute="full", **BOTH),
    Case("gpt2", tp=2, pp=2, recompute="full", **BOTH),
    Case("llama", tp=2, dp=2, schedule="gpipe", **BOTH),
]


def alone(case: Case) -> Case:
    return replace(case, pp=1, dp=1, schedule="1f1b", recompute="none")


@pytest.fixture(scope="module")
def runs():
    return run_all([*SAME_MASKS, *dict.fromkeys(map(alone, SAME_MASKS))])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SAME_MASKS, ids=str)
def test_masks_do_not_depend_on_the_layout(case, runs):
    found = distance(runs[case], runs[alone(case)])
    assert found.within(TOLERANCE["fp32"]), found
    without = reference(case.family, "fp32", case.loss).first_loss
    assert abs(runs[case].evaluated - without) < 1e-5, "evaluation drops nothing"
    assert abs(runs[case].first_loss - without) > 1e-3, "training does"


def _twice(rank: int, case: Case) -> bool:
    mesh = mesh_of(case, rank)
    first = train(case, mesh)
    torch.manual_seed(99)  # nothing of the process's own random state may matter
    second = train(case, mesh)
    return (first.curve, first.norms) == (second.curve, second.norms) and all(
        torch.equal(a.tensor, b.tensor) for a, b in zip(first.weights, second.weights, strict=True)
    )


def _attention_gradients(rank: int, case: Case) -> list[torch.Tensor]:
    """c_proj's gradient on this rank, all ranks holding the same shards of every weight."""
    mesh = mesh_of(case, rank)
    trainer = new_trainer(case, mesh)
    for number, name in enumerate(sorted(trainer.model.buffer.slots)):
        generator = torch.Generator().manual_seed(number)
        parameter = trainer.model.buffer.parameter(name)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    gradient_step(trainer, replica_batch(case, 0, mesh.dp_rank))
    names = [name for name in trainer.model.buffer.slots if name.endswith("attn.c_proj.weight")]
    assert len(names) == 4
    return [trainer.model.buffer.grad(name).clone() for name in names]


def _inside(rank: int, world_size: int) -> tuple:
    case = Case("gpt2", tp=2)
    plain = _attention_gradients(rank, case)
    hidden = _attention_gradients(rank, replace(case, hidden_dropout=0.2))
    attention = _attention_gradients(rank, replace(case, attention_dropout=0.2))
    again = _twice(rank, replace(case, **BOTH))
    return again, plain, hidden, attention, _losses(replace(case, attention_dropout=0.3), rank)


def _losses(case: Case, rank: int = 0) -> list[float]:
    """Losses of one batch on unchanging weights in many steps: only the masks differ."""
    mesh = mesh_of(case, rank)
    trainer: Trainer = new_trainer(case, mesh)
    found = []
    for trainer.iteration in range(24):
        found.append(gradient_step(trainer, replica_batch(case, 0, mesh.dp_rank)))
    return found


@pytest.mark.timeout(300)
def test_inside_tensor_parallel_regions_every_rank_draws_its_own_masks():
    first, second = run_ranks(_inside, 2)
    again, plain, hidden, attention, losses = first
    again_1, plain_1, hidden_1, attention_1, losses_1 = second
    assert again and again_1, "a second run differs"
    for layer in range(4):
        # Equal shards and equal inputs give equal gradients: only the masks of attention can tell
        # the ranks apart.
        assert torch.equal(plain[layer], plain_1[layer])
        assert torch.equal(hidden[layer], hidden_1[layer])
        assert not torch.equal(hidden[layer], plain[layer])
        assert not torch.allclose(attention[layer], attention_1[layer], rtol=0.05)
    assert losses == losses_1
    serial = torch.tensor(_losses(Case("gpt2", attention_dropout=0.3)))
    parallel = torch.tensor(losses)
    assert len(set(losses)) == len(losses), "two steps drew the same masks"
    error = (serial.var() / len(serial) + parallel.var() / len(parallel)).sqrt()
    assert (serial.mean() - parallel.mean()).abs() < 4 * error
    assert 0.5 < parallel.std() / serial.std() < 2


def _drawn(rank: int, world_size: int, case: Case) -> dict[tuple, torch.Tensor]:
    """What each random segment draws: (step, global micro-batch, unit, segment, sharded) -> 256
    random bits.
    """
    mesh = mesh_of(case, rank)
    model = new_trainer(case, mesh).model
    (stage,) = model.stages.values()
    drawn = {}
    for step in range(2):
        samples = replica_batch(case, 0, mesh.dp_rank)[:2]
        for microbatch, batch in enumerate(model.from_samples(samples)):
            (part,) = stage.begin(microbatch, batch, step, training=True)
            common = part.state.common
            for segment in (s for s in stage.program(microbatch).segments if s.random):
                common.seed(segment)
                place = microbatch * case.dp + mesh.dp_rank
                drawn[step, place, segment.unit, segment.index, segment.sharded] = torch.rand(256)
            stage.end(microbatch)
    return drawn


@pytest.mark.timeout(300)
def test_every_random_segment_has_a_stream_of_its_own():
    by_rank = run_ranks(_drawn, 4, Case("llama", tp=2, dp=2, **BOTH))
    random = 1 + 4 * 3  # the embedding; attention and two residuals per layer
    assert all(len(drawn) == 2 * 2 * random for drawn in by_rank)
    streams: dict[bytes, set] = {}
    for rank, drawn in enumerate(by_rank):
        for (*place, sharded), values in drawn.items():
            assert abs(values.mean() - 0.5) < 5 * 0.2887 / 16
            streams.setdefault(values.numpy().tobytes(), set()).add(
                (*place, rank % 2 if sharded else None)
            )
    assert all(len(places) == 1 for places in streams.values()), "two places draw the same numbers"
    # 2 steps, 4 micro-batches; each of two ranks has its own attention
    assert len(streams) == 2 * 4 * (random + 4)


@pytest.mark.timeout(300)
def test_ranks_that_share_a_sequence_draw_for_all_of_it():
    """Of what they draw each uses its part; only attention has a stream of each rank."""
    by_rank = run_ranks(_drawn, 2, Case("llama", tp=2, sequence_parallel=True, **BOTH))
    streams = {values.numpy().tobytes() for drawn in by_rank for values in drawn.values()}
    # steps, micro-batches; the embedding, two residuals per layer, attention
    assert len(streams) == 2 * 2 * (1 + 4 * 2 + 4 * 2)
