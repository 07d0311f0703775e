"""What README shows is what the program prints."""

from pathlib import Path

from examples.train import MODEL, RECIPE, degrees
from megatron_merak.arguments import parse
from megatron_merak.planner.make import plan as make_plan

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_plan_of_make_train_is_the_one_that_is_made():
    ranks, tensor, pipeline = degrees(0)
    layout = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
    given = "--train-iters 160 --mock-data --vocab-size 8192 --save runs"
    config = parse([*MODEL.split(), *RECIPE.split(), *layout.split(), *given.split()])
    for line in str(make_plan(config, ranks)).splitlines():
        assert f"\n{line}\n" in README, line
