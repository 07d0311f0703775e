"""Where the compiled parts are, and whether they are wanted. The only reader of MERAK_EXT.

``MERAK_EXT=0`` in the environment turns all of them off, ``MERAK_EXT=1`` makes a missing one an error.
"""

import os
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

INTERFACE = 1  # another number whenever what Python and the compiled parts ask of each other changes
REMEDY = "Build with `pip install -e . --no-build-isolation`, or set MERAK_EXT=0 to run without"
_HOST = "megatron_merak._C"
_HERE = Path(__file__).parent


def wanted() -> bool:
    """Whether compiled parts may be used at all."""
    return os.environ.get("MERAK_EXT", "auto") != "0"


def required() -> bool:
    """Whether a compiled part that is missing is an error instead of a warning."""
    return os.environ.get("MERAK_EXT", "auto") == "1"


def library(name: str) -> Path | None:
    """The file of the operations ``name`` ("_ops_cpu", "_ops_cuda"), None where it was not built."""
    return next((path for path in (_HERE / f"{name}.abi3.so", _HERE / f"{name}.so") if path.exists()), None)


def stale(path: Path) -> str:
    """Why a library does not go with this Python code, in words; empty when it does."""
    if f"merak interface {INTERFACE};".encode() in path.read_bytes():
        return ""
    return f"{path.name} was built from other sources than this code's"


def host() -> ModuleType | None:
    """The module _C with the host-side cores, None where it is not wanted or ``host_problem`` says why."""
    if not wanted():
        return None
    if _HOST in sys.modules:
        return sys.modules[_HOST]
    if problem := host_problem():
        if required():
            raise ImportError(f"MERAK_EXT=1: {problem}. {REMEDY}.")
        return None
    return sys.modules[_HOST]


def host_problem() -> str:
    """Why ``host()`` is None, in words; empty when it is there."""
    if not wanted():
        return "MERAK_EXT=0"
    path = next((path for suffix in EXTENSION_SUFFIXES if (path := _HERE / f"_C{suffix}").exists()), None)
    if path is None:
        return "megatron_merak/_C is not built for this Python"
    if problem := stale(path):
        return problem
    try:
        import_module(_HOST)
    except ImportError as error:
        return str(error)
    return ""
