"""The compiled parts: where they are, and whether they are enabled. The only reader of MERAK_EXT.

``MERAK_EXT=0`` in the environment disables all of them, ``MERAK_EXT=1`` makes a missing one an
error.
"""

import functools
import hashlib
import json
import os
import platform
import re
import struct
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

# another number whenever what Python and the compiled parts ask of each other changes
INTERFACE = 7
REMEDY = "With a C++17 compiler, `pip install -e .` in a clone builds it; MERAK_EXT=0 runs without"
_HOST = "megatron_merak._C"
_HERE = Path(__file__).parent
_PARTS = ("_C", "_ops_cpu", "_ops_cuda")
# ends of the names of one library's files, the fastest first; wheels have several
_VARIANTS = ("_avx512", "")
_CPU = Path("/proc/cpuinfo")


def enabled() -> bool:
    """Whether compiled parts may be used at all."""
    return os.environ.get("MERAK_EXT", "auto") != "0"


def required() -> bool:
    """Whether a compiled part that is missing is an error instead of a warning."""
    return os.environ.get("MERAK_EXT", "auto") == "1"


def library(name: str) -> Path | None:
    """Return the file of the operations ``name`` ("_ops_cpu", "_ops_cuda"); None if it was not
    built.

    Of several, the first that this CPU can run; if it can run none, the last.
    """
    names = (f"{name}{variant}{suffix}" for variant in _VARIANTS for suffix in (".abi3.so", ".so"))
    paths = [path for path in map(_HERE.joinpath, names) if path.exists()]
    return next((path for path in paths if not unfit(path)), paths[-1] if paths else None)


def absent(name: str) -> str:
    """Return a sentence on a missing part, with the reason if its build recorded one."""
    try:
        reason = json.loads((_HERE / "_left_out.json").read_text(encoding="utf-8")).get(name, "")
    except (OSError, ValueError):
        reason = ""
    return f"megatron_merak/{name} is not built" + (f" ({reason})" if reason else "")


def unfit(path: Path) -> str:
    """Return why a library must not be loaded; "" if it may. A truncated one would end the
    process.
    """
    content = path.read_bytes()
    if content[:4] == b"\x7fELF" and len(content) < _elf_size(content):
        return f"{path.name} is cut short"
    if f"merak interface {INTERFACE};".encode() not in content:
        return f"{path.name} was built from other sources than this code's"
    needs = re.search(rb"merak needs ([a-z0-9_ ]*);", content)
    there = _cpu_features()
    lacking = [
        name for name in (needs[1].decode().split() if needs else ()) if there and name not in there
    ]
    if lacking:
        return (
            f"{path.name} was built for a CPU with {', '.join(lacking)}, which this one does "
            "not have"
        )
    return ""


@functools.cache
def _cpu_features() -> frozenset[str]:
    """Return this CPU's features, by Linux's names; empty if unknown."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        flags = re.search(r"^flags\s*:(.*)$", _CPU.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(flags[1].split()) if flags else frozenset()


def _elf_size(content: bytes) -> int:
    """Return the size of an ELF file up to the end of its section table, which linkers
    write last.
    """
    if len(content) < 64:
        return 64
    (table,), (size, count) = (
        struct.unpack_from("<Q", content, 40),
        struct.unpack_from("<HH", content, 58),
    )
    return table + size * count


def host() -> ModuleType | None:
    """Return the module _C with the compiled host-side code; None if disabled or for the reason in
    ``host_problem``.
    """
    if not enabled():
        return None
    if _HOST in sys.modules:
        return sys.modules[_HOST]
    if problem := host_problem():
        if required():
            raise ImportError(f"MERAK_EXT=1: {problem}. {REMEDY}.")
        return None
    return sys.modules[_HOST]


def host_problem() -> str:
    """Return why ``host()`` is None; "" if it is not."""
    if not enabled():
        return "MERAK_EXT=0"
    path = next(
        (path for suffix in EXTENSION_SUFFIXES if (path := _HERE / f"_C{suffix}").exists()), None
    )
    if path is None:
        return absent("_C") + " for this Python"
    if problem := unfit(path):
        return problem
    try:
        import_module(_HOST)
    except ImportError as error:
        return str(error)
    return ""


def contents() -> dict[str, str]:
    """Return, per compiled part, a digest of its files; "(disabled)" or "(absent)" where there is
    none.

    All variants of a part count, whichever of them this CPU runs.
    """
    if not enabled():
        return dict.fromkeys(_PARTS, "(disabled)")
    found = {}
    for name in _PARTS:
        files = sorted(
            path
            for path in _HERE.glob(f"{name}*.so")
            if re.match(rf"{name}(_avx512)?\.", path.name)
        )
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode() + path.read_bytes())
        found[name] = digest.hexdigest()[:16] if files else "(absent)"
    return found
