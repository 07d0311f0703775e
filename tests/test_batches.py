"""Batch sizes that grow with the samples consumed: Megatron-LM's formulas, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_merak.config import (
    Batches,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.planner import plan
from megatron_merak.planner.growth import growth_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
SHAPE = ModelConfig(
    num_layers=6, hidden_size=16, num_attention_heads=2, seq_length=10, vocab_size=50
)


def run(world: int = 1, load: str | None = None, lr: dict | None = None, **train) -> Config:
    """A validated configuration."""
    train = {"micro_batch_size": 2, "train_samples": 1000} | train
    checkpoint = Config.__dataclass_fields__["checkpoint"].default
    config = Config(
        model=SHAPE,
        train=TrainConfig(**train),
        optimizer=OptimizerConfig(lr=1.0, **(lr or {})),
        data=DataConfig(mock_data=True),
        checkpoint=type(checkpoint)(load=load),
    )
    config.validate(world)
    return config


def ramp(first: int, increment: int, samples: int, last: int) -> Batches:
    words = tuple(map(str, (first, increment, samples)))
    return run(
        micro_batch_size=1, train_samples=10**12, global_batch_size=last, rampup_batch_size=words
    ).batches(1)


def megatron(consumed: int, first: int, increment: int, samples: int, last: int) -> int:
    """Samples of the step behind ``consumed``, by Megatron-LM's formula in floating point."""
    if consumed > samples:
        return last
    return first + int(consumed / (samples / ((last - first) // increment))) * increment


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 60), st.integers(1, 10**9), st.data())
def test_a_ramp_has_megatrons_sizes(first, increment, count, samples, data):
    last = first + increment * count
    batches = ramp(first, increment, samples, last)
    borders = [
        consumed
        for start, _ in batches.sizes
        for consumed in (start - 1, start, start + 1)
        if consumed >= 0
    ]
    for consumed in (*borders, samples, samples + 1, data.draw(st.integers(0, 2 * samples))):
        assert batches.size(consumed) == megatron(consumed, first, increment, samples, last)
    assert batches.largest == last


def test_where_floating_point_is_a_sample_late_so_is_the_ramp():
    assert megatron(83808438, 1, 1, 119726340, 91) == 63 == ramp(1, 1, 119726340, 91).size(83808438)
    assert 83808438 * 90 == 63 * 119726340, "in exact numbers the next size begins here"


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=6),
    st.integers(0, 300),
)
def test_steps_are_those_of_a_loop(pieces, samples):
    starts, start = [], 0
    for length, size in pieces:
        starts.append((start, size))
        start += length
    batches = Batches(tuple(starts))
    consumed = 0
    sizes = []
    while consumed + batches.size(consumed) <= samples:
        sizes.append(batches.size(consumed))
        consumed += sizes[-1]
    assert batches.steps(samples) == len(sizes)
    assert [size for size, steps in batches.phases(samples) for _ in range(steps)] == sizes
    if len(sizes) > 2:
        assert batches.steps(samples, sum(sizes[:2])) == len(sizes) - 2
    assert batches.steps(samples, samples + 7) == 0 and all(
        steps > 0 for _, steps in batches.phases(samples)
    )


def test_sizes_by_tokens():
    batches = run(step_batch_size_schedule="0:4 0.1K:8, 2k:6").batches(1)
    assert batches == Batches(((0, 4), (10, 8), (200, 6))) and batches.largest == 8
    assert run(step_batch_size_schedule="0:4 100:8", global_batch_size=8).num_microbatches(2) == 2


def test_gpt3():
    """32 thousand to 3.2 million tokens over 12 billion of 300: the published recipe, in samples of
    2,048 tokens.
    """
    train = {"micro_batch_size": 1, "global_batch_size": 1536, "train_samples": 146_484_375}
    config = run(rampup_batch_size=("16", "16", "5859375"), **train)
    assert len(config.batches(1).sizes) == 96 and config.iterations(config.batches(1)) == 111_354


def test_decreased_where_needed():
    given_ = {
        "rampup_batch_size": ("3", "3", "30"),
        "global_batch_size": 9,
        "decrease_batch_size_if_needed": True,
    }
    assert [size for _, size in run(**given_).batches(1).sizes] == [2, 6, 8]
    assert (
        run(4, global_batch_size=30, decrease_batch_size_if_needed=True).global_batch_size(4) == 24
    )


def test_a_run_that_resumes_checks_the_sizes_to_come_only():
    """More replicas than the first sizes have samples for, after these are over."""
    grown = {"rampup_batch_size": ("2", "2", "30"), "global_batch_size": 8}
    with pytest.raises(ConfigError, match="has a batch size of 2"):
        run(4, **grown)
    run(4, load="somewhere", **grown)
    run(4, load="somewhere", decrease_batch_size_if_needed=True, **grown)
    run(skip_train=True, train_samples=None, **grown)


RAMP = {"global_batch_size": 8, "rampup_batch_size": ("2", "2", "30")}


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (
            {"train_iters": 5},
            "--train-samples 1000: contradicts --train-iters 5. Give only one of them.",
        ),
        (
            RAMP | {"train_samples": None, "train_iters": 5},
            "--rampup-batch-size 2 2 30: counts samples, but the length of the run is not given in samples. "
            "Give --train-samples instead of --train-iters.",
        ),
        (
            {"rampup_batch_size": ("2", "2", "30")},
            "--global-batch-size (missing): is needed with --rampup-batch-size, as its last size. Give it.",
        ),
        (
            RAMP | {"rampup_batch_size": ("2", "two", "30")},
            "--rampup-batch-size 2 two 30: is not three positive whole numbers of 15 digits at most. "
            "Write it like '16 16 1000000': the first batch size, the increment, the samples of the ramp.",
        ),
        (
            RAMP | {"rampup_batch_size": ("2", "2")},
            "--rampup-batch-size 2 2: is not three positive whole numbers",
        ),
        (
            RAMP | {"rampup_batch_size": ("2", "0", "9")},
            "--rampup-batch-size 2 0 9: is not three positive",
        ),
        (
            RAMP | {"rampup_batch_size": ("2", "4", "30")},
            "--rampup-batch-size 2 4 30: does not reach --global-batch-size 8: the increment does not divide 6. ",
        ),
        (
            RAMP | {"rampup_batch_size": ("12", "2", "30")},
            "--rampup-batch-size 12 2 30: starts above --global-batch-size 8. ",
        ),
        (
            RAMP | {"rampup_batch_size": ("2", "1", "30")},
            "--rampup-batch-size 2 1 30: has a batch size of 3, which is not a multiple of "
            "--micro-batch-size 2 x data-parallel size 1 = 2. Use multiples of 2, such as 2 or 4.",
        ),
        (
            RAMP | {"step_batch_size_schedule": "0:8"},
            "--rampup-batch-size 2 2 30: contradicts --step-batch-size-schedule. Give only one of them.",
        ),
        (
            {"step_batch_size_schedule": "0:4 x:8"},
            "--step-batch-size-schedule 0:4 x:8: has an entry 'x:8'. "
            "Write it like '0:768 250B:1536 500B:3072': tokens from which on, and samples per step.",
        ),
        (
            {"step_batch_size_schedule": "0:4 8"},
            "--step-batch-size-schedule 0:4 8: has an entry '8'. ",
        ),
        (
            {"step_batch_size_schedule": "0:4 nan:8"},
            "--step-batch-size-schedule 0:4 nan:8: has an entry 'nan:8'. ",
        ),
        (
            {"step_batch_size_schedule": "0:4.5"},
            "--step-batch-size-schedule 0:4.5: has an entry '0:4.5'. ",
        ),
        (
            {"step_batch_size_schedule": "0:1_0"},
            "--step-batch-size-schedule 0:1_0: has an entry '0:1_0'. ",
        ),
        (RAMP | {"rampup_batch_size": ("2", "2", "9" * 5000)}, "--rampup-batch-size 2 2 9"),
        (
            RAMP | {"rampup_batch_size": ("2", "2", "30"), "global_batch_size": 3 * 10**8},
            "--rampup-batch-size 2 2 30: makes 149,999,999 batch sizes. Raise the increment to 3000.",
        ),
        (
            {"step_batch_size_schedule": "50:4"},
            "--step-batch-size-schedule 50:4: does not say the size from 0 tokens",
        ),
        (
            {"step_batch_size_schedule": "0:4 5:8"},
            "--step-batch-size-schedule 0:4 5:8: '5:8' does not begin after the entry before it.",
        ),
        (
            {"step_batch_size_schedule": "0:4 50:8", "global_batch_size": 4},
            "--global-batch-size 4: contradicts --step-batch-size-schedule, whose largest size is 8. Leave it out.",
        ),
        (
            {"step_batch_size_schedule": "0:4", "decrease_batch_size_if_needed": True},
            "--step-batch-size-schedule 0:4: already gives every batch size. Leave out --decrease-batch-size-if-needed",
        ),
        (
            {"global_batch_size": 1, "decrease_batch_size_if_needed": True},
            "--global-batch-size 1: is smaller than --micro-batch-size 2 x data-parallel size 1 = 2. Use at least 2",
        ),
        ({"train_samples": 1}, "--train-samples 1: is less than the first step's 2. Raise it."),
        (
            {"lr": {"lr_warmup_iters": 3}},
            "--lr-warmup-iters 3: is not in the unit of --train-samples. Give --lr-warmup-samples.",
        ),
        (
            {"lr": {"lr_warmup_samples": 1000}},
            "--lr-warmup-samples 1000: leaves nothing of the 1000 decay samples. "
            "Use at most 999, or raise --lr-decay-samples.",
        ),
        (
            {"train_samples": None, "train_iters": 9, "lr": {"lr_decay_samples": 3}},
            "--lr-decay-samples 3: is not in the unit of --train-iters. Give --lr-decay-iters.",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(given_, message):
    with pytest.raises(ConfigError) as error:
        run(**given_)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("schedule", [*BUILDERS, "auto"])
def test_every_schedule_grows(schedule):
    """The table has each size's own micro-batches, and steps that take longer."""
    train = TrainConfig(
        micro_batch_size=1,
        global_batch_size=8,
        train_samples=60,
        rampup_batch_size=("2", "2", "24"),
    )
    parallel = {"pipeline_model_parallel_size": 2, "pipeline_schedule": schedule}
    kind = Config.__dataclass_fields__["parallel"].type
    config = Config(model=SHAPE, train=train, parallel=kind(**parallel))
    lines = growth_table(plan(config, 2), config.phases(2)).splitlines()
    rows = [line.split() for line in lines[2:-1]]
    assert [row[:3] for row in rows] == [
        ["2", "4", "2"],
        ["4", "2", "4"],
        ["6", "2", "6"],
        ["8", "4", "8"],
    ]
    times = [float(row[3]) for row in rows]
    assert times == sorted(times) and times[0] < times[-1] and lines[-1] == "12 steps in all"
    assert growth_table(plan(config, 2), [(8, 5)]) == ""


def test_the_page_shows_how_a_size_that_does_not_fit_is_refused():
    words = re.search(
        r"pretrain_gpt.py \.\.\. --micro-batch-size 2 .*--rampup-batch-size (.*)\nrank 0: (.*)\n",
        PAGE,
    )
    with pytest.raises(ConfigError) as error:
        run(global_batch_size=8, rampup_batch_size=tuple(words[1].split()))
    assert str(error.value) == words[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns_faster_while_batches_are_small(tmp_path):
    command = [sys.executable, "examples/growing_batch.py", "--directory", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    line = r"{} batch: +(\d+) steps, a loss of 6.0 after (\d+) samples, "
    (steps, large), (more, small) = (
        map(int, re.search(line.format(name), told).groups()) for name in ("constant", "growing")
    )
    assert steps == 64 and more == 106 and small < large
    assert (tmp_path / "growing_batch.png").read_bytes().startswith(b"\x89PNG")
