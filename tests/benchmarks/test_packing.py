"""The page has the benchmark's table, and its four ways of the same documents agree."""

import pytest

from benchmarks.trainers import packing


def test_the_page_has_the_table():
    page = (
        packing.PAGE.read_text(encoding="utf-8")
        .partition(packing.BEGIN)[2]
        .partition(packing.END)[0]
    )
    assert all(f"| {way} |" in page for way in packing.WAYS)


@pytest.mark.long
def test_all_ways_train_alike(capsys):
    """Losses are compared inside."""
    packing.main(["--quick"])
    printed = capsys.readouterr().out
    assert all(f"| {way} |" in printed for way in packing.WAYS)
