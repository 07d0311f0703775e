"""The page of mixtures has a row for each contestant, and the contestants run."""

import pytest

from benchmarks import EVIDENCE
from benchmarks.trainers import experts


def test_the_page_has_a_row_for_each_contestant():
    text = (EVIDENCE / "experts.md").read_text(encoding="utf-8")
    table = text.partition(experts.BEGIN)[2].partition(experts.END)[0]
    rows = [f"| {shape} | {way} |" for shape in experts.SHAPES for way in experts.WAYS]
    assert all(row in table for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("only", ["Mixtral, HF Trainer", "Mixtral, MerakTrainer, experts"])
def test_the_contestants_run(only):
    assert experts.main(["--quick", "--only", only]) == 0
