"""Directories of runs whose numbers are known by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

from megatron_merak.arguments import changed, parse
from megatron_merak.config import Config
from megatron_merak.pipeline_parallel.pictures.trace import messages_between, timeline_of
from megatron_merak.pipeline_parallel.pictures.view import View
from megatron_merak.pipeline_parallel.simulate import Event
from megatron_merak.plan import Plan, layout
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.planner.predict import timeline
from megatron_merak.report.run_files import RunFiles

FLAGS = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --mock-data
    --micro-batch-size 4 --global-batch-size 32 --train-iters 60 --lr 1e-3 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2"""
WORK = {"tokens": 128, "flops": 5e9, "ranks": 8, "peak": None, "clock": ""}
SAMPLES = 32


def made(iterations: int = 60) -> tuple[Config, Plan]:
    config = parse([*FLAGS.split()])
    return config, make_plan(config, 8)


def start(config: Config, plan: Plan, **more) -> dict:
    """What a start of the run writes into run.json."""
    facts = {"time": "2026-11-25T10:00:00+00:00", "command": "merak-pretrain --lr 1e-3", "ranks": 8}
    facts |= {
        "layout": layout(plan),
        "device": "cpu",
        "device_name": "Some CPU",
        "iterations": 60,
        "work": WORK,
    }
    facts |= {
        "settings": {flag: list(pair) for flag, pair in changed(config).items()},
        "versions": {"torch": "2.13.0"},
    }
    return facts | more


def loss(iteration: int, shift: float = 0.0) -> float:
    return 4.0 + 4.0 * math.exp(-iteration / 20) + 0.05 * math.sin(iteration) + shift


def train(files: RunFiles, first: int, last: int, shift: float = 0.0, **more) -> None:
    """Write the lines of iterations ``first`` to ``last``, and an evaluation every 20."""
    files.began(first - 1, SAMPLES * (first - 1))
    for iteration in range(first, last + 1):
        row = {
            "kind": "train",
            "iteration": iteration,
            "consumed_samples": SAMPLES * iteration,
            "seconds": 0.4,
        }
        row |= {
            "loss": loss(iteration, shift),
            "grad_norm": 1.0 + 1 / iteration,
            "learning_rate": 1e-3,
        }
        files.note(row | {"skipped": False} | more)
        if iteration % 20 == 0:
            files.note(
                {
                    "kind": "valid",
                    "iteration": iteration,
                    "loss": loss(iteration) + 0.1,
                    "perplexity": 100.0,
                }
            )


def measured(plan: Plan) -> View:
    """The step of a plan as if a run had measured it, 5 % slower than predicted."""
    shown = timeline(plan)
    events = [
        Event(e.rank, e.op, 1.05 * e.start, 1.05 * e.end, e.part, e.parts) for e in shown.events
    ]
    schedule = plan.schedule
    return View(
        timeline_of(schedule, events, messages_between(schedule, events)),
        "a step",
        "measured",
        timed=False,
    )


def resumed(directory: Path) -> Path:
    """A run of 60 iterations that was killed in its 58th and went on from 50."""
    config, plan = made()
    files = RunFiles(directory, start(config, plan), plan)
    train(files, 1, 57)
    files.close()
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "itera')
    files = RunFiles(directory, start(config, plan, time="2026-11-25T11:00:00+00:00"), plan)
    train(files, 51, 60, shift=0.5)
    files.measured([measured(plan)])
    files.close()
    return directory


def trainer(directory: Path, steps: int = 30) -> Path:
    """The output_dir of a HuggingFace trainer, with two checkpoints."""
    for last in (steps // 2, steps):
        entries = [
            {
                "epoch": step / steps,
                "grad_norm": 1.5,
                "learning_rate": 1e-4,
                "loss": loss(step),
                "step": step,
            }
            for step in range(5, last + 1, 5)
        ]
        for step in range(10, last + 1, 10):
            speed = {
                "eval_runtime": 1.0,
                "eval_samples_per_second": 9.0,
                "eval_steps_per_second": 3.0,
            }
            entries.append(
                {"eval_loss": loss(step) + 0.1, "eval_accuracy": step / 100, "step": step, **speed}
            )
        place = directory / f"checkpoint-{last}"
        place.mkdir(parents=True)
        state = {
            "global_step": last,
            "max_steps": steps,
            "logging_steps": 5,
            "log_history": entries,
        }
        (place / "trainer_state.json").write_text(json.dumps(state))
        (place / "training_args.json").write_text(
            json.dumps({"learning_rate": 1e-4, "bf16": False, "seed": 42})
        )
    return directory


def with_plan(checkpoint: Path, plan: Plan) -> None:
    """Let a checkpoint hold the plan, as those of MerakTrainer do."""
    place = checkpoint / "training_state" / "iter_0000030"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(json.dumps({"meta": {"plan": replace(plan).to_dict()}}))
