"""One plan has one predicted time, whichever tool shows it, and an edited plan its own."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron_merak.cluster import Cluster, Device, Link
from megatron_merak.pipeline_parallel.pictures.palette import time_text
from megatron_merak.plan import Plan, prediction
from megatron_merak.planner import priced

TOOLS = Path(__file__).parents[2] / "tools"
FLAGS = """--world-size 8 --num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500
    --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2""".split()
LAYOUTS = {
    "1f1b": "--tensor-model-parallel-size 2",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2 --no-overlap-grad-reduce",
    "auto": "--tensor-model-parallel-size 2 --tp-comm-overlap auto --recompute-granularity full",
    "gpipe": "--tensor-model-parallel-size 2 --tp-comm-overlap sub-pipeline --sequence-parallel",
    "zb-h1": "--data-parallel-sharding-strategy optim_grads_params --recompute-granularity full",
    "zb-v": "--tensor-model-parallel-size 2 --tp-comm-overlap pair --bf16 --grad-reduce-in-bf16",
    "shifted": "--tensor-model-parallel-size 2 --recompute-granularity full --use-distributed-optimizer",
    "early-recompute": "--recompute-granularity full --train-samples 640 --rampup-batch-size 8 8 64",
}
OWN = Cluster(
    Device("Card 1", 2e12, 1e12, 1e11, 2**34, 0.5),
    2,
    Link("in", 1e-6, 1e11),
    Link("out", 1e-5, 1e9),
    "own",
)


@pytest.fixture
def run(monkeypatch, capsys):
    def printed(tool: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{tool}.py", *map(str, arguments)])
        runpy.run_path(str(TOOLS / f"{tool}.py"), run_name="__main__")
        return capsys.readouterr().out

    return printed


@pytest.fixture
def made(run, tmp_path):
    """Flags of a layout -> the file of its plan for a cluster of one's own."""

    def stored(name: str) -> Path:
        OWN.to_json(tmp_path / "own.json")
        more = [
            "--pipeline-schedule",
            name,
            *LAYOUTS[name].split(),
            "--save",
            tmp_path / "plan.json",
        ]
        run("plan", "show", *FLAGS, "--device", tmp_path / "own.json", *more)
        return tmp_path / "plan.json"

    return stored


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_untouched_plan_is_priced_as_it_was_stored(made, name):
    plan = Plan.from_json(made(name).read_text())
    assert plan.cluster == OWN and plan.predicted_time > 0
    assert plan.overlap_grad_reduce == ("--no-overlap-grad-reduce" not in LAYOUTS[name])
    assert priced(plan) == plan


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tool_tells_the_same_time(run, made, name):
    path = made(name)
    text = prediction(Plan.from_json(path.read_text()))
    assert text.startswith("predicted on Card 1 (own): ")
    for tool, *arguments in (
        ("plan", "show", path),
        ("simulate", "--plan", path),
        ("report_memory", "--plan", path),
    ):
        assert text in run(tool, *arguments), tool


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_simulated_step_is_the_predicted_one(run, made, name):
    plan = Plan.from_json(made(name).read_text())
    told = run("simulate", "--plan", made(name), "--schedule", "1f1b")
    assert f", step {1e3 * plan.predicted_time:.3f} ms with what follows\n" in told
    assert f"bubble {plan.predicted_bubble:.1%}, step" in told
    header, _, row = ([*line.split("  ")] for line in told.splitlines()[-3:])
    assert "step" in " ".join(header) and time_text(plan.predicted_time) in " ".join(row)


def test_batches_that_grow_end_with_the_plan(run, tmp_path):
    """The table of sizes has the plan's own time for the largest, and less for smaller ones."""
    path = tmp_path / "plan.json"
    told = run(
        "plan",
        "show",
        *FLAGS,
        *"--train-samples 640 --rampup-batch-size 8 8 64 --save".split(),
        path,
    )
    plan = Plan.from_json(path.read_text())
    rows = [
        line.split()
        for line in told.splitlines()
        if re.fullmatch(r" +[0-9]+ +[0-9,]+ +[0-9]+ +[0-9.]+ m?s", line)
    ]
    assert [row[0] for row in rows] == ["8", "16"] and rows[-1][-2:] == prediction(plan).split(
        ": "
    )[1].split()[:2]
    assert float(rows[0][-2]) < float(rows[1][-2])


def test_the_simulator_tells_what_follows_the_pipeline(run, made):
    path = made("1f1b")
    told = run("simulate", "--plan", path)
    makespan = float(re.search(r"modelled makespan ([0-9.]+) ms", told)[1])
    more, reductions, optimizer = re.search(
        r"; ([0-9.]+) µs of it behind the pipeline \(gradients ([0-9.]+) µs, optimizer ([0-9.]+) µs\)",
        told,
    ).groups()
    plan = Plan.from_json(path.read_text())
    assert makespan + float(more) / 1e3 == pytest.approx(1e3 * plan.predicted_time, abs=1e-3)
    assert (
        float(reductions) + float(optimizer) == pytest.approx(float(more), abs=0.1)
        and float(reductions) > 0
    )


def test_an_edited_plan_shows_its_own_numbers(run, made):
    path = made("1f1b")
    plain = json.loads(path.read_text())
    before = prediction(Plan.from_dict(plain))
    plain["cluster"]["between"]["bandwidth"] /= 1000
    plain["stages"] = [{"first": 0, "last": 2}, {"first": 2, "last": 8}]
    path.write_text(json.dumps(plain))
    after = prediction(priced(Plan.from_dict(plain)))
    assert after != before
    for tool, *arguments in (
        ("plan", "show", path),
        ("simulate", "--plan", path),
        ("report_memory", "--plan", path),
    ):
        told = run(tool, *arguments)
        assert after in told and before not in told, tool
