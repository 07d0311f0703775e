"""Every benchmark that pages and the Makefile name is there, and starts."""

import ast
import re
import sys

import pytest

from benchmarks import ROOT
from benchmarks.__main__ import BENCHMARKS, listing, main

NAMING = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*/*.py")]
NAMING += [ROOT / "Makefile", *ROOT.glob("megatron_merak/**/*.py")]


def test_what_is_named_is_there():
    named = set()
    for path in NAMING:
        named |= set(re.findall(r"-m benchmarks ([a-z]\w*)", path.read_text(encoding="utf-8")))
    assert len(named) > 10 and named <= BENCHMARKS.keys()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_name_stands_for_a_file_with_a_main(name):
    module = ROOT / "benchmarks" / f"{BENCHMARKS[name].module.replace('.', '/')}.py"
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert "main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert f"  {name} " in listing()


def test_another_name_is_refused_with_the_nearest(capsys):
    assert main(["two_line"]) == 2
    assert "no benchmark is called two_line; the nearest is two_lines." in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_starts_and_says_what_it_takes(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name} ")


@pytest.mark.parametrize("name", ["elastic", "increments", "saves", "two_lines"])
def test_a_page_is_not_asked_for_in_vain(name, monkeypatch, capsys):
    """Before hours of measuring: only what was measured is written into one."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit) as ended:
        main([name, "--into", "page.md"])
    assert ended.value.code == 2
    assert "--into: writes what a run has measured." in capsys.readouterr().err
