"""Commands: one table, no torch before a command line is understood, and one line where all ranks
say the same.
"""

import importlib
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import megatron_merak
from megatron_merak.cli import pretrain
from megatron_merak.cli.commands import COMMANDS, MODULE
from megatron_merak.cli.launcher import without_flag
from megatron_merak.errors import MerakError

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = ("torch", "numpy", "transformers", "matplotlib")
SCRIPTS = {"pretrain": "pretrain_gpt.py", "pretrain-hf": "pretrain_hf.py"}
SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --mock-data --vocab-size 60 --log-interval 1""".split()
# Runs command lines after each other in one process where no heavy library can be imported.
SEEN = f"""
import io, contextlib, runpy, sys
sys.modules.update(dict.fromkeys({HEAVY}))
for line in LINES:
    sys.argv = line
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(line[0], run_name="__main__")
        print(line, "does not end")
    except SystemExit:
        print(line, "ends")
    except ImportError as error:
        print(line, error)
"""
TOOLS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tools/*.py"))


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | settings
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_entry_points_are_the_commands():
    assert PROJECT["project"]["scripts"] == {
        f"merak-{name}": command.target for name, command in COMMANDS.items()
    }
    for command in COMMANDS.values():
        module, _, function = command.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_version_is_that_of_the_package():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "megatron_merak.__version__"
    }
    assert run("-m", "megatron_merak", "--version").stdout == f"{megatron_merak.__version__}\n"


def test_no_help_and_no_unknown_flag_imports_a_heavy_library():
    lines = [
        [script, flag]
        for script in [*SCRIPTS.values(), *TOOLS]
        for flag in ("--help", "--no-such-flag")
    ]
    lines += [["tools/plan.py", "show", "--no-such-flag"], ["pretrain_gpt.py", "--num-layers", "2"]]
    done = run("-c", SEEN.replace("LINES", repr(lines)))
    assert done.returncode == 0, done.stderr
    shown = done.stdout.splitlines()
    assert len(shown) == len(lines) and [line for line in shown if not line.endswith(" ends")] == []


def test_the_module_lists_commands_and_starts_them():
    listed = run("-m", "megatron_merak").stdout
    assert all(
        re.search(rf"^  {name} +{re.escape(command.text)}$", listed, re.M)
        for name, command in COMMANDS.items()
    )
    unknown = run("-m", "megatron_merak", "plam")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "command plam: is not known. The nearest is plan.\n",
    )
    shown = run("-m", "megatron_merak", "plan", "show", "nowhere.json")
    assert shown.returncode == 1 and shown.stderr.startswith(f"{MODULE} plan: plan nowhere.json: ")


def test_the_number_of_ranks_is_left_out_where_ranks_are_started():
    flags = [
        "--lr",
        "1",
        "--nproc-per-node",
        "8",
        "--bf16",
        "--nproc-per-node=4",
        "--tokenizer-model",
        "x",
    ]
    assert without_flag(flags) == ["--lr", "1", "--bf16", "--tokenizer-model", "x"]


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (
            ["--nproc-per-node", "3", "--tensor-model-parallel-size", "2"],
            2,
            "the number of ranks 3: is not a multiple",
        ),
        (["--nproc-per-node", "many"], 2, "--nproc-per-node many: it is not a number of ranks"),
        pytest.param(
            ["--nproc-per-node", "2", "--load", "nowhere", "--exit-on-missing-checkpoint"],
            1,
            "rank . --load nowhere: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_mistake_is_told_once_and_nothing_else_is(flags, status, told):
    done = run("-m", "megatron_merak", "pretrain", *SMALL, "--train-iters", "2", *flags)
    assert done.returncode == status and len(done.stderr.splitlines()) == 1, done.stderr
    assert re.match(told.replace("rank .", r"rank [01]:"), done.stderr)


def test_under_torchrun_ranks_tell_a_mistake_once():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*torchrun, "pretrain_gpt.py", "--num-layer", "4")
    assert done.returncode != 0
    assert done.stderr.count("flag --num-layer: is not known. The nearest is --num-layers.") == 1


def test_an_interrupted_run_says_so_in_one_line():
    """As Ctrl-C does it: the terminal sends the signal to the launcher and to every rank."""
    command = [
        sys.executable,
        "-m",
        "megatron_merak",
        "pretrain",
        *SMALL,
        "--train-iters",
        "1000000",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [*command, "--nproc-per-node", "2", "--tensor-model-parallel-size", "2"]
    with subprocess.Popen(
        started, cwd=ROOT, env=environment, start_new_session=True, **pipes
    ) as job:
        for line in job.stdout:
            if "consumed samples" in line:
                break
        os.killpg(job.pid, signal.SIGINT)
        _, told = job.communicate(timeout=60)
    assert (job.returncode, told) == (130, f"{MODULE} pretrain: interrupted\n")


def test_an_error_that_was_not_foreseen_comes_with_its_traceback(monkeypatch, capsys):
    error = MerakError(
        "KeyError",
        "'x'",
        "on rank 1, this failure was not foreseen",
        "Read the traceback of that rank",
    )
    error.trace = "Traceback (most recent call last):\n  ...\nKeyError: 'x'"

    def fail():
        raise error

    monkeypatch.setattr(pretrain, "position", fail)
    monkeypatch.setattr(pretrain, "_abandon", sys.exit)
    with pytest.raises(SystemExit):
        pretrain._train(None, None, ())
    assert capsys.readouterr().err == f"{error.trace}\nrank ?: {error}\n"


SHOWN = """show --world-size 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --vocab-size 100 --micro-batch-size 2"""


@pytest.mark.parametrize(
    "words",
    ["", "--version", "plan --help", f"plan {SHOWN}", f"memory {SHOWN[5:]}", "simulate"],
    ids=lambda words: " ".join(words.split()[:2]) or "(none)",
)
def test_a_reader_that_leaves_ends_a_command_without_a_word(words):
    """``| head -1``: what is written into a pipe that nobody reads."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "megatron_merak", *words.split()]
    with os.fdopen(writes, "w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60
        )
    assert done.stderr == "" and done.returncode in (0, 128 + signal.SIGPIPE)
