"""What ptxas and the machine code say about every CUDA kernel, for machines without a GPU: see
test_gate.py.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. ``name``: without arguments; ``family``: without template
    arguments too.

    loads: global loads of 16 bytes; local: accesses to local memory; rounds: loads of 16 bytes that are
    asked for before the next store; None where no disassembler is.
    """

    name: str
    architecture: str
    stack: int
    spilled: int
    registers: int
    loads: int | None = None
    local: int | None = None
    rounds: tuple[int, ...] | None = None

    @property
    def family(self) -> str:
        return self.name.split("<")[0].removeprefix("merak::")


def kernels(source: Path, architectures: tuple[str, ...] = ARCHITECTURES) -> list[Kernel]:
    """Compile a .cu file; raises RuntimeError with nvcc's words when that fails."""
    with tempfile.TemporaryDirectory() as folder:
        targets = [f"-gencode=arch={a.replace('sm', 'compute')},code={a}" for a in architectures]
        command = [
            "nvcc",
            "-std=c++17",
            "-O3",
            "-Xptxas",
            "-v",
            "--keep",
            "--keep-dir",
            folder,
            "--threads",
            "2",
            *targets,
        ]
        include = ["-I", str(ROOT / "csrc/include"), "-I", str(ROOT / "csrc")]
        done = subprocess.run(
            [*command, *include, "-c", str(source), "-o", f"{folder}/out.o"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{source.name} does not compile:\n{done.stderr[-4000:]}")
        code = dict(machine_code(Path(folder)))
        entries = list(_ENTRY.finditer(done.stderr))
        names = demangled([entry["name"] for entry in entries])
    return [
        Kernel(
            name,
            entry["architecture"],
            int(entry["stack"]),
            int(entry["stores"]) + int(entry["loads"]),
            int(entry["registers"]),
            *code.get((entry["architecture"], entry["name"]), (None, None, None)),
        )
        for entry, name in zip(entries, names, strict=True)
    ]


def machine_code(
    folder: Path,
) -> Iterator[tuple[tuple[str, str], tuple[int, int, tuple[int, ...]]]]:
    """(architecture, mangled name) -> (16-byte loads, local accesses, 16-byte loads before each store)
    of the .cubin files in ``folder``.
    """
    disassembler = shutil.which("nvdisasm")
    for cubin in sorted(folder.glob("*.cubin")) if disassembler else ():
        listing = subprocess.run(
            [disassembler, str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        architecture = "sm_" + re.search(r"(?:sm|compute)_(\d+)\.cubin", cubin.name)[1]
        for text in re.split(r"\.section\s+\.text\.", listing)[1:]:
            local = len(re.findall(r"\b(?:LDL|STL)\b", text))
            parts = re.split(r"\bSTG\b", text)
            rounds = tuple(len(re.findall(r"\bLDG\.E\S*\.128", part)) for part in parts)
            yield (architecture, re.match(r"\w+", text)[0]), (sum(rounds), local, rounds)


def demangled(names: list[str]) -> list[str]:
    """``merak::norm::forward<float, true, false>`` for each mangled name."""
    text = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout
    return [re.sub(r"^void ", "", line).split("(")[0] for line in text.splitlines()]
