"""A dozen types of different make, by the code that measures all of them for
docs/evidence/parity.md.
"""

import pytest

from tests.zoo.compare import EXACT
from tests.zoo.sweep import measure_apart

pytestmark = pytest.mark.long

SHARE = {  # of the parameters per rank at TP=2: at most
    "llama": 0.51,
    "gpt2": 0.51,
    "bloom": 0.51,
    "gemma3": 0.56,
    "mixtral": 0.51,
    "deepseek_v3": 0.56,
    "qwen3_next": 0.9,
    "bert": 0.55,
    "t5": 0.51,
    "bart": 0.55,
    "vit": 0.6,
    "whisper": 0.6,
    "prophetnet": 0.6,  # is captured by its bytecode alone
}
STEPS = ("gpt2", "mixtral")  # trained for a few steps on eight ranks, too


@pytest.mark.parametrize("model_type", SHARE)
def test_every_rank_computes_what_the_eager_model_computes(model_type):
    asked = ("pp3", "tp2", *(["curve"] if model_type in STEPS else []))
    row = measure_apart(model_type, asked)
    assert "how" in row, row
    assert {name: row[name]["state"] for name in asked} == dict.fromkeys(asked, EXACT), row
    assert row["share"] <= SHARE[model_type]


def test_a_model_whose_ids_are_int32_trains():
    assert measure_apart("cpmant", ("curve",))["curve"]["state"] == EXACT


def test_a_model_that_would_be_wrong_is_refused_by_name():
    """Its reversible layers keep nothing for the backward, and recompute through modules that no
    graph can hold.
    """
    assert "_ReversibleFunction" in measure_apart("reformer", ())["refused"]


def test_values_that_two_layers_gather_again_are_gathered_for_both():
    """Two segments of diffllama read one."""
    row = measure_apart("diffllama", ("cp2 gather",))
    assert row["cp2 gather"]["state"] == EXACT, row
