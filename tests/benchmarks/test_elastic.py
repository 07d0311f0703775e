"""Runs resumed under other layouts: a sample of the pairs of ``python -m benchmarks elastic``, and
that its checks can fail.
"""

import pytest
import torch

from benchmarks.checkpoints.elastic import (
    Bench,
    Failed,
    Steps,
    check_losses,
    check_samples,
    check_state,
    launched,
    table,
)
from benchmarks.checkpoints.elastic_cases import PAIRS, REFUSED, Pair, parsed
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.checkpoint.store import save

ALWAYS = "gpt: dp4 optim 1 x 2 -> dp1 1 x 8"
LONG = (
    "trainer: dp1 2 x 4 -> dp2 2 x 2 (grouped by length)",
    "trainer: dp1 2 x 4 -> dp2 2 x 4 (another batch, grouped by length)",
)
FURTHER = [pair for pair in PAIRS if pair.name not in (ALWAYS, *LONG) and pair.before.ranks < 8][
    ::8
]


def test_there_are_enough_pairs_of_every_kind():
    assert len(PAIRS) >= 40 and len({pair.name for pair in PAIRS}) == len(PAIRS)
    layouts = [each for pair in PAIRS for each in (pair.before, pair.after)]
    for degree, sizes in (
        ("dp", {1, 2, 4, 8}),
        ("tp", {1, 2}),
        ("pp", {1, 2}),
        ("cp", {1, 2}),
        ("ep", {1, 2, 4}),
    ):
        assert {getattr(each, degree) for each in layouts} == sizes
    assert {each.sharding for each in layouts} == {"", "optim", "optim_grads", "optim_grads_params"}


@pytest.mark.parametrize(
    "name", [ALWAYS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_a_resumed_run_is_the_same_under_another_layout(tmp_path, name):
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    found = Bench(tmp_path, launched).run(pair)
    assert found["samples"] == 24 and found["tensors"] > 50 and found.get("loss", 0.0) < 1e-5


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, id=pair.name, marks=pytest.mark.slow if at % 2 else pytest.mark.long)
        for at, pair in enumerate(FURTHER)
    ],
)
def test_further_layouts(tmp_path, pair):
    Bench(tmp_path, launched).run(pair)


@pytest.mark.long
@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: pair.name)
def test_what_is_refused_is_told(tmp_path, pair):
    assert len(Bench(tmp_path, launched).refused(pair)) > 30


PAIR = Pair("gpt", parsed("dp1"), parsed("dp2"))


def _steps(first: int, shift: int = 0, **losses: float) -> Steps:
    """Six steps of 8, or those from ``first`` on, in two parts."""
    numbers = [*range(48)]
    numbers[30] += shift
    samples = {
        s: [numbers[8 * s - 8 : 8 * s - 4], numbers[8 * s - 4 : 8 * s]] for s in range(first, 7)
    }
    return Steps(samples, {step: 4.0 + losses.get(f"at{step}", 0.0) for step in samples})


def test_samples_that_are_missing_or_come_twice_are_found():
    assert check_samples(PAIR, _steps(1), _steps(4)) == 24
    with pytest.raises(Failed, match="step 4 has samples"):
        check_samples(PAIR, _steps(1), _steps(4, shift=-20))
    with pytest.raises(Failed, match="it goes on with step 5"):
        check_samples(PAIR, _steps(1), _steps(5))
    other = Pair("gpt", parsed("dp1"), parsed("dp2 b16"))
    with pytest.raises(Failed, match=r"samples \[10\] come too often, \[30\] are missing"):
        check_samples(other, _steps(1), _steps(4, shift=-20))
    twice = _steps(1, shift=1)
    with pytest.raises(Failed, match="the epochs do not have every sample once"):
        check_samples(PAIR, twice, _steps(4, shift=1))


def test_losses_that_are_apart_are_found():
    assert check_losses(_steps(1), _steps(4, at5=4e-6), 1e-5) == pytest.approx(1e-6)
    with pytest.raises(Failed, match="losses are"):
        check_losses(_steps(1), _steps(4, at5=4e-3), 1e-5)


def test_state_that_differs_is_found(tmp_path):
    for name, change in (("one", 0.0), ("same", 0.0), ("other", 1e-7)):
        shards = {}
        for kind in ("model", "exp_avg"):
            values = torch.ones(8)
            values[3] += change if kind == "exp_avg" else 0.0
            shards[kind] = [Shard("w", (8,), None, (), values)]
        save(
            tmp_path / name, 3, shards, {"consumed_samples": 24, "optimizer_steps": 3}, None, "cpu"
        )
    place = tmp_path / "one" / "iter_0000003"
    assert check_state(place, tmp_path / "same") == 2
    with pytest.raises(Failed, match="exp_avg: 1 tensors differ after loading, w for one"):
        check_state(place, tmp_path / "other")


def test_the_table_says_what_failed():
    rows = [{"name": pair.name, "samples": 24, "tensors": 84, "loss": 1e-7} for pair in PAIRS[:2]]
    rows.append({"name": PAIRS[2].name, "failed": "samples are missing"})
    text = table({"pairs": rows, "refused": [{"name": REFUSED[0].name, "says": "no"}]})
    assert "2 of 3 pairs passed" in text and "**samples are missing**" in text and "| no |" in text
