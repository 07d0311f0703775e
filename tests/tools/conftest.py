"""Tools of this repository in the process of the tests, which has imported torch already."""

import gc
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
HEAVY = ("torch", "numpy", "matplotlib")


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """Name of a tool -> its module."""

    def loaded(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_tool", TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture(scope="module")
def tool(load, request) -> ModuleType:
    """The tool that the test module names ``TOOL``."""
    return load(request.module.TOOL)


@pytest.fixture
def run(tool, request, monkeypatch, capsys) -> Callable[..., str]:
    """Arguments -> what the tool prints."""
    monkeypatch.setattr(sys, "argv", [f"tools/{request.module.TOOL}.py"])

    def printed(*arguments: object) -> str:
        try:
            tool.main([str(argument) for argument in arguments])
        finally:
            gc.enable()
        return capsys.readouterr().out

    return printed


@pytest.fixture
def imported(request) -> Callable[..., str]:
    """Arguments -> the heavy packages that the tool imports, in a process of its own, as a list."""
    name = request.module.TOOL
    program = (
        f"import runpy, sys; sys.argv = ['{name}.py', *sys.argv[1:]]\n"
        f"runpy.run_path('tools/{name}.py', run_name='__main__')\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )

    def ran(*arguments: object) -> str:
        line = [sys.executable, "-c", program, *map(str, arguments)]
        environment = {"PYTHONPATH": str(ROOT)}
        told = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        return told.stdout.splitlines()[-1]

    return ran
