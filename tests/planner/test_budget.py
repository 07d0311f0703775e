"""What a whole run takes, by hand, and the interval of a prediction."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import CLUSTERS
from megatron_merak.errors import ConfigError
from megatron_merak.plan import interval, prediction
from megatron_merak.planner.budget import Budget, budget_text, tokens_of
from megatron_merak.planner.make import plan_chain
from tests.planner.test_practice import UNIT, with_practice
from tests.requests import request


def made(cluster, seconds=8.64):
    asked = request(microbatches=10, micro_batch_size=2, sequence_length=50)
    return replace(plan_chain([UNIT], asked, cluster), predicted_time=seconds)


def test_a_whole_run_by_hand():
    plan = made(with_practice(low=0.5, high=2.0))
    assert plan.global_batch_size * plan.sequence_length == 1000
    budget = Budget.of("9999.5K", "2.5")
    assert budget == Budget(9_999_500.0, 2.5)
    assert budget_text(plan, budget) == (
        "9.9995M tokens: 10,000 steps, 1 days (p10 to p90: 0.5 to 2), 24 hours of H100, "
        "60 at 2.5 an hour"
    )
    assert budget_text(made(CLUSTERS["cpu"]), Budget(10e6)) == (
        "10M tokens: 10,000 steps, 1 days, 24 hours of cpu"
    )


def test_numbers_of_tokens():
    assert [tokens_of(text) for text in ("1.4T", "300b", " 12 ", ".5K")] == [1.4e12, 3e11, 12, 500]
    assert Budget.of(None, None) is None


@pytest.mark.parametrize(
    ("tokens", "price", "named"),
    [
        ("3X", None, "--tokens"),
        ("0", None, "--tokens"),
        ("-1T", None, "--tokens"),
        ("1T", "free", "--price-per-gpu-hour"),
        ("1T", "nan", "--price-per-gpu-hour"),
        (None, "2", "--price-per-gpu-hour"),
    ],
)
def test_what_is_no_number_is_refused(tokens, price, named):
    with pytest.raises(ConfigError, match=named):
        Budget.of(tokens, price)


def test_samples_without_tokens_have_no_budget():
    plan = replace(made(CLUSTERS["cpu"]), sequence_length=0)
    with pytest.raises(ConfigError, match="--tokens"):
        budget_text(plan, Budget(1e9))


def test_a_prediction_has_an_interval_where_the_device_has_one():
    plan = made(with_practice(low=0.5, high=2.0), seconds=3.0)
    assert interval(plan) == (1.5, 6.0)
    assert "3.000 s per step (p10 to p90: 1.500 s to 6.000 s), bubble" in prediction(plan)
    for other in (made(CLUSTERS["cpu"]), replace(plan, predicted_time=0.0)):
        assert interval(other) is None and "p10" not in prediction(other)
