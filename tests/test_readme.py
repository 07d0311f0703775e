"""What README shows is what the program prints."""

import re
from pathlib import Path

import pytest

from examples.train import MODEL, RECIPE, degrees
from megatron_merak.arguments import parse
from megatron_merak.plan import plan_table
from megatron_merak.planner.make import plan as make_plan
from tests.pages import answer, answers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NAMES = {"python tools/plan.py": "merak-plan", "python pretrain_gpt.py": "merak-pretrain"}


def excerpts(path):
    """(command, the lines that are shown of what it prints; ... stands for any) of a page's blocks
    of commands.
    """
    for block in re.findall(
        r"^```\w*\n(\$ .*?)^```$", (ROOT / path).read_text(), re.MULTILINE | re.DOTALL
    ):
        yield from answers(block)


PAGES = ("README.md", "docs/features.md", "docs/batches.md", "docs/data_parallel.md")
EXCERPTS = [each for page in PAGES for each in excerpts(page)]


@pytest.mark.parametrize(("command", "output"), EXCERPTS, ids=lambda text: text[:40])
def test_excerpts_are_what_commands_print(command, output):
    for name, here in NAMES.items():
        command = command.replace(name, here)
    printed = answer(f"{command} ").rstrip("\n").splitlines()
    parts = re.split(r"^ *\.\.\.\n", output.replace("rank 0: ", ""), flags=re.MULTILINE)
    for part in parts:
        lines = part.rstrip("\n").splitlines()
        places = [at for at in range(len(printed)) if printed[at : at + len(lines)] == lines]
        assert places, f"{command} does not print\n{part}but\n" + "\n".join(printed)
        printed = printed[places[0] + len(lines) :]
    assert output.rstrip().endswith("...") or not printed, f"{command} prints more"


def test_readme_is_short():
    assert len(README.split()) <= 1500


def test_the_plan_of_make_train_is_the_one_that_is_made():
    ranks, tensor, pipeline = degrees(0)
    layout = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    given = "--train-iters 160 --mock-data --vocab-size 8192 --save runs"
    config = parse([*MODEL.split(), *RECIPE.split(), *layout.split(), *given.split()])
    for line in plan_table(make_plan(config, ranks)).splitlines():
        assert f"\n{line}\n" in README, line
