"""What captures cost is told: at the end, and once while training where they are many."""

import warnings
from types import SimpleNamespace

import pytest

from megatron_merak.hf_trainer.run.captures import MANY, Captures


def test_many_captures_are_warned_of_once():
    engine = SimpleNamespace(captures=(MANY - 1, 3))
    watched, silent = Captures(engine, True), Captures(engine, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched.look()
        engine.captures = (MANY, 3)
        silent.look()
    with pytest.warns(
        UserWarning,
        match="16 programs were captured so far.* Set pad_to_multiple_of or length_buckets",
    ):
        watched.look()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watched.look()
    text = "captured, one for each shape of a batch: 16; derived from those of other lengths: 3."
    assert watched.summary().endswith(text)
