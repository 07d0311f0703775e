"""Tools of this repository in the process of the tests, which has imported torch already."""

import gc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


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
