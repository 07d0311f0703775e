"""Find a Python environment that has what a make target needs, or make one. The Makefile's set-up step.

    python tools/environment.py --venv .venv --needs dependencies test     make sure that there is one, and say which
    python tools/environment.py --venv .venv --needs lint --find           print its interpreter, install nothing

Needs are names of pyproject.toml: ``dependencies`` for all of the project's own, an extra, or one library of these.
Looked at in this order: the environment at --venv, then the interpreter that runs this script. Only when neither has
what is needed is --venv created or completed, with pip and for all targets; so an environment that has it needs no
network. With --oldest the libraries of --venv are the oldest that pyproject.toml allows, and no other environment will
do. Then the compiled parts are built in place, where their sources changed, or Python or torch; without a C++ compiler
everything runs without them.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM = (3, 11)
# what an environment that is made here has
EVERYTHING = ("dependencies", "test", "lint", "tracking", "pictures")
PINNED = ("dependencies", "accelerate", "peft", "matplotlib")  # what --oldest chooses
# what building them said, newer than all sources that it was made from
BUILT = ROOT / "build" / "compiled-parts"
LIBRARIES = "libraries:\n"  # in it, before what they were built for and their sizes
AGAINST = "import sys, importlib.metadata as m; print('Python', *sys.version_info[:2], 'torch', m.version('torch'))"


def requirements(needs, pinned=False):
    """The requirement strings of pyproject.toml that ``needs`` name. pinned: and those of the
    oldest libraries.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sets = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    single = {
        re.match(r"[\w-]+", line).group(): [line] for lines in sets.values() for line in lines
    }
    lines = [line for need in needs for line in (single | sets)[need]]
    bounds = [line for need in PINNED for line in (single | sets)[need]] if pinned else []
    return [re.sub(r">=([\d.]+).*", r"==\1.*", line) for line in bounds] + lines


def missing(needs, pinned=False):
    """What this interpreter lacks of ``requirements``, in words."""
    if sys.version_info < MINIMUM:
        return [f"Python {MINIMUM[0]}.{MINIMUM[1]} or newer (this is {sys.version.split()[0]})"]
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging"]
    lacking = []
    for line in requirements(needs, pinned):
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


def find(venv, needs, pinned=False):
    """The interpreter to use, or None when something has to be installed first. pinned: only that
    of ``venv``.
    """
    python = interpreter(venv)
    command = [
        str(python),
        str(Path(__file__).resolve()),
        "--missing",
        "--needs",
        *needs,
        *["--oldest"] * pinned,
    ]
    if python.exists() and not subprocess.run(command, capture_output=True).returncode:
        return python
    return None if pinned or missing(needs) else Path(sys.executable)


def install(venv, pinned=False):
    """Create the environment if there is none, then install what any target needs and the project
    itself, editable.
    """
    if sys.version_info < MINIMUM:
        sys.exit(
            f"PYTHON {sys.executable}: needs {missing(())[0]}. Name a newer one: make PYTHON=python3.12 ..."
        )
    python = interpreter(venv)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"installing into {venv} (once; downloads PyTorch unless pip has it)", flush=True)
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([*pip, *requirements(EVERYTHING, pinned)], check=True)
        install_commands(python, check=True)
    except subprocess.CalledProcessError as error:
        remedy = f"Repair what is reported above, or remove {venv}, or name a complete environment: make PYTHON=... ..."
        sys.exit(f"{' '.join(error.cmd[:4])} failed with status {error.returncode}. {remedy}")
    return python


def install_commands(python, check=False):
    """Install the project itself, editable, without its compiled parts: `build` makes these where
    they stay.
    """
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    editable = [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run(editable, env=os.environ | {"MERAK_EXT": "0"}, check=check)


def new_commands(venv):
    """The commands of pyproject.toml that ``venv`` lacks, where it has others of them."""
    import tomllib

    names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    lacking = [name for name in names if not (interpreter(venv).parent / name).exists()]
    return lacking if len(lacking) < len(names) else []


def sizes():
    """A line for each library that is there: one that is lost or cut short is built again."""
    libraries = sorted((ROOT / "megatron_merak").glob("*.so"))
    return "".join(f"{path.name} {path.stat().st_size}\n" for path in libraries)


def build(python):
    """Compile what changed since the last try, and say what came of it."""
    changed = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    changed += [ROOT / "setup.py", ROOT / "megatron_merak" / "_native.py"]
    built = BUILT.exists() and all(
        path.stat().st_mtime <= BUILT.stat().st_mtime for path in changed
    )
    against = subprocess.run([str(python), "-c", AGAINST], capture_output=True, text=True).stdout
    if built and BUILT.read_text(encoding="utf-8").rpartition(LIBRARIES)[2] == against + sizes():
        return
    print("compiling the C++ kernels (once)", flush=True)
    started = time.time()
    command = [str(python), "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron_merak: ")]
    if done.returncode:
        said.append(
            f"LEFT OUT: {' '.join(command[1:])} failed with status {done.returncode}:\n{done.stderr[-2000:]}"
        )
    BUILT.parent.mkdir(exist_ok=True)
    BUILT.write_text("\n".join([*said, LIBRARIES]) + against + sizes(), encoding="utf-8")
    os.utime(BUILT, (started, started))
    print("\n".join(said), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", help="the environment to use or to make"
    )
    parser.add_argument(
        "--needs",
        nargs="+",
        default=EVERYTHING,
        metavar="NAME",
        help="see above; default: everything",
    )
    parser.add_argument(
        "--oldest", action="store_true", help="the oldest libraries that are supported, in --venv"
    )
    parser.add_argument(
        "--find", action="store_true", help="print the interpreter; fail when there is none"
    )
    parser.add_argument(
        "--missing", action="store_true", help="print what this interpreter lacks, if anything"
    )
    options = parser.parse_args()
    if options.missing:
        lacking = missing(options.needs, options.oldest)
        print("\n".join(lacking))
        sys.exit(bool(lacking))
    venv = Path(os.path.abspath(options.venv))
    python = find(venv, options.needs, options.oldest)
    if options.find:
        print(python or "no-python-environment-run-make-install")
        sys.exit(python is None)
    if python is None:
        if not options.oldest:
            print(f"{sys.executable} lacks {', '.join(missing(options.needs))}", flush=True)
        python = install(venv, options.oldest)
    if python == interpreter(venv) and (lacking := new_commands(venv)):
        print(f"installing {', '.join(lacking)}", flush=True)
        install_commands(python)
    print(f"python environment: {python}")
    if os.environ.get("MERAK_EXT") != "0" and options.needs != ["lint"]:
        build(python)


if __name__ == "__main__":
    main()
