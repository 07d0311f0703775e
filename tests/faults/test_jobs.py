"""Forty jobs with a fault each: they end in the time that docs/evidence/reliability.md says and go
on, or train on.
"""

import os
from pathlib import Path

import pytest

from tests.faults.jobs import CASES, STEPS, Case, start
from tools.faults.watch import unmount

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Door -> (step, loss) of its steps without a fault."""
    known: dict[str, list[tuple[int, str]]] = {}

    def steps(door: str) -> list[tuple[int, str]]:
        if door not in known:
            outcome, known[door] = start(
                None, door, tmp_path_factory.mktemp("undisturbed") / "run", 600.0
            )
            assert outcome.status == 0 and len(known[door]) == STEPS, outcome.output
        return known[door]

    return steps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_with_a_fault(case: Case, undisturbed, tmp_path: Path):
    if case.disk is not None and os.geteuid() != 0:
        pytest.skip("mounts a file system: needs root")
    wanted = undisturbed(case.door)
    directory = tmp_path / "run"
    try:
        outcome, steps = start(case, case.door, directory, 240.0)
        assert outcome.came, outcome.output
        assert outcome.ended, f"it hangs:\n{outcome.output}"
        if case.within is None:
            assert outcome.status == 0 and steps == wanted, outcome.output
            return
        assert outcome.status != 0, outcome.output
        assert outcome.seconds <= case.within, f"{outcome}\n{outcome.output}"
        assert outcome.named or not case.named, f"{outcome}\n{outcome.output}"
        if case.resumes:
            again, steps = start(None, case.door, directory, 600.0)
            assert again.status == 0 and steps[0][0] >= 3 and steps == wanted[-len(steps) :], (
                again.output
            )
    finally:
        if case.disk is not None:
            unmount(directory)


def test_there_are_forty():
    assert len(CASES) >= 40 and len(set(map(str, CASES))) == len(CASES)
