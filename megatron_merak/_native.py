"""Where the compiled parts are, and whether they are wanted. The only reader of MERAK_EXT.

``MERAK_EXT=0`` in the environment turns all of them off, ``MERAK_EXT=1`` makes a missing one an error.
"""

import os
import struct
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

INTERFACE = 3  # another number whenever what Python and the compiled parts ask of each other changes
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


def unfit(path: Path) -> str:
    """Why a library must not be loaded, in words; empty when it may. One that is cut short would end the process."""
    content = path.read_bytes()
    if content[:4] == b"\x7fELF" and len(content) < _elf_size(content):
        return f"{path.name} is cut short"
    if f"merak interface {INTERFACE};".encode() not in content:
        return f"{path.name} was built from other sources than this code's"
    return ""


def _elf_size(content: bytes) -> int:
    """Bytes of an ELF file up to the end of its table of sections, which linkers put last."""
    if len(content) < 64:
        return 64
    (table,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    return table + size * count


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
    if problem := unfit(path):
        return problem
    try:
        import_module(_HOST)
    except ImportError as error:
        return str(error)
    return ""
