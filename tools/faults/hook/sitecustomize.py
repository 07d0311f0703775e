"""Imported by every Python process of a command that tools/inject_faults.py runs, before its
program.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import injected_fault

_HERE = str(Path(__file__).parent)


def _hidden() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    places = [place for place in sys.path if place != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_hidden()
injected_fault.arm()
