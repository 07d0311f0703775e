"""Builds the compiled parts; everything else about the package is in pyproject.toml.

    pip install -e . --no-build-isolation        python setup.py build_ext --inplace

Three libraries in megatron_merak/, each optional at run time: ``_C`` (host-side cores), ``_ops_cpu`` (CPU kernels),
``_ops_cuda`` (CUDA kernels, where torch has CUDA and nvcc is there). Environment:

    MERAK_CUDA=auto|0|1       build _ops_cuda when it can be built, never, or fail where it cannot
    TORCH_CUDA_ARCH_LIST      architectures of _ops_cuda (the GPUs there are, else "8.0;9.0;10.0+PTX")
    MERAK_PORTABLE=1          for any CPU of x86-64-v3 instead of this machine's own (wheels)
    MERAK_STRICT=1            a part that does not compile ends the build; else it is left out, with a warning
    MERAK_EXT=0               build none of them
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup


def toolkit() -> str:
    """The folder of the CUDA toolkit whose nvcc is on PATH, where torch does not look for itself: it takes the folder
    above a script that starts nvcc for the toolkit's. Empty where there is none."""
    if not shutil.which("nvcc"):
        return ""
    told = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", told, re.MULTILINE)
    return os.path.realpath(top.group(1)) if top else ""


if "CUDA_HOME" not in os.environ and (found := toolkit()):
    os.environ["CUDA_HOME"] = found

try:
    import torch
    from setuptools import Extension
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    print(f"megatron_merak: no compiled parts, {error}. Use --no-build-isolation where torch is.", file=sys.stderr)
    if os.environ.get("MERAK_STRICT") == "1":
        sys.exit(1)
    setup()
    sys.exit()

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11: one binary for every torch from there on
STANDARD = "-std=c++17"  # torch's own default is another one in 2.13 than in 2.11
OPTIMISE = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fvisibility=hidden", "-g0"]
INTERFACE = re.search(r"^INTERFACE = (\d+)", Path("megatron_merak/_native.py").read_text(), re.MULTILINE).group(1)
MACROS = [("MERAK_INTERFACE", f'"{INTERFACE}"')]
# Absolute: ninja compiles in the build folder.
INCLUDE = [str(Path(__file__).resolve().parent / folder) for folder in ("csrc/include", "csrc")]
DEPENDS = sorted(path.as_posix() for path in Path("csrc").rglob("*") if path.is_file())
DEPENDS += ["setup.py", "megatron_merak/_native.py"]


def machine() -> list[str]:
    """The instruction set to compile for. gcc prefers half-wide vectors on AVX-512 machines unless told."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    if os.environ.get("MERAK_PORTABLE") == "1":
        return ["-march=x86-64-v3"]
    return ["-march=native", "-mprefer-vector-width=512"]


def sources(folder: str, *suffixes: str) -> list[str]:
    return sorted(path.as_posix() for path in Path("csrc", folder).glob("*") if path.suffix in suffixes)


def together(name: str, files: list[str]) -> str:
    """One translation unit of several files: pybind11 takes five seconds of each, however little it is used there."""
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
    first = [f"csrc/py/{name}.cpp" for name in ("bind", "indices", "moments", "schedule", "simulate")]
    others = [file for file in sources("py", ".cpp") if file not in first] + ["csrc/comm/shared_memory.cpp"]
    plain = [file for file in sources("comm", ".cpp") if file not in others] + ["csrc/interface.cpp"]
    return Extension(
        "megatron_merak._C",
        [together("host_first", first), together("host_others", others), *plain],
        include_dirs=[*INCLUDE, pybind11_headers()],
        define_macros=MACROS,
        extra_compile_args=[STANDARD, *OPTIMISE, *machine()],
        extra_link_args=["-s", "-lrt", "-pthread"] if sys.platform == "linux" else [],
        depends=DEPENDS,
    )


def cpu() -> Extension:
    return CppExtension(
        "megatron_merak._ops_cpu",
        ["csrc/interface.cpp", *sources("cpu", ".cpp")],
        include_dirs=INCLUDE,
        define_macros=MACROS,
        extra_compile_args=[STANDARD, *OPTIMISE, *machine(), STABLE_ABI],
        py_limited_api=True,
        depends=DEPENDS,
    )


def cuda() -> Extension:
    if not torch.cuda.is_available():
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
        sys.exit(f"MERAK_CUDA=1: {problem}. Install a torch with CUDA and its toolkit, or set MERAK_CUDA=0.")
    if problem:
        print(f"megatron_merak: no _ops_cuda, {problem}", file=sys.stderr)
    return [host(), cpu()] if problem else [host(), cpu(), cuda()]


class OptionalBuild(BuildExtension):
    """Leaves out, with a warning, what does not compile; ends with a summary."""

    def build_extensions(self) -> None:
        self.results: dict[str, str] = {}
        try:
            super().build_extensions()
        except Exception as error:  # before the first part: there is no compiler, or none that answers
            self.leave_out(error, *self.extensions)
        for name, result in self.results.items():
            print(f"megatron_merak: {name} {result}", file=sys.stderr)

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
            self.results[ext.name] = f"LEFT OUT, it did not compile: {str(error).splitlines()[0]}"


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuild})
