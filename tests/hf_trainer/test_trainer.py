"""MerakTrainer does what transformers.Trainer does: runs of both, side by side, on the same eager
model.
"""

import json

import pytest

from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from tests.hf_trainer.reference import CASES, record, record_transformers
from tests.hf_trainer.stand_in import EagerTrainer


def unbucketed(*values, **named):
    return MerakArguments(*values, length_buckets="none", **named)


def alike(ours, theirs, path=""):
    """Equal, floats to 1e-5: losses are summed in fp32 there and in fp64 here. What an attention's
    bias of keys learns is the rounding of a zero gradient."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            alike(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            alike(our, their, f"{path}[{place}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), path
    else:
        assert ours == theirs, path


def plain(record):
    return json.loads(json.dumps(record))


@pytest.mark.parametrize("name", CASES)
def test_runs_are_those_of_transformers(name):
    ours = record(
        EagerTrainer,
        unbucketed,
        name,
        lambda trainer: [b for step in trainer.engine.seen for b in step],
    )
    alike(plain(ours), plain(record_transformers(name)))
