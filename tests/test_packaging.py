"""The package as users get it: a wheel and an editable install, without network and without the source on the path."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

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
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "megatron_merak", copy / "megatron_merak", ignore=shutil.ignore_patterns("__pycache__"))
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
