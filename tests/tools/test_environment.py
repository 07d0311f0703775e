"""What a make target asks of an environment: no more than it uses, and no network where that is
there.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import environment

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DEVELOPER = (
    "ruff",
    "hypothesis",
    "pytest-xdist",
    "pytest-timeout",
    "pybind11",
    "ninja",
    "peft",
    "matplotlib",
)


def needs(target):
    """As the Makefile passes them."""
    assert re.search(rf"^{target}:", MAKEFILE, re.M), target
    said = dict(re.findall(r"^(\w+) = (.*)$", MAKEFILE, re.M))
    own = [
        line
        for names, line in re.findall(r"^([\w -]+): NEEDS = (.*)$", MAKEFILE, re.M)
        if target in names.split()
    ]
    return (own or [said["NEEDS"]])[0].split()


@pytest.fixture
def without(monkeypatch):
    """Makes this interpreter one that lacks some libraries, and fails where anything would be
    installed.
    """
    original = environment.metadata.version

    def bar(*names):
        def version(name):
            if name in names:
                raise environment.metadata.PackageNotFoundError(name)
            return original(name)

        monkeypatch.setattr(environment.metadata, "version", version)

    monkeypatch.setattr(
        environment, "install", lambda *arguments: pytest.fail("this would call pip")
    )
    return bar


@pytest.mark.parametrize("target", ["gpu", "doctor", "bench", "parity"])
def test_targets_run_without_the_developers_tools(target, without, tmp_path):
    without(*DEVELOPER)
    assert environment.find(tmp_path / "none", needs(target)) == Path(sys.executable)


def test_tests_need_no_ruff_and_style_does(without, tmp_path):
    without("ruff")
    assert environment.find(tmp_path / "none", needs("test")) == Path(sys.executable)
    assert environment.find(tmp_path / "none", needs("lint")) is None
    assert [line.partition(">")[0] for line in environment.missing(needs("lint"))] == ["ruff"]


def test_tests_say_that_style_was_not_checked():
    recipe = subprocess.run(
        ["make", "-n", "test", "PY=false"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    check = next(line for line in recipe.splitlines() if "is not checked" in line)
    done = subprocess.run(["sh", "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "style is not checked: false has no ruff\n")


@pytest.mark.parametrize(("name", "draws"), [("search", True), ("servers", True), ("step", False)])
def test_benchmarks_that_draw_need_pictures(name, draws):
    recipe = subprocess.run(
        ["make", "-n", "bench", f"NAME={name}", "PY=true"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "--needs dependencies accelerate" in recipe and ("pictures" in recipe) == draws


def test_what_is_lacking_is_installed_for_all_targets(without, monkeypatch, tmp_path):
    without("torch")
    made = []
    monkeypatch.setattr(
        environment, "install", lambda venv, pinned: made.append((venv, pinned)) or sys.executable
    )
    monkeypatch.setattr(environment, "build", lambda python: None)
    monkeypatch.setattr(
        sys, "argv", ["environment.py", "--venv", str(tmp_path / "none"), "--needs", "torch"]
    )
    environment.main()
    assert made == [(tmp_path / "none", False)]
    assert {
        re.match(r"[\w-]+", line).group()
        for line in environment.requirements(environment.EVERYTHING)
    } > {"ruff"}


def test_commands_that_are_new_are_installed_into_an_environment_that_has_others(
    monkeypatch, tmp_path
):
    assert environment.new_commands(tmp_path) == []
    command = environment.interpreter(tmp_path).parent / "merak-plan"
    command.parent.mkdir()
    command.touch()
    assert "merak-convert" in environment.new_commands(tmp_path)
    assert "merak-plan" not in environment.new_commands(tmp_path)
    commands = []
    monkeypatch.setattr(environment, "find", lambda venv, *_: environment.interpreter(venv))
    monkeypatch.setattr(
        environment.subprocess, "run", lambda command, **_: commands.append(command)
    )
    monkeypatch.setattr(environment, "build", lambda python: None)
    monkeypatch.setattr(
        sys, "argv", ["environment.py", "--venv", str(tmp_path), "--needs", "torch"]
    )
    environment.main()
    assert commands[0][-2:] == ["--editable", str(ROOT)] and len(commands) == 1


def test_the_oldest_environment_has_the_lower_bounds():
    lines = environment.requirements(["test"], pinned=True)
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {"torch", "transformers", "accelerate", "peft", "numpy"} <= pins.keys()
    bounds = dict(
        re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    )
    assert pins == {name: f"{bounds[name]}.*" for name in pins}
    assert environment.find(Path(sys.prefix), ["torch"], pinned=True) in (
        None,
        Path(sys.prefix, "bin/python"),
    )


def test_every_target_needs_what_is_declared():
    named = [
        need
        for line in re.findall(r"NEEDS = (.*)$", MAKEFILE, re.M)
        for need in line.split()
        if "$" not in need
    ]
    assert environment.requirements(dict.fromkeys(named))
