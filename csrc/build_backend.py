"""The build backend of pyproject.toml: setuptools', with torch within its reach.

The CPU kernels compile against torch's headers, and pip builds in an environment of its own, which
has none. There the torch of the environment that pip installs into serves, where a suitable one is;
else torch is among the requirements of the build, as it is among those of the package. MERAK_EXT=0
builds without.
"""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)

# What the environment around an isolated build has: run without the variables by which pip hides
# it.
_LOOK = "import sys, importlib.metadata as m; print(m.version('torch'), *sys.path, sep='\\n')"
_HIDING = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")


def requirement() -> str:
    """That of torch, as pyproject.toml has it."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(line for line in project["dependencies"] if line.startswith("torch"))


def suitable(found: str) -> bool:
    from packaging.requirements import Requirement  # setuptools brings it

    return Requirement(requirement()).specifier.contains(found, prereleases=True)


def around() -> list[str]:
    """The import path of the environment around this one, empty where it has no suitable torch."""
    settings = {name: value for name, value in os.environ.items() if name not in _HIDING}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LOOK], capture_output=True, text=True, env=settings
    )
    found, *path = done.stdout.splitlines() or [""]
    return path if done.returncode == 0 and suitable(found) else []


def within_reach() -> bool:
    """Whether setup.py can import torch; makes that of the environment around this one
    importable.
    """
    try:
        return suitable(version("torch"))
    except PackageNotFoundError:
        path = around()
        sys.path += [entry for entry in path if entry not in sys.path and Path(entry).is_dir()]
        return bool(path)


def _torch() -> list[str]:
    return [] if os.environ.get("MERAK_EXT") == "0" or within_reach() else [requirement()]


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings=None):
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    within_reach()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    within_reach()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
