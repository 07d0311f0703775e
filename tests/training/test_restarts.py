"""Jobs whose ranks are killed, and which torchrun starts again; ``python -m tests.restarts`` has
more.
"""

import random

import pytest

from tests import restarts

CASES = {case.name: case for case in restarts.cases()}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "gpt-2-gloo-2-nodes",
        "trainer-2-merak_shm",
        pytest.param("gpt-2-gloo", marks=pytest.mark.slow),
    ],
)
def test_a_restarted_job_ends_as_an_undisturbed_one(name, tmp_path):
    case = CASES[name]
    model = restarts.make_model(tmp_path / "model")
    for folder in ("straight", "killed"):
        (tmp_path / folder).mkdir()
    expected = restarts.undisturbed(case, tmp_path / "straight", model)
    row = restarts.trial(case, 2, random.Random(1), tmp_path / "killed", model, expected)
    assert row["status"] == "bitwise", (row, (tmp_path / "killed" / "log").read_text()[-3000:])
    assert len(row["again"]) == 2
