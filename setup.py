"""Builds the compiled parts; everything else about the package is in pyproject.toml.

    pip install -e .        make wheel        python setup.py build_ext --inplace

Three libraries in megatron_merak/, each optional at run time: ``_C`` (host-side cores),
``_ops_cpu`` (CPU kernels), ``_ops_cuda`` (CUDA kernels, where torch has CUDA and nvcc is there).
pip comes by way of csrc/build_backend.py, which brings torch. Environment:

    MERAK_CUDA=auto|0|1       build _ops_cuda when it can be built, never, or fail where it cannot
    TORCH_CUDA_ARCH_LIST      architectures of _ops_cuda (the GPUs there are, else
                              "8.0;9.0;10.0+PTX")
    MERAK_PORTABLE=1          for any CPU of x86-64-v3, with kernels for x86-64-v4 beside, and for
                              any GPU of the architectures named above, instead of this very
                              machine (wheels)
    MERAK_STRICT=1            a part that does not compile ends the build; else it is left out, with
                              a warning
    MERAK_EXT=0               build none of them
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup


def toolkit() -> str:
    """The folder of the CUDA toolkit whose nvcc is on PATH, where torch does not look for itself:
    it takes the folder above a script that starts nvcc for the toolkit's. Empty where there is
    none."""
    if not shutil.which("nvcc"):
        return ""
    told = subprocess.run(
        ["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
    return os.path.realpath(top.group(1)) if top else ""


if "CUDA_HOME" not in os.environ and (found := toolkit()):
    os.environ["CUDA_HOME"] = found

try:
    import torch
    from setuptools import Extension
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    print(
        f"megatron_merak: no compiled parts, {error}. Install torch first, or let pip isolate the build.",
        file=sys.stderr,
    )
    if os.environ.get("MERAK_STRICT") == "1":
        sys.exit(1)
    setup()
    sys.exit()

# 2.11: one binary for every torch from there on
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
STANDARD = "-std=c++17"  # torch's own default is another one in 2.13 than in 2.11
OPTIMISE = [
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fvisibility=hidden",
    "-g0",
]
INTERFACE = re.search(
    r"^INTERFACE = (\d+)", Path("megatron_merak/_native.py").read_text(), re.MULTILINE
).group(1)
MACROS = [("MERAK_INTERFACE", f'"{INTERFACE}"')]
# Absolute: ninja compiles in the build folder.
INCLUDE = [str(Path(__file__).resolve().parent / folder) for folder in ("csrc/include", "csrc")]
DEPENDS = sorted(path.as_posix() for path in Path("csrc").rglob("*") if path.is_file())
DEPENDS += ["setup.py", "megatron_merak/_native.py"]


PORTABLE = os.environ.get("MERAK_PORTABLE") == "1"
X86 = platform.machine() in ("x86_64", "AMD64")
# Further kernels for the CPU, by the end of their library's name: _native.py takes the first that
# the CPU can run.
VARIANTS = (
    {"_avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]} if PORTABLE and X86 else {}
)
# beside the libraries: what did not compile, and why; _native.py says it
LEFT_OUT = "_left_out.json"


def machine() -> list[str]:
    """The instruction set to compile for. gcc prefers half-wide vectors on AVX-512 machines unless
    told.
    """
    if not X86:
        return []
    return ["-march=x86-64-v3"] if PORTABLE else ["-march=native", "-mprefer-vector-width=512"]


def sources(folder: str, *suffixes: str) -> list[str]:
    return sorted(
        path.as_posix() for path in Path("csrc", folder).glob("*") if path.suffix in suffixes
    )


def together(name: str, files: list[str]) -> str:
    """One translation unit of several files: pybind11 takes five seconds of each, however little it
    is used there.
    """
    unit = Path("build", f"{name}.cpp")
    text = "".join(f'#include "../{file}"\n' for file in files)
    if not unit.exists() or unit.read_text() != text:
        unit.parent.mkdir(exist_ok=True)
        unit.write_text(text)
    return unit.as_posix()


def pybind11_headers() -> str:
    """Where they are; torch's own where pybind11 is not installed."""
    try:
        import pybind11

        return pybind11.get_include()
    except ImportError:
        return str(Path(torch.__file__).parent / "include")


def cuda_problem() -> str:
    """Why the CUDA kernels cannot be built here; empty when they can."""
    if os.environ.get("MERAK_CUDA") == "0":
        return "MERAK_CUDA=0"
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        return "nvcc was not found: set CUDA_HOME"
    return ""


def host() -> Extension:
    first = [
        f"csrc/py/{name}.cpp" for name in ("bind", "indices", "moments", "schedule", "simulate")
    ]
    others = [file for file in sources("py", ".cpp") if file not in first] + [
        "csrc/comm/shared_memory.cpp"
    ]
    plain = [file for file in sources("comm", ".cpp") if file not in others] + [
        "csrc/interface.cpp"
    ]
    return Extension(
        "megatron_merak._C",
        [together("host_first", first), together("host_others", others), *plain],
        include_dirs=[*INCLUDE, pybind11_headers()],
        define_macros=MACROS,
        extra_compile_args=[STANDARD, *OPTIMISE, *machine()],
        extra_link_args=["-s", "-lrt", "-pthread"] if sys.platform == "linux" else [],
        depends=DEPENDS,
    )


def cpu(variant: str, instructions: list[str]) -> Extension:
    return CppExtension(
        f"megatron_merak._ops_cpu{variant}",
        ["csrc/interface.cpp", *sources("cpu", ".cpp")],
        include_dirs=INCLUDE,
        define_macros=MACROS,
        extra_compile_args=[STANDARD, *OPTIMISE, *instructions, STABLE_ABI],
        py_limited_api=True,
        depends=DEPENDS,
    )


def cuda() -> Extension:
    if PORTABLE or not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0;10.0+PTX")
    return CUDAExtension(
        "megatron_merak._ops_cuda",
        ["csrc/interface.cpp", *sources("cuda", ".cu", ".cpp")],
        include_dirs=INCLUDE,
        define_macros=[("USE_CUDA", None), *MACROS],
        extra_compile_args={
            "cxx": [STANDARD, "-O3", "-g0", STABLE_ABI],
            "nvcc": [STANDARD, "-O3", "-lineinfo", STABLE_ABI],
        },
        py_limited_api=True,
        depends=DEPENDS,
    )


def extensions() -> list[Extension]:
    unwanted = os.environ.get("MERAK_EXT") == "0"
    if unwanted or not Path("csrc").is_dir():
        reason = "MERAK_EXT=0" if unwanted else "csrc/ is not here"
        print(f"megatron_merak: no compiled parts, {reason}", file=sys.stderr)
        return []
    problem = cuda_problem()
    if problem and os.environ.get("MERAK_CUDA") == "1":
        sys.exit(
            f"MERAK_CUDA=1: {problem}. Install a torch with CUDA and its toolkit, or set MERAK_CUDA=0."
        )
    if problem:
        print(f"megatron_merak: no _ops_cuda, {problem}", file=sys.stderr)
    kernels = [cpu(variant, flags) for variant, flags in ({"": machine()} | VARIANTS).items()]
    return [host(), *kernels] if problem else [host(), *kernels, cuda()]


class OptionalBuild(BuildExtension):
    """Leaves out, with a warning, what does not compile; ends with a summary, and a file of what
    was left out.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.results: dict[str, str] = {}  # part -> what came of it
        self.reasons: dict[str, str] = {}  # part that was left out -> why

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except (
            Exception
        ) as error:  # before the first part: there is no compiler, or none that answers
            self.leave_out(error, *self.extensions)
        for name, result in self.results.items():
            print(f"megatron_merak: {name} {result}", file=sys.stderr)
        self.write_reasons(Path(self.build_lib, "megatron_merak"))

    def copy_extensions_to_source(self) -> None:
        """An editable install, or a build in place: nothing that an earlier one left there
        stays.
        """
        super().copy_extensions_to_source()
        self.write_reasons(Path("megatron_merak"))
        for path in Path("megatron_merak").glob("_ops_cpu_*.so"):
            if path.name.partition(".")[0].removeprefix("_ops_cpu") not in VARIANTS:
                path.unlink()

    def write_reasons(self, folder: Path) -> None:
        if self.reasons:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LEFT_OUT).write_text(json.dumps(self.reasons, indent=1), encoding="utf-8")
        else:
            (folder / LEFT_OUT).unlink(missing_ok=True)

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
            self.results[ext.name] = "built"
        except Exception as error:
            self.leave_out(error, ext)

    def leave_out(self, error: Exception, *parts: Extension) -> None:
        if os.environ.get("MERAK_STRICT") == "1":
            raise error
        for ext in parts:
            ext.optional = True  # setuptools neither copies nor misses it
            reason = f"it did not compile: {' '.join(str(error).split())[:200]}"
            self.results[ext.name] = f"LEFT OUT, {reason}"
            self.reasons[ext.name.removeprefix("megatron_merak.")] = reason


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
