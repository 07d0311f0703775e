"""Directories of runs are read as they were written: restarts, lines cut off, damage, HuggingFace's
logs.
"""

import json

import pytest

from megatron_merak.cli.report import main
from megatron_merak.errors import ConfigError, ReportError
from megatron_merak.plan import Plan
from megatron_merak.report.facts import facts_of
from megatron_merak.report.history import history_of
from megatron_merak.report.run_files import RunFiles

from .runs import SAMPLES, loss, made, resumed, start, train, trainer, with_plan


def test_of_iterations_that_were_repeated_the_later_ones_count(tmp_path):
    facts = facts_of(resumed(tmp_path / "run"))
    steps = facts.history.steps
    assert sorted(steps) == list(range(1, 61))
    assert {at: step.loss for at, step in steps.items()} == {
        at: loss(at, 0.5 * (at > 50)) for at in steps
    }
    assert [(one.iteration, one.number, one.repeated) for one in facts.history.starts] == [
        (0, 0, 0),
        (50, 1, 7),
    ]
    assert {step.samples for step in steps.values()} == {SAMPLES} and steps[
        51
    ].rate == SAMPLES / 0.4
    assert facts.history.evaluations == {"valid": {at: loss(at) + 0.1 for at in (20, 40, 60)}}
    assert facts.plan == made()[1] and facts.measured.clock == "measured" and len(facts.starts) == 2


def test_every_line_of_a_resumed_run_is_json(tmp_path):
    lines = (resumed(tmp_path) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("start") == 2


def test_the_plan_is_one_that_runs(tmp_path):
    assert Plan.from_json((resumed(tmp_path) / "plan.json").read_text()) == made()[1]


def test_a_run_that_starts_anew_forgets_what_came_after(tmp_path):
    config, plan = made()
    for last in (30, 12):
        files = RunFiles(tmp_path, start(config, plan), plan)
        train(files, 1, last)
        files.close()
    history = facts_of(tmp_path).history
    assert sorted(history.steps) == list(range(1, 13)) and history.evaluations["valid"] == {}
    assert history.starts[1].repeated == 30


def test_metrics_without_starts_are_read(tmp_path):
    rows = [
        {"kind": "train", "iteration": at, "loss": float(n)}
        for n, at in enumerate((1, 2, 3, 2, 3, 4))
    ]
    history = history_of(rows)
    assert {at: step.loss for at, step in history.steps.items()} == {1: 0.0, 2: 3.0, 3: 4.0, 4: 5.0}
    assert [(one.iteration, one.repeated) for one in history.starts] == [(1, 2)]


def test_a_line_that_is_cut_off_is_left_out_and_told(tmp_path):
    with open(resumed(tmp_path) / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "iteration": 6')
    facts = facts_of(tmp_path)
    assert max(facts.history.steps) == 60 and "is cut off" in facts.notes[0]


def damaged(directory, name, change):
    path = directory / name
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (
            "metrics.jsonl",
            lambda text: text.replace('{"kind"', "{kind", 1),
            r"line 1 is damaged .*: \{kind",
        ),
        (
            "metrics.jsonl",
            lambda text: text.replace("valid", "else"),
            r"line 22 is damaged \(its kind is none of",
        ),
        (
            "metrics.jsonl",
            lambda text: text.replace("0.4", '"x"', 1),
            r"line 2 is damaged \(its seconds is no number",
        ),
        (
            "metrics.jsonl",
            lambda text: "[]\n" + text,
            r"line 1 is damaged \(it is no JSON object\)",
        ),
        (
            "run.json",
            lambda text: text[:-9],
            r"run.json: it is damaged .* has no settings and versions",
        ),
        ("run.json", lambda text: "{}", r"run.json: it is damaged \(it is no object of format 1\)"),
        ("plan.json", lambda text: text.replace('"grid"', '"grit"'), r"plan.json: it is damaged"),
        ("timeline.json", lambda text: text[:100], r"timeline.json: it is damaged"),
    ],
)
def test_damage_is_named_with_its_file(tmp_path, name, change, told):
    damaged(resumed(tmp_path), name, change)
    with pytest.raises(ReportError, match=told):
        facts_of(tmp_path)


def test_a_run_does_not_write_beside_a_damaged_record(tmp_path):
    damaged(resumed(tmp_path), "run.json", lambda text: "[]")
    with pytest.raises(ConfigError, match="--run-dir .*: run.json in it cannot be read"):
        RunFiles(tmp_path, {}, made()[1])


def test_places_without_facts(tmp_path):
    (tmp_path / "file").touch()
    for place, told in (
        ("nowhere", "does not exist"),
        ("file", "is not a directory"),
        ("", "has neither metrics"),
    ):
        with pytest.raises(ReportError, match=f"RUN_DIR .*: it {told}"):
            facts_of(tmp_path / place)


def test_the_newest_state_of_a_trainer_is_read(tmp_path):
    facts = facts_of(trainer(tmp_path / "out"))
    history = facts.history
    assert {at: step.loss for at, step in history.steps.items()} == {
        at: loss(at) for at in range(5, 31, 5)
    }
    assert history.evaluations == {"valid": {at: loss(at) + 0.1 for at in (10, 20, 30)}}
    assert history.metrics == {"accuracy": {10: 0.1, 20: 0.2, 30: 0.3}}
    assert (
        facts.iterations == 30
        and facts.arguments == {"learning_rate": 1e-4, "seed": 42}
        and facts.plan is None
    )
    assert facts_of(tmp_path / "out" / "checkpoint-15").history.last == 15
    with_plan(tmp_path / "out" / "checkpoint-30", made()[1])
    assert facts_of(tmp_path / "out").plan == made()[1]
    damaged(tmp_path / "out" / "checkpoint-30", "trainer_state.json", lambda text: text[:-4])
    with pytest.raises(ReportError, match="checkpoint-30/trainer_state.json: it is damaged"):
        facts_of(tmp_path / "out")


def test_the_command_names_what_it_wrote(tmp_path, capsys):
    main([str(resumed(tmp_path / "run"))])
    main([str(tmp_path / "run"), "--output", str(tmp_path / "page.html")])
    assert (
        capsys.readouterr().out == f"wrote {tmp_path}/run/report.html\nwrote {tmp_path}/page.html\n"
    )
    assert (tmp_path / "run" / "report.html").read_bytes() == (tmp_path / "page.html").read_bytes()
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "run"), "--output", str(tmp_path)])
    assert "--output" in end.value.code and "it is a directory" in end.value.code
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "none")])
    assert "RUN_DIR" in end.value.code and "does not exist" in end.value.code
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
