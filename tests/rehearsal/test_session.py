"""The session on a rented GPU, rehearsed: it fits into its time, and planted failures end as they
should.

`make gpu-rehearsal` runs every step, and plants failures into all of them.
"""

import pytest

from tests.rehearsal import session as rehearsal
from tests.rehearsal.session import BUDGETS, STEPS, Different

FEW = tuple(step for step in STEPS if step.name in ("start", "7b gpt 8", "two ranks, memory"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """This tree, as it travels."""
    folder = tmp_path_factory.mktemp("tree")
    assert rehearsal.travelling(folder, None) < rehearsal.TRAVELS
    return folder


def test_both_calls_fit_into_their_time():
    seconds = rehearsal.estimates()
    assert all(seconds[part] < BUDGETS[part] for part in BUDGETS)
    assert all(step.estimate < step.limit for step in STEPS)
    assert len({step.file for step in STEPS}) == len(STEPS)


@pytest.mark.long
def test_failures_do_not_stop_what_comes_next(tree):
    first, second, _ = FEW
    arguments = [*rehearsal.only(*FEW), "--limit", str(rehearsal.HANG)]
    ended = rehearsal.session(tree, *arguments, plant=f"memory:{first.name};hang:{second.name}")
    rehearsal.wanted(ended, first, "out of memory")
    rehearsal.stacks(ended, second)
    assert ended.status == 1 and not rehearsal.remaining(tree)


def test_a_session_that_is_killed_keeps_what_it_has(tree):
    assert "of 2 steps" in rehearsal.killed(tree, FEW[:2])


def test_a_step_that_would_not_end_in_time_is_left_out(tree):
    ended = rehearsal.session(tree, *rehearsal.only(*FEW[:2]), "--budget", "30", plant="nothing")
    assert [ended.status_of(step.name) for step in FEW[:2]] == ["ok", "left out"]
    with pytest.raises(Different, match="out of memory was planted, it ended ok"):
        rehearsal.wanted(ended, FEW[0], "out of memory")


def test_what_is_wrong_is_told_at_once(tree, tmp_path):
    missing = rehearsal.started(tree, tmp_path, ["--kit", str(tmp_path)])
    assert "it has no manifest" in missing.communicate()[0] and missing.returncode == 2
    nothing = rehearsal.started(tree, tmp_path, ["--only", "no such step"])
    assert "no step. See --list" in nothing.communicate()[0] and nothing.returncode == 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_session_without_cuda_kernels_goes_on(tree):
    assert "MERAK_EXT=0" in rehearsal.without_kernels(tree, FEW[:1])
