"""Where the order of every sum is the same, runs are equal to the bit: loss, gradients, and weights
after some steps.

Dropout is on in most cases: a segment's random numbers depend on its place in the model and on the
step, never on the schedule or on which process runs it.
"""

from dataclasses import replace

import pytest

from .cases import Case
from .compare import differing, tensor_distances
from .rig import run_all

pytestmark = pytest.mark.slow

STEPS = 3
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

# A pipeline alone moves values, unchanged; no sum is split. Clipping is off: the global norm adds
# the stages' parts, in fp64, in another order than one process does.
ONE = [
    Case("llama", steps=STEPS, clip=0.0, **DROPOUT),
    Case("llama", steps=STEPS, clip=0.0, dtype="bf16"),
    Case("llama", steps=STEPS, clip=0.0, dtype="fp16"),
    Case("gpt2", steps=STEPS, clip=0.0, **DROPOUT),
    Case("qwen", steps=STEPS, clip=0.0, dtype="bf16", **DROPOUT),
]
PIPELINES = [
    {"pp": 2, "schedule": "1f1b", "recompute": "none"},
    {"pp": 2, "schedule": "gpipe", "recompute": "full"},
    {"pp": 4, "schedule": "gpipe", "recompute": "none"},
    {"pp": 4, "schedule": "1f1b", "recompute": "full"},
]
TIED = {"gpt2": "transformer.wte.weight", "qwen": "model.embed_tokens.weight"}

# In one layout nothing changes a bit: not the schedule (micro-batches go backward in the same
# order), not recomputation (it replays the same kernels and random numbers), not how gradients are
# cut into buckets (the sum of two replicas has one order). Clipping is on: the norm is summed in
# one order, too.
LAYOUTS = [
    Case("gpt2", steps=STEPS, **DROPOUT),
    Case("qwen", steps=STEPS, dp=2, dtype="bf16", **DROPOUT),
    Case("llama", steps=STEPS, tp=2, pp=2, dtype="fp16", **DROPOUT),
    Case("gpt2", steps=STEPS, tp=2, dp=2, **DROPOUT),
    Case("qwen", steps=STEPS, tp=4, dtype="bf16", **DROPOUT),
]


def variants(case: Case) -> list[Case]:
    changes = [
        {"schedule": "gpipe"},
        {"recompute": "full"},
        {"schedule": "gpipe", "recompute": "full"},
    ]
    if case.dp > 1:
        changes += [{"early": False}, {"bucket": 10**9}]
    return [replace(case, **change) for change in changes]


@pytest.fixture(scope="module")
def runs():
    cases = [replace(case, **pipeline) for case in ONE for pipeline in PIPELINES]
    return run_all(
        [*ONE, *LAYOUTS, *cases, *(variant for case in LAYOUTS for variant in variants(case))]
    )


def name_of(value) -> str:
    if isinstance(value, dict):
        return "-".join(map(str, value.values()))
    return str(value) + ("-dropout" if value.hidden_dropout else "")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=name_of)
@pytest.mark.parametrize("one", ONE, ids=name_of)
def test_a_pipeline_equals_one_process(one, pipeline, runs):
    ours, alone = runs[replace(one, **pipeline)], runs[one]
    assert ours.first_loss == alone.first_loss
    # A tied embedding is the exception: its two uses add up micro-batch by micro-batch in one
    # process, but each on its own stage first in a pipeline.
    tied = [TIED[one.family]] if one.family in TIED else []
    assert [name for name in differing(ours.gradients, alone.gradients) if name not in tied] == []
    if tied:
        assert tensor_distances(ours.gradients, alone.gradients)[tied[0]] < 1e-6
    else:
        assert ours.curve == alone.curve
        assert differing(ours.weights, alone.weights) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LAYOUTS, ids=name_of)
def test_schedule_recomputation_and_buckets_change_nothing(case, runs):
    for variant in variants(case):
        assert (runs[variant].curve, runs[variant].norms) == (runs[case].curve, runs[case].norms), (
            variant
        )
        assert differing(runs[variant].gradients, runs[case].gradients) == [], variant
        assert differing(runs[variant].weights, runs[case].weights) == [], variant
