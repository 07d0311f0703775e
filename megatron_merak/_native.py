"""Where the compiled parts are, and whether they are wanted. The only reader of MERAK_EXT.

``MERAK_EXT=0`` in the environment turns all of them off, ``MERAK_EXT=1`` makes a missing one an error.
"""

import os
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

REMEDY = "Build with `pip install -e . --no-build-isolation`, or set MERAK_EXT=0 to run without"
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


def host() -> ModuleType | None:
    """The module _C with the host-side cores, None where it is not wanted, not built, or not loadable."""
    if not wanted():
        return None
    try:
        return import_module("megatron_merak._C")
    except ImportError:
        if required():
            raise
        return None


def host_problem() -> str:
    """Why ``host()`` is None, in words; empty when it is there."""
    if not wanted():
        return "MERAK_EXT=0"
    if not any((_HERE / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return "megatron_merak/_C is not built for this Python"
    try:
        import_module("megatron_merak._C")
    except ImportError as error:
        return str(error)
    return ""
