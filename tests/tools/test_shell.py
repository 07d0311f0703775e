"""What merak-from-megatron makes of shell scripts is what bash makes of them, or it says that it does
not follow them.
"""

import re
from pathlib import Path

import pytest

from tests.bash_judge import Judge, judged
from tests.shell_generator import Generator


def scripts(name: str) -> dict[str, str]:
    """The scripts of a file, by name."""
    text = Path(__file__).with_name("megatron").joinpath(f"{name}.txt").read_text()
    parts = re.split(r"^### (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


FOLLOWED = scripts("followed")
TOLD = scripts("told")
ASKED = scripts("asked")
ENVIRONMENTS = ({}, {"E1": "a b", "E2": "1"}, {"E1": "3", "E2": ""})


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Judge:
    return Judge(tmp_path_factory.mktemp("judge"))


@pytest.mark.parametrize("name", FOLLOWED)
def test_bash_starts_the_same(name, judge):
    for given in ENVIRONMENTS[:2]:
        verdict = judged(judge, FOLLOWED[name], given, {})
        assert verdict.told == (), str(verdict)
        assert verdict.same and len(verdict.ours) == 1, str(verdict)


@pytest.mark.parametrize("name", TOLD)
def test_what_is_not_followed_is_told(name, judge):
    verdict = judged(judge, TOLD[name], {}, {})
    assert verdict.told, str(verdict)


@pytest.mark.parametrize("name", ASKED)
def test_what_decides_is_asked_for(name, judge):
    script = ASKED[name]
    given = dict(re.findall(r"(\w+)=([^,]*)", name.partition(": ")[2]))
    verdict = judged(judge, script, given, {})
    asked = {told.partition(":")[0] for told in verdict.told}
    assert asked == given.keys(), str(verdict)
    answered = judged(judge, script, given, given)
    assert answered.told == () and answered.same and len(answered.ours) == 1, answered


def strays(judge: Judge, seed: int) -> list[str]:
    """What bash makes of a random script and we do not, without saying so."""
    script = Generator(seed).script()
    found = []
    given = ENVIRONMENTS[seed % len(ENVIRONMENTS)]
    verdict = None
    for known in ({}, {"E1": None, "E2": None, **given}):
        verdict = judged(judge, script, given, known, verdict)
        noted = [note for note in verdict.notes if known == {} or "defaults" not in note]
        # where there is no command, the converter says so and ends with status 2
        told = verdict.told or noted or verdict.broken or not verdict.text
        if not verdict.same and not told:
            found.append(f"seed {seed}, {given}, {known}\n{script}\n{verdict}")
    return found


def test_random_scripts(judge):
    assert [each for seed in range(150) for each in strays(judge, seed)] == []


@pytest.mark.long
def test_more_random_scripts(judge):
    assert [each for seed in range(150, 600) for each in strays(judge, seed)] == []
