"""Makes what a session on a rented GPU carries there: nothing is compiled, downloaded or computed on that machine.

    make gpu-kit                                  into build/gpu-kit; needs no GPU, a compiler, Python 3.12 and 6 GB
    python benchmarks/gpu_kit.py --python /path/to/python3.12

    lib/             the extensions, compiled for Python 3.12, torch 2.11 of CUDA 13, the architecture of H100 and H200,
                     and any x86-64-v3 CPU
    text.bin         bytes of a text
    expected.json    losses, norms and gradients of a GPT trained on this text, computed on this CPU
    manifest.json    what it is for, and the size and the digest of every file

torch, nvcc and CUDA's headers come as wheels, with pip's own settings, into an environment of their own (--venv). What
is there already and still fits is not made again.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gpu_steps import EXPECTED, TEXT

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 12)
ARCHITECTURE = "9.0"
MOST = 60_000_000  # bytes of a kit
TEXT_BYTES = 1 << 16
# The versions on the machine, and a compiler for them.
WHEELS = (
    "torch==2.11.0",
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "peft",
    "numpy==2.5.2",
    "safetensors==0.8.0",
    "tokenizers==0.23.2",
    "huggingface_hub==1.33.0",
    "pyyaml",
    "pytest",
    "pytest-timeout",
    "setuptools",
    "ninja",
    "pybind11",
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
)
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "megatron_merak")


def interpreter(named: str) -> str:
    """A Python of the machine's version. Raises SystemExit where there is none."""
    wanted = ".".join(map(str, PYTHON))
    shims = sorted(Path.home().glob(f".pyenv/versions/{wanted}.*/bin/python"))
    for path in (named, f"python{wanted}", *map(str, shims)):
        if path and _says([path, "-c", "import sys; print(sys.version_info[:2])"]) == str(PYTHON):
            return path
    raise SystemExit(
        f"gpu_kit.py: --python {named or '(missing)'}: there is no Python {wanted}. Name one."
    )


def _says(command: Sequence[str]) -> str:
    """What a command prints; nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def environment(venv: Path, named: str) -> Path:
    """The interpreter of an environment with the wheels, made where it is not there."""
    python = venv / "bin" / "python"
    done = venv / "wheels.txt"
    wanted = "\n".join(WHEELS) + "\n"
    if not (python.exists() and done.exists() and done.read_text(encoding="utf-8") == wanted):
        say(f"wheels into {venv}")
        if not python.exists():
            subprocess.run([interpreter(named), "-m", "venv", str(venv)], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *WHEELS], check=True
        )
        done.write_text(wanted, encoding="utf-8")
    return python


def toolkit(python: Path) -> Path:
    """The folder of the CUDA toolkit that the wheels make, with the names that linkers look for."""
    found = _says([str(python), "-c", "import nvidia.cu13 as here; print(list(here.__path__)[0])"])
    if not found:
        raise SystemExit(
            f"gpu_kit.py: {python} has no wheels of CUDA 13. Remove its environment, and call again."
        )
    folder = Path(found)
    links = {folder / "lib" / "libcudart.so": "libcudart.so.13", folder / "lib64": "lib"}
    for link, target in links.items():
        if not link.exists():
            link.symlink_to(target)
    return folder


def copied(tree: Path) -> str:
    """Copy the sources to where they are compiled, beside this tree's own libraries; the digest of
    what is compiled.
    """
    digest = hashlib.sha256(" ".join(WHEELS).encode())
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in sorted(filter(None, tracked.stdout.split("\0"))):
        source, target = ROOT / name, tree / name
        content = source.read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        # else ninja would compile it again
        if not target.exists() or target.read_bytes() != content:
            shutil.copy2(source, target)
        if name.startswith("csrc") or name in ("setup.py", "megatron_merak/_native.py"):
            digest.update(name.encode() + content)
    return digest.hexdigest()


def compiled(tree: Path, python: Path, into: Path) -> None:
    """Compile the extensions, and copy them into the kit."""
    say("compiling (72 s on two free cores)")
    home = toolkit(python)
    settings = os.environ | {
        "CUDA_HOME": str(home),
        "PATH": os.pathsep.join((str(python.parent), str(home / "bin"), os.environ["PATH"])),
        "MERAK_STRICT": "1",
        "MERAK_CUDA": "1",
        "MERAK_PORTABLE": "1",
        "TORCH_CUDA_ARCH_LIST": ARCHITECTURE,
    }
    command = [python, "setup.py", "--quiet", "build_ext", "--inplace"]
    with open(tree / "build.log", "w", encoding="utf-8") as log:
        status = subprocess.run(command, cwd=tree, env=settings, stdout=log, stderr=log).returncode
    if status:
        raise SystemExit(f"gpu_kit.py: the extensions do not compile: see {tree / 'build.log'}.")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for path in tree.glob("megatron_merak/*.so"):
        shutil.copy2(path, into / path.name)


def loaded(tree: Path, python: Path) -> dict:
    """What is loaded there, by merak-doctor. Raises SystemExit where a part is not."""
    told = _run(tree, python, "-m", "megatron_merak", "doctor", "--json")
    parts = json.loads(told.splitlines()[-1])
    wrong = [
        f"{name}: {parts[name]['detail']}"
        for name in ("_C", "_ops_cpu", "_ops_cuda")
        if not parts[name]["active"]
    ]
    if wrong:
        raise SystemExit(f"gpu_kit.py: what was compiled does not load: {'; '.join(wrong)}")
    return {"python": parts["python"]["detail"], "torch": parts["torch"]["detail"]}


def _run(tree: Path, python: Path, *arguments: str) -> str:
    settings = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, *arguments], cwd=tree, env=settings, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"gpu_kit.py: {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def text_of(python: Path) -> bytes:
    """The topics of Python's own help, which every Python brings."""
    source = _says([str(python), "-c", "import pydoc_data.topics as here; print(here.__file__)"])
    return Path(source).read_bytes()[:TEXT_BYTES]


def manifest(kit: Path, sources: str, versions: dict) -> dict:
    """What the kit is for, and its files."""
    files = {}
    for path in sorted(kit.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            content = path.read_bytes()
            name = path.relative_to(kit).as_posix()
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {
        "for": f"Python {versions['python']}, torch {versions['torch']}, sm_{ARCHITECTURE.replace('.', '')}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "sources": sources,
        "files": files,
    }


def say(text: str) -> None:
    print(f"gpu-kit: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu-kit", metavar="DIR")
    parser.add_argument(
        "--venv",
        type=Path,
        default=ROOT / ".venv-gpu",
        metavar="DIR",
        help="environment of the wheels",
    )
    parser.add_argument(
        "--python", default="", metavar="EXE", help="a Python 3.12 to make the environment with"
    )
    given = parser.parse_args()
    kit, tree = given.into.resolve(), ROOT / "build" / "gpu-kit-sources"
    python = environment(given.venv.absolute(), given.python)
    sources = copied(tree)
    try:
        there = json.loads((kit / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        there = {}
    if there.get("sources") != sources:
        compiled(tree, python, kit / "lib")
    versions = loaded(tree, python)
    (kit / TEXT).write_bytes(text_of(python))
    say("losses and gradients on this CPU")
    script = str(ROOT / "benchmarks" / "gpu_equal.py")
    _run(tree, python, script, "expected", "--kit", str(kit), "--into", str(kit / EXPECTED))
    found = manifest(kit, sources, versions)
    (kit / "manifest.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    size = sum(one["bytes"] for one in found["files"].values())
    if size > MOST:
        raise SystemExit(
            f"gpu_kit.py: {kit} has {size / 1e6:.1f} MB, at most {MOST / 1e6:.0f} travel"
        )
    say(f"{kit}: {size / 1e6:.1f} MB for {found['for']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
