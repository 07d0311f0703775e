"""Commands and what nobody means: each ends in one line, soon, and with a status that is not 0."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_merak.cli import from_megatron, plan, report, report_memory, simulate, verify
from megatron_merak.shell.values import LARGEST
from megatron_merak.strict_json import parse

ROOT = Path(__file__).parents[2]
FLAGS = """--world-size 4 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500
    --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2""".split()


def refused(main, *words: object) -> str:
    """The line with which a command ends."""
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert time.monotonic() - began < 20
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("NaN", "NaN is not a number"),
        ("[-Infinity]", "-Infinity is not a number"),
        ("1e400", "1e400 is too large a number"),
        ("9" * 5000, "is too large a number"),
        ('"\\ud800"', "is not UTF-8"),
        ('{"a\\u0000": 1}', "holds a NUL character"),
        ("[" * 10**5, "nested too deep"),
        ('{"nodes": [{"count": 1, "speed": 1, "count": 2}]}', "'count' is there twice"),
    ],
)
def test_json_with_what_cannot_be_computed_with_or_printed(text, told):
    with pytest.raises(ValueError, match=told):
        parse(text)


def test_json_of_logs_has_numbers_that_are_none():
    assert (
        str(parse('{"loss": NaN, "norm": Infinity}', finite=False)) == "{'loss': nan, 'norm': inf}"
    )
    assert parse('[1, -2.5, "é", null]') == [1, -2.5, "é", None]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "plan.json"
    plan.main(["show", *FLAGS, "--save", str(path)])
    return json.loads(path.read_text())


# The places and values that ended in tracebacks, or never.
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("state_bytes",), float("inf")),
        (("units", 0, "state_bytes"), float("nan")),
        (("units", 0, "flops"), 10**400),
        (("units", 0, "parameters"), 10**30),
        (("grid", "tp"), 10**30),
        (("grid", "tp"), 10**9),
        (("schedule", "name"), "\ud800"),
        (("cluster", "device", "name"), "\ud800"),
    ],
)
def test_odd_values_of_a_stored_plan(stored, tmp_path, place, value):
    changed = json.loads(json.dumps(stored))
    at = changed
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(changed))
    for main, words in (
        (plan.main, ["show"]),
        (simulate.main, ["--plan"]),
        (report_memory.main, ["--plan"]),
    ):
        assert str(path) in refused(main, *words, path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert "plan.json: it is damaged" in refused(report.main, tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["--microbatches", "99999999999999999999"],
        ["--ranks", "1000000000"],
        ["--chunks", "0", "--schedule", "auto"],
        ["--chunks", "99999999999999999999", "--schedule", "auto"],
        ["--group", "-1"],
        ["--forward", "nan"],
        ["--backward", "10,inf"],
        ["--transfer", "-1"],
        ["--overlap", "nan"],
        ["--trace", "/dev/zero"],
    ],
)
def test_odd_numbers_of_a_simulation(words):
    assert words[0] in refused(simulate.main, *words)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--world-size", "9" * 5000),
        ("--world-size", "1000000000"),
        ("--global-batch-size", "1000000000"),
    ],
)
def test_odd_numbers_of_a_plan(flag, value):
    flags = list(FLAGS)
    flags[flags.index(flag) + 1] = value
    assert refused(plan.main, "show", *flags)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_paths_that_are_no_text(path):
    for main, words in (
        (plan.main, ["show", path]),
        (plan.main, ["show", *FLAGS, "--save", path]),
        (report.main, [path]),
        (simulate.main, ["--html", path]),
        (verify.main, [path]),
        (from_megatron.main, [path]),
    ):
        assert refused(main, *words).startswith(f"{Path(sys.argv[0]).name}: argument a")


@pytest.mark.parametrize(
    "script",
    [
        "A=xxxx\n" + "A=$A$A$A$A\n" * 40,
        "A=(x y)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
        "A=" + "a" * 2000 + "\n" + "A=${A//a/$A}\n" * 9,
        "eval " * 2000 + "true\n",
        "A=${A:-" * 3000 + "}" * 3000 + "\n",
        "A=1;\n" * 10**5,
    ],
    ids=["text", "array", "replaced", "eval", "nested", "long"],
)
def test_a_script_without_an_end(tmp_path, capsys, script):
    path = tmp_path / "train.sh"
    path.write_text(f"{script}torchrun pretrain_gpt.py --num-layers 2 --save $A\n")
    began = time.monotonic()
    status = from_megatron.main([str(path)])
    told = capsys.readouterr()
    assert time.monotonic() - began < 20 and len(told.out) < 4 * LARGEST
    assert status == 1 and "$" in told.out or status == 2 and told.err.count("\n") == 1


def test_a_shells_integers_have_an_end(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text("A=$((9**64**64**64))\nB=" + "9" * 5000 + "\nif [ $B -gt 5 ]; then C=1; fi\n"
                    "torchrun --nproc-per-node $B pretrain_gpt.py --num-layers $A\n")  # fmt: skip
    assert from_megatron.main([str(path)]) == 1
    assert "CHANGES NUMBERS" in capsys.readouterr().out


def shell(line: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PY": sys.executable}
    words = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("$PY -m megatron_merak plan show ARGS | true", 141, ""),
        (
            "$PY -m megatron_merak plan show ARGS > /dev/full",
            1,
            "plan: standard output: No space left on device.",
        ),
        ("$PY -m megatron_merak plan show ARGS >&-", 1, "plan: standard output is closed."),
        ("$PY -m megatron_merak simulate 0<&- 2>&- > /dev/null", 0, ""),
        ("PYTHONIOENCODING=ascii $PY -m megatron_merak plan show ARGS > /dev/null", 0, ""),
        (
            "$PY -m megatron_merak pretrain --save $'a\\xff' >&-",
            2,
            "argument a\\udcff: is not UTF-8.",
        ),
    ],
    ids=["reader gone", "disk full", "closed", "others closed", "ascii", "pretrain"],
)
def test_standard_streams_of_all_kinds(line, status, told):
    ended = shell(line.replace("ARGS", " ".join(FLAGS)))
    assert (ended.returncode, ended.stderr.count("\n")) == (status, 1 if told else 0), ended.stderr
    assert told in ended.stderr
