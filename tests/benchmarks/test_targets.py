"""The page of targets has the table that its benchmark writes, and commands that are read."""

import pytest

from benchmarks import EVIDENCE
from benchmarks.modelled import targets


def page() -> str:
    text = (EVIDENCE / "targets.md").read_text(encoding="utf-8")
    return text.partition(targets.BEGIN)[2].partition(targets.END)[0].strip()


def test_the_page_has_the_commands():
    commands = page().partition("```bash\n")[2].partition("\n```")[0].splitlines()
    assert commands == [target.command for target in targets.TARGETS]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "target", targets.TARGETS, ids=lambda target: f"{target.model} {target.length}"
)
def test_the_page_has_what_plans_say(target):
    assert targets.row(target, targets.planned(target)) in page().splitlines()
