"""The page of mixtures has a row for each contestant, and the contestants run."""

import pytest

from benchmarks import EVIDENCE
from benchmarks.trainers import data_parallel, experts, two_lines


def test_the_page_has_a_row_for_each_contestant():
    text = (EVIDENCE / "experts.md").read_text(encoding="utf-8")
    table = text.partition(experts.BEGIN)[2].partition(experts.END)[0]
    beside = text.partition(experts.REPLICAS_BEGIN)[2].partition(experts.REPLICAS_END)[0]
    for shape in experts.SHAPES:
        for way in experts.WAYS:
            row = f"| {shape} | {way} |"
            assert row in (beside if experts.OVER_REPLICAS in way else table)
            assert "EP over" not in way or row in beside


@pytest.mark.long
@pytest.mark.parametrize("only", ["Mixtral, HF Trainer", "Mixtral, MerakTrainer, experts"])
def test_the_contestants_run(only):
    assert experts.main(["--quick", "--only", only]) == 0


@pytest.mark.parametrize("bench", [experts, data_parallel, two_lines], ids=lambda x: x.__name__)
def test_a_choice_of_no_row_is_an_error(bench):
    with pytest.raises(SystemExit, match="--only nothing: no row has this in its name"):
        bench.main(["--only", "nothing"])
