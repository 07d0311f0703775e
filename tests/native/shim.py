"""The CUDA kernels on the CPU: csrc/cuda/launch_<family>.cu compiled by g++ under the SIMT shim,
called by ctypes.
"""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ROOT / "build" / "simt"
NEEDED = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="the SIMT shim needs g++ on x86-64",
)
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-w")
SANITIZERS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SANITIZED = "MERAK_TEST_SANITIZED"  # set by test_sanitizers.py for the tests that it runs
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Half a unit in the last place, relative: what one rounding to the type may cost.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25}

Edits = Mapping[str, tuple[str, str]]  # file under csrc -> (text in it, its replacement)


class LaunchError(Exception):
    """A launcher refused its arguments, or the shim found a fault in the kernel."""


class Kernels:
    """The launchers of one family. Tensors are passed by address, None as null; a status that is
    not 0 raises.
    """

    def __init__(self, library: Path):
        self._library = ctypes.CDLL(str(library))
        self._library.merak_error_string.restype = ctypes.c_char_p
        for name, (result, arguments) in signatures().items():
            if hasattr(self._library, name):
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a launcher; the stream, its last argument, is added."""
        status = self.count(name, *arguments, None)
        if status:
            raise LaunchError(f"{name}: {self._library.merak_error_string(status).decode()}")

    def count(self, name: str, *arguments: Any) -> int:
        """Call a function that takes no stream and returns a number."""
        function = getattr(self._library, name)
        if len(arguments) != len(function.argtypes):
            raise TypeError(
                f"{name} takes {len(function.argtypes)} arguments, not {len(arguments)}"
            )
        return function(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))

    def seed(self, seed: int) -> None:
        """Choose another order of warps and lanes."""
        self._library.simt_seed(seed)


def signatures() -> dict[str, tuple[Any, list[Any]]]:
    """Name -> result and argument types, read from launch.h."""
    text = re.sub(r"//[^\n]*", "", (ROOT / "csrc/cuda/launch.h").read_text(encoding="utf-8"))
    found = re.findall(r"(int|int64_t) (merak_\w+)\(([^)]*)\);", text)
    numbers = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "double": ctypes.c_double}
    return {
        name: (numbers[result], [_type(argument, numbers) for argument in arguments.split(",")])
        for result, name, arguments in found
    }


def _type(declaration: str, numbers: Mapping[str, Any]) -> Any:
    return ctypes.c_void_p if "*" in declaration else numbers[declaration.split()[0]]


def load(family: str, mutate: Edits | None = None) -> Kernels:
    """The launchers of csrc/cuda/launch_<family>.cu, with ``mutate``'s edits of their sources."""
    flags = SANITIZERS if os.environ.get(SANITIZED) == "1" else ("-O0",) if mutate else ()
    return Kernels(build([f"cuda/launch_{family}.cu"], mutate, flags))


def build(sources: Iterable[str], mutate: Edits | None = None, flags: Iterable[str] = ()) -> Path:
    """A shared library of csrc/<source> for each source; compiled once for each content."""
    sources, command = list(sources), ["g++", *FLAGS, *flags, "-shared"]
    csrc = {
        path.relative_to(ROOT / "csrc").as_posix(): path.read_text(encoding="utf-8")
        for folder, pattern in (
            ("include", "*.h"),
            ("kernels", "*.cuh"),
            ("cuda", "*.h"),
            ("cuda", "*.cu"),
        )
        for path in sorted((ROOT / "csrc" / folder).rglob(pattern))
        if path.suffix != ".cu" or path.relative_to(ROOT / "csrc").as_posix() in sources
    }
    for name, (old, new) in (mutate or {}).items():
        if csrc[name].count(old) != 1:
            raise ValueError(f"csrc/{name} has {csrc[name].count(old)} times, not once: {old}")
        csrc[name] = csrc[name].replace(old, new)
    key = hashlib.sha256(repr((command, sources, sorted(csrc.items()))).encode()).hexdigest()[:20]
    library = BUILDS / f"{key}.so"
    if not library.exists():
        _compile(csrc, command, sources, library)
    return library


def _compile(
    csrc: Mapping[str, str], command: list[str], sources: list[str], library: Path
) -> None:
    folder = library.with_suffix(f".{os.getpid()}")
    for name, text in csrc.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [*command, "-Iinclude", "-I.", "-x", "c++", *sources, "-o", "out.so"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(sources)} does not compile:\n{done.stderr[:4000]}")
    os.replace(folder / "out.so", library)
    shutil.rmtree(folder)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers one element past a 16-byte boundary, so that no pack is aligned."""
    whole = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    view = whole[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def near(
    found: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor | float, operations: int = 8
) -> None:
    """Assert that found is truth (fp64), rounded to found's type after ``operations`` fp32
    roundings of size ``scale``.

    scale: the size of the terms that were added up; more than the truth where they cancel.
    """
    assert found.shape == truth.shape
    allowed = ROUNDING[found.dtype] * truth.abs() + TINY[found.dtype]
    allowed = 1.01 * allowed + operations * 2.0**-24 * torch.as_tensor(scale, dtype=torch.float64)
    wrong = ~((found.double() - truth).abs() <= allowed)
    wrong &= ~(found.double() == truth)  # infinities
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} are off, at {wrong.nonzero()[0].tolist()} by "
        + str((found.double() - truth)[wrong][0].item())
    )
