"""Find a Python environment that has what the project needs, or make one. The Makefile's set-up step.

    python tools/environment.py --venv .venv           make sure that there is one, and say which
    python tools/environment.py --venv .venv --find    print its interpreter, install nothing

Looked at in this order: the environment at --venv, then the interpreter that runs this script. Only when neither has
everything is --venv created or completed, with pip; so an environment that is complete needs no network. Then the
compiled parts are built in place, where their sources changed; without a C++ compiler everything runs without them.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "pyproject.toml", ROOT / "setup.py")
STAMP = "megatron-merak-installed"  # in the environment that we installed into; older than SOURCES means: do it again
MINIMUM = (3, 11)
BUILT = ROOT / "build" / "compiled-parts"  # what building them said, newer than all sources that it was made from
LIBRARIES = "libraries:\n"  # in it, before their sizes


def requirements(extras):
    """The requirement strings of pyproject.toml with those of ``extras``."""
    import tomllib

    project = tomllib.loads(SOURCES[0].read_text(encoding="utf-8"))["project"]
    return project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]


def missing():
    """What this interpreter lacks, in words; [] when it can run everything."""
    if sys.version_info < MINIMUM:
        return [f"Python {MINIMUM[0]}.{MINIMUM[1]} or newer (this is {sys.version.split()[0]})"]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    lacking = []
    for line in requirements(["test"]):
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.append(line)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{line} (there is {version})")
    return lacking


def interpreter(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def complete(python):
    """Whether ``python``, which is any interpreter, has everything."""
    if not Path(python).exists():
        return False
    command = [str(python), str(Path(__file__).resolve()), "--missing"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def find(venv):
    """The interpreter to use, or None when something has to be installed first."""
    stamp = venv / STAMP
    outdated = stamp.exists() and any(stamp.stat().st_mtime < source.stat().st_mtime for source in SOURCES)
    if not outdated and complete(interpreter(venv)):
        return interpreter(venv)
    return Path(sys.executable) if not stamp.exists() and not missing() else None


def install(venv):
    """Create the environment if there is none, then install what the project needs and the project itself, editable."""
    if sys.version_info < MINIMUM:
        sys.exit(f"PYTHON {sys.executable}: needs {missing()[0]}. Name a newer one: make PYTHON=python3.12 ...")
    python = interpreter(venv)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"installing into {venv} (once; downloads PyTorch unless pip has it)", flush=True)
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([*pip, *requirements(["test", "tracking"])], check=True)
        # Not the compiled parts: `build` makes them where they stay, and again when their sources change.
        editable = [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
        subprocess.run(editable, env=os.environ | {"MERAK_EXT": "0"}, check=True)
    except subprocess.CalledProcessError as error:
        remedy = f"Repair what is reported above, or remove {venv}, or name a complete environment: make PYTHON=... ..."
        sys.exit(f"{' '.join(error.cmd[:4])} failed with status {error.returncode}. {remedy}")
    (venv / STAMP).touch()
    return python


def sizes():
    """A line for each library that is there: one that is lost or cut short is built again."""
    libraries = sorted((ROOT / "megatron_merak").glob("*.so"))
    return "".join(f"{path.name} {path.stat().st_size}\n" for path in libraries)


def build(python):
    """Compile what changed since the last try, and say what came of it."""
    changed = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    changed += [ROOT / "setup.py", ROOT / "megatron_merak" / "_native.py"]
    built = BUILT.exists() and all(path.stat().st_mtime <= BUILT.stat().st_mtime for path in changed)
    if built and BUILT.read_text(encoding="utf-8").rpartition(LIBRARIES)[2] == sizes():
        return
    print("compiling the C++ kernels (once)", flush=True)
    started = time.time()
    command = [str(python), "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron_merak: ")]
    if done.returncode:
        said.append(f"LEFT OUT: {' '.join(command[1:])} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    BUILT.parent.mkdir(exist_ok=True)
    BUILT.write_text("\n".join([*said, LIBRARIES]) + sizes(), encoding="utf-8")
    os.utime(BUILT, (started, started))
    print("\n".join(said), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment to use or to make")
    parser.add_argument("--find", action="store_true", help="print the interpreter; fail when there is none")
    parser.add_argument("--missing", action="store_true", help="print what this interpreter lacks, if anything")
    options = parser.parse_args()
    if options.missing:
        lacking = missing()
        print("\n".join(lacking))
        sys.exit(bool(lacking))
    venv = Path(os.path.abspath(options.venv))
    python = find(venv)
    if options.find:
        print(python or "no-python-environment-run-make-install")
        sys.exit(python is None)
    if python is None:
        python = install(venv)
    print(f"python environment: {python}")
    if os.environ.get("MERAK_EXT") != "0":
        build(python)


if __name__ == "__main__":
    main()
