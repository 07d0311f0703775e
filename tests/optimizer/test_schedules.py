from dataclasses import replace
from math import cos, pi, sqrt

import pytest
import torch

from megatron_merak.config import OptimizerConfig
from megatron_merak.optimizer.schedules import learning_rate, warmup_length, weight_decay

BASE = OptimizerConfig(
    lr=1.0, min_lr=0.2, lr_warmup_iters=10, lr_decay_iters=110, lr_decay_style="linear"
)


def rates(config, *iterations, train_iters=1000):
    return [learning_rate(config, iteration, train_iters) for iteration in iterations]


def test_warmup_then_linear_by_hand():
    assert rates(BASE, 0, 5, 10, 60, 110, 111) == pytest.approx(
        [0.0, 0.5, 1.0, 0.6, 0.2, 0.2], rel=1e-15
    )
    assert rates(replace(BASE, lr_warmup_init=0.5), 0, 4, 10) == pytest.approx(
        [0.5, 0.7, 1.0], rel=1e-15
    )


def test_cosine_by_hand():
    config = replace(BASE, lr_decay_style="cosine")
    quarter = 0.2 + 0.8 * (cos(pi / 4) + 1) / 2
    assert rates(config, 5, 10, 35, 60, 110, 500) == pytest.approx(
        [0.5, 1.0, quarter, 0.6, 0.2, 0.2], rel=1e-15
    )


def test_constant_ignores_the_end_of_the_decay():
    assert rates(replace(BASE, lr_decay_style="constant"), 5, 10, 60, 500) == [0.5, 1.0, 1.0, 1.0]


def test_inverse_square_root_by_hand():
    config = replace(BASE, lr_decay_style="inverse-square-root", lr_decay_iters=10_000)
    assert rates(config, 5, 10, 40, 90, 1000) == pytest.approx(
        [0.5, 1.0, 0.5, 1 / 3, 0.2], rel=1e-15
    )
    assert rates(replace(config, lr_warmup_iters=0), 0, 1, 4) == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("style", "quarter"),
    [
        ("linear", 0.75),
        ("cosine", (1 + cos(pi / 4)) / 2),
        ("exponential", 2 * 0.5**0.25 - 1),
        ("minus_sqrt", 1 - sqrt(0.25)),
    ],
)
def test_warmup_stable_decay_by_hand(style, quarter):
    config = replace(BASE, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=40)
    expected = [0.5, 1.0, 1.0, 1.0, 0.2 + 0.8 * quarter, 0.2, 0.2]
    assert rates(config, 5, 10, 40, 70, 80, 110, 111) == pytest.approx(expected, rel=1e-15)


def test_defaults_come_from_train_iters_and_the_peak():
    config = OptimizerConfig(lr=1.0, lr_decay_style="linear")
    assert rates(config, 0, 50, 100, train_iters=100) == pytest.approx([1.0, 0.55, 0.1], rel=1e-15)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD"])
def test_samples_count_like_iterations(style):
    iters = replace(BASE, lr_decay_style=style, lr_wsd_decay_iters=40 if style == "WSD" else None)
    samples = replace(
        OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style=style),
        **{"lr_warmup_samples": 80, "lr_decay_samples": 880},
        lr_wsd_decay_samples=320 if style == "WSD" else None,
    )
    for done in (0, 3, 10, 11, 60, 80, 109, 110, 150):
        assert learning_rate(samples, 8 * done, 8000) == pytest.approx(
            learning_rate(iters, done, 1000), rel=1e-15
        )
    growing = replace(
        BASE, weight_decay_incr_style="linear", start_weight_decay=0.1, end_weight_decay=0.5
    )
    assert weight_decay(growing, 80, 8000) == pytest.approx(
        weight_decay(growing, 10, 1000), rel=1e-15
    )


def test_warmup_fraction_is_of_the_decay():
    config = replace(BASE, lr_warmup_iters=0, lr_warmup_fraction=0.05)
    assert warmup_length(config, 110) == 5.5
    assert rates(config, 2, 5) == pytest.approx([2 / 5.5, 5 / 5.5], rel=1e-15)
    assert learning_rate(config, 6, 1000) == pytest.approx(0.2 + 0.8 * (1 - 0.5 / 104.5), rel=1e-15)


def test_cosine_equals_torch():
    config = OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_decay_style="cosine")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=50, eta_min=config.min_lr
    )
    for iteration in range(51):
        assert learning_rate(config, iteration, 50) == pytest.approx(
            scheduler.get_last_lr()[0], rel=1e-12
        )
        optimizer.step()
        scheduler.step()


def test_warmup_equals_torch():
    config = OptimizerConfig(
        lr=2.0, lr_decay_style="constant", lr_warmup_iters=8, lr_warmup_init=0.5
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=8)
    for iteration in range(12):
        assert learning_rate(config, iteration, 50) == pytest.approx(
            scheduler.get_last_lr()[0], rel=1e-12
        )
        optimizer.step()
        scheduler.step()


def test_weight_decay_by_hand():
    constant = OptimizerConfig(lr=1.0, weight_decay=0.3)
    assert [weight_decay(constant, t, 40) for t in (0, 40, 99)] == [0.3, 0.3, 0.3]
    growing = {"start_weight_decay": 0.1, "end_weight_decay": 0.5}
    linear = OptimizerConfig(lr=1.0, weight_decay_incr_style="linear", **growing)
    assert [weight_decay(linear, t, 40) for t in (0, 10, 40, 41)] == pytest.approx(
        [0.1, 0.2, 0.5, 0.5], rel=1e-15
    )
    cosine = OptimizerConfig(lr=1.0, weight_decay_incr_style="cosine", **growing)
    expected = [0.1, 0.1 + 0.4 * (cos(pi * 0.75) + 1) / 2, 0.3, 0.5, 0.5]
    assert [weight_decay(cosine, t, 40) for t in (0, 10, 20, 40, 41)] == pytest.approx(
        expected, rel=1e-14
    )
