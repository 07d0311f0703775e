"""What plans count of weights that are not trained, and of an optimizer that keeps more of some
than of others.
"""

from dataclasses import replace

import pytest

from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, Plan, Shards, StagePlan, Unit
from megatron_merak.planner.memory import Ledger, rank_memory
from megatron_merak.planner.predict import ending
from megatron_merak.planner.uneven import shared_state

TABLE = ("table", 1000)
UNITS = (
    Unit("embed", "embed", 0, 0, 0, 10, (TABLE,), tied_frozen=("table",)),
    Unit("layer", "layer", 500, 100, 20, 10, frozen=400),
    Unit("head", "head", 50, 100, 20, 4, (TABLE,), tied_frozen=("table",)),
)


def ledger(units=UNITS, dtype="float32", **more):
    return Ledger(units, build_schedule("1f1b", 1, 1), dtype, **more).together(
        [StagePlan(0, len(units))]
    )[0]


def test_frozen_weights_have_no_gradient_and_no_state():
    found = ledger()
    assert (found.weights, found.gradients, found.optimizer) == (4 * 1550, 4 * 150, 8 * 150)
    trained = ledger(tuple(replace(unit, frozen=0, tied_frozen=()) for unit in UNITS))
    assert (trained.weights, trained.gradients, trained.optimizer) == (4 * 1550, 4 * 1550, 8 * 1550)


def test_replicas_share_what_is_trained_alone():
    found = ledger(shards=Shards.of("optim_grads_params", 2))
    assert (found.weights, found.gradients, found.optimizer) == (4 * 1400 + 4 * 75, 4 * 75, 8 * 75)


def test_frozen_weights_may_be_kept_twice():
    found = ledger(dtype="bfloat16", frozen_bytes=6.0)
    assert (found.weights, found.optimizer) == (6 * 1400 + 2 * 150, 12 * 150)


def test_the_optimizer_and_ties_take_no_time_for_frozen_weights():
    one, other = (
        Plan(Grid(), units, (StagePlan(0, 3),), build_schedule("1f1b", 1, 1), 1, 8)
        for units in (UNITS, tuple(replace(unit, frozen=0, tied_frozen=()) for unit in UNITS))
    )
    assert 0 < 10 * ending(one).total < ending(other).total
    assert rank_memory(Plan.from_json(one.to_json())) == rank_memory(one)


MUON = (
    Unit("embed", "embed", 100, 0, 0, 10, state_bytes=8.0),
    Unit("layer", "layer", 300, 100, 20, 10, state_bytes=4.0),
    Unit("head", "head", 0, 100, 20, 4, (("table", 50),), tied_state_bytes=(("table", 8.0),)),
)


def test_a_stage_has_the_state_of_its_own_parameters():
    assert ledger(MUON).optimizer == 800 + 1200 + 400
    assert ledger(MUON[1:2]).optimizer == 1200
    assert (
        ledger(tuple(replace(unit, state_bytes=None) for unit in MUON), state_bytes=1.0).optimizer
        == 400 + 400
    )


@pytest.mark.parametrize(
    ("shards", "bucket_size", "most"),
    [
        # some of the layer, the embedding, and half of the tied table
        (2, 1000, 100 * 4 + 100 * 8 + 25 * 8),
        (2, 300, 150 * 4 + 50 * 8 + 25 * 8),  # the embedding is a bucket of its own
        (4, 1000, 100 * 8 + 12.5 * 8),
        (2, 0, (800 + 1200 + 400) / 2),
    ],
)
def test_that_replica_counts_which_has_most(shards, bucket_size, most):
    assert shared_state(MUON, 8.0, shards, bucket_size) == pytest.approx(shards * most)
