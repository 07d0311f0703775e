"""What is wrong with a command line is told in one line by every command: what, value, reason,
remedy.
"""

import json

import pytest

from megatron_merak.cli import (
    doctor,
    inspect_checkpoint,
    launch,
    plan,
    preprocess_data,
    report,
    report_memory,
    simulate,
    verify,
)
from megatron_merak.config.command_line import mistake

WRITES = ["--input", "x", "--output-prefix", "y", "--tokenizer-type"]


@pytest.mark.parametrize(
    ("main", "words", "told"),
    [
        (plan.main, [], "command (missing): it is needed."),
        (
            plan.main,
            ["shw"],
            "command shw: it is none of show, search, diff, calibrate. The nearest is show.",
        ),
        (plan.main, ["show", "--lr"], "--lr (no value): expected one argument."),
        (report_memory.main, ["--plan"], "--plan (no value): expected one argument."),
        (report.main, [], "RUN_DIR (missing): it is needed."),
        (verify.main, ["x", "--nope"], "flag --nope: is not known."),
        (launch.main, ["--nproc-per-node", "x", "y"], "--nproc-per-node x: it is not a whole num"),
        (
            launch.main,
            ["--nproc-per-node", "2", "pretrian"],
            "script pretrian: the file does not ex",
        ),
        (simulate.main, ["--schedule", "1f1"], "--schedule 1f1: it is neither a file nor one of"),
        (doctor.main, ["--jsn"], "flag --jsn: is not known. The nearest is --json."),
        (doctor.main, ["--json=x"], "--json x: it is a switch. Give it alone."),
        (simulate.main, ["bogus"], "argument bogus: belongs to no flag."),
        (simulate.main, ["--overlap", "x"], "--overlap x: it is not a number."),
        (inspect_checkpoint.main, ["a", "--health", "--diff", "b"], "--diff (given): it does not"),
        (preprocess_data.main, WRITES[:2], "--output-prefix, --tokenizer-type (missing): they "),
        (preprocess_data.main, [*WRITES, "Nul"], "--tokenizer-type Nul: it is none of Hugging"),
        (preprocess_data.main, [*WRITES, "NullTokenizer", "--workers", "0"], "--workers 0: it is"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(main, words, told, capsys):
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    text = capsys.readouterr().err or f"{status}\n"
    assert f": {told}" in text and text.count("\n") == 1 and status not in (0, None)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("invalid choice: 'a' (choose from b, c)", "--x a: it is none of b, c. Use one of these."),
        ("invalid Path value: 'a'", "--x a: it is not a Path. See --help."),
        ("something newer", "--x (given): something newer. See --help."),
    ],
)
def test_what_other_versions_of_argparse_say_is_told_likewise(message, told):
    assert str(mistake("--x", message)) == told


@pytest.mark.parametrize("kind", ["{}", '{"format": 1, "starts": []}', "[1]", "1 2"])
def test_another_file_than_a_plan_is_answered_with_the_plan_beside_it(kind, tmp_path):
    (tmp_path / "run.json").write_text(kind)
    with pytest.raises(SystemExit, match="Give a file that merak-plan show --save FILE.json"):
        plan.main(["show", str(tmp_path / "run.json")])
    (tmp_path / "plan.json").write_text(json.dumps({"grid": 1, "units": 1, "stages": 1}))
    for place in ("run.json", ""):
        with pytest.raises(SystemExit, match=f"Give {tmp_path}/plan.json.$") as caught:
            plan.main(["show", str(tmp_path / place)])
        assert "\n" not in str(caught.value.code)
    with pytest.raises(SystemExit, match="plan.json: it has no schedule. Make the plan anew"):
        plan.main(["show", str(tmp_path / "plan.json")])
