"""The package as users get it: a wheel and an editable install, without network and without the source on the path."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_merak").rglob("*.py")}
ASSETS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_merak").rglob("assets/*")}
SHIPPED = SOURCES | ASSETS
LOOK = (
    "import site, sys; site.addsitedir(sys.argv[1]); import megatron_merak.errors as e, importlib.metadata as m; "
    "print(e.__file__, m.version('megatron-merak'))"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy, since building leaves files in the source folder."""
    copy = tmp_path_factory.mktemp("packaging") / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    not_source = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "megatron_merak", copy / "megatron_merak", ignore=not_source)
    return copy


def pip(*arguments):
    pytest.importorskip("pip")
    command = [sys.executable, "-m", "pip", *arguments, "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def installed(site_packages):
    """(file of the package, version) as a Python sees them that knows only its own libraries and ``site_packages``."""
    command = [sys.executable, "-S", "-I", "-c", LOOK, str(site_packages)]
    done = subprocess.run(command, cwd=site_packages, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_wheel_holds_the_package_and_nothing_else(source, tmp_path):
    pip("wheel", str(source), "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        information = {name for name in names if ".dist-info/" in name}
        assert names - information == SHIPPED
        assert any(name.endswith("licenses/LICENSE") for name in information)
        archive.extractall(tmp_path / "site")
    path, version = installed(tmp_path / "site")
    assert path.startswith(str(tmp_path)) and version == PROJECT["version"]


def test_an_editable_install_runs_the_source_itself(source, tmp_path):
    pip("install", "--ignore-installed", "--prefix", str(tmp_path), "--editable", str(source))
    (site_packages,) = tmp_path.glob("lib*/python*/site-packages")
    path, version = installed(site_packages)
    assert path == str(source / "megatron_merak" / "errors.py") and version == PROJECT["version"]


def build(source, **environment):
    """What building in place says, with a compiler that compiles nothing unless told otherwise."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    settings = os.environ | {"CXX": "false", "CC": "false", "MERAK_EXT": "auto"} | environment
    return subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True, timeout=100)


@pytest.fixture
def with_sources(source, tmp_path):
    """The source folder and a C++ file for each part."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copytree(ROOT / "csrc", copy / "csrc")
    return copy


def test_without_a_compiler_the_package_is_pure_python(with_sources, tmp_path):
    """All parts are tried without pybind11 and ninja too: torch has headers of the one and builds without the other."""
    (with_sources / "pybind11.py").write_text("raise ImportError\n")
    (tmp_path / "ninja").symlink_to(shutil.which("false"))
    done = build(with_sources, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    for part in ("_C", "_ops_cpu"):
        assert f"megatron_merak: megatron_merak.{part} LEFT OUT" in done.stderr
    assert not list((with_sources / "megatron_merak").glob("*.so"))


def test_parts_that_are_not_wanted_are_not_built(with_sources):
    done = build(with_sources, MERAK_EXT="0")
    assert done.returncode == 0 and "no compiled parts, MERAK_EXT=0" in done.stderr and "LEFT OUT" not in done.stderr


def test_a_strict_build_ends_where_a_part_does_not_compile(with_sources):
    assert build(with_sources, MERAK_STRICT="1").returncode != 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
def test_cuda_kernels_that_are_asked_for_and_cannot_be_built(with_sources):
    done = build(with_sources, MERAK_CUDA="1")
    assert done.returncode != 0 and "MERAK_CUDA=1: this build of torch has no CUDA. Install" in done.stderr


def test_every_library_that_is_imported_is_declared():
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["tracking"]]
    declared = {re.match(r"[\w-]+", requirement).group().replace("-", "_") for requirement in requirements}
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"megatron_merak"} <= declared
