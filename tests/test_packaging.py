"""The package as users get it: a wheel and an editable install, without network and without the
source on the path.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import megatron_merak
from megatron_merak import _native

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = megatron_merak.__version__
SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_merak").rglob("*.py")}
ASSETS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_merak").rglob("assets/*")}
SHIPPED = SOURCES | ASSETS | {"megatron_merak/py.typed"}
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
    not_source = shutil.ignore_patterns("__pycache__", "*.so", "_left_out.json")
    shutil.copytree(ROOT / "megatron_merak", copy / "megatron_merak", ignore=not_source)
    (copy / "csrc").mkdir()
    shutil.copy(ROOT / "csrc" / "build_backend.py", copy / "csrc")
    return copy


def pip(*arguments):
    pytest.importorskip("pip")
    command = [
        sys.executable,
        "-m",
        "pip",
        *arguments,
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    settings = os.environ | {"MERAK_EXT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=settings)
    assert done.returncode == 0, done.stdout + done.stderr


def installed(site_packages):
    """(file of the package, version) as a Python sees them that knows only its own libraries and
    ``site_packages``.
    """
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
    assert path.startswith(str(tmp_path)) and version == VERSION


def test_an_editable_install_runs_the_source_itself(source, tmp_path):
    pip("install", "--ignore-installed", "--prefix", str(tmp_path), "--editable", str(source))
    (site_packages,) = tmp_path.glob("lib*/python*/site-packages")
    path, version = installed(site_packages)
    assert path == str(source / "megatron_merak" / "errors.py") and version == VERSION


def build(source, **environment):
    """What building in place says, with a compiler that compiles nothing unless told otherwise."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    settings = os.environ | {"CXX": "false", "CC": "false", "MERAK_EXT": "auto"} | environment
    return subprocess.run(
        command, cwd=source, env=settings, capture_output=True, text=True, timeout=100
    )


@pytest.fixture
def with_sources(source, tmp_path):
    """The source folder and a C++ file for each part."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copytree(ROOT / "csrc", copy / "csrc", dirs_exist_ok=True)
    return copy


def test_without_a_compiler_the_package_is_pure_python(with_sources, tmp_path):
    """All parts are tried without pybind11 and ninja too: torch has headers of the one and builds
    without the other.
    """
    (with_sources / "pybind11.py").write_text("raise ImportError\n")
    (tmp_path / "ninja").symlink_to(shutil.which("false"))
    done = build(with_sources, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    for part in ("_C", "_ops_cpu"):
        assert f"megatron_merak: megatron_merak.{part} LEFT OUT" in done.stderr
    assert not list((with_sources / "megatron_merak").glob("*.so"))
    look = (
        "import megatron_merak._native as n; print(n.absent('_ops_cpu')); print(n.host_problem())"
    )
    said = subprocess.run(
        [sys.executable, "-c", look], cwd=with_sources, capture_output=True, text=True
    ).stdout
    for part, line in zip(("_ops_cpu", "_C"), said.splitlines(), strict=True):
        assert line.startswith(f"megatron_merak/{part} is not built (it did not compile: "), said


def test_parts_that_are_not_wanted_are_not_built(with_sources):
    done = build(with_sources, MERAK_EXT="0")
    assert (
        done.returncode == 0
        and "no compiled parts, MERAK_EXT=0" in done.stderr
        and "LEFT OUT" not in done.stderr
    )


def test_a_strict_build_ends_where_a_part_does_not_compile(with_sources):
    assert build(with_sources, MERAK_STRICT="1").returncode != 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has CUDA")
def test_cuda_kernels_that_are_asked_for_and_cannot_be_built(with_sources):
    done = build(with_sources, MERAK_CUDA="1")
    assert (
        done.returncode != 0
        and "MERAK_CUDA=1: this build of torch has no CUDA. Install" in done.stderr
    )


def backend(code, **settings):
    """What ``code`` prints in a process that has csrc/build_backend.py, in the folder of
    pyproject.toml.
    """
    code = f"import sys; sys.path.insert(0, 'csrc'); import build_backend as backend\n{code}"
    environment = {
        name: value for name, value in os.environ.items() if name != "MERAK_EXT"
    } | settings
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_build_asks_for_torch_only_where_no_suitable_one_is():
    (requirement,) = [line for line in PROJECT["dependencies"] if line.startswith("torch")]
    older = "backend.version = lambda name: '2.10.0'\n"
    assert backend("print(backend._torch())") == ["[]"]
    assert backend(older + "print(backend._torch())") == [str([requirement])]
    assert backend(older + "print(backend._torch())", MERAK_EXT="0") == ["[]"]


def test_an_isolated_build_finds_the_torch_around_it():
    """pip hides the environment's libraries from the process of the build; one that it starts
    itself can see them.
    """
    folder = str(Path(torch.__file__).parents[1])
    code = f"""
def hidden(name):
    raise backend.PackageNotFoundError(name)
backend.version = hidden
import packaging.requirements
sys.path = [entry for entry in sys.path if entry != {folder!r}]
print(backend._torch(), {folder!r} in sys.path)
backend.suitable = lambda found: False
print(len(backend._torch()))"""
    assert backend(code, PYTHONPATH="/nowhere") == ["[] True", "1"]


def test_of_several_libraries_the_first_that_the_cpu_can_run_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "_HERE", tmp_path)
    monkeypatch.setattr(_native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(_native, "_CPU", tmp_path / "cpuinfo")
    for name, needs in (("_ops_cpu", b"avx2 fma "), ("_ops_cpu_avx512", b"avx2 fma avx512f ")):
        text = b"merak interface %d;merak needs %s;" % (_native.INTERFACE, needs)
        (tmp_path / f"{name}.abi3.so").write_bytes(text)
    told = []
    for flags in ("fma avx2 avx512f", "avx2 fma", "sse4_2"):
        (tmp_path / "cpuinfo").write_text(f"model\t: x\nflags\t\t: {flags}\n")
        _native._cpu_features.cache_clear()
        found = _native.library("_ops_cpu")
        told.append((found.name, _native.unfit(found)))
    _native._cpu_features.cache_clear()
    lacks = "_ops_cpu.abi3.so was built for a CPU with avx2, fma, which this one does not have"
    assert told == [
        ("_ops_cpu_avx512.abi3.so", ""),
        ("_ops_cpu.abi3.so", ""),
        ("_ops_cpu.abi3.so", lacks),
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_of_the_source_distribution_has_the_kernels(tmp_path):
    """As `make wheel` builds them, of what git would give to others."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    for name in filter(None, listed.stdout.split("\0")):
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path / "clone", check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert {
        name for name in listed.stdout.split("\0") if not name.startswith((".git", ".ci"))
    } - names <= {""}
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        str(archive),
    ]
    settings = os.environ | {"MERAK_PORTABLE": "1", "MERAK_STRICT": "1"}
    subprocess.run(
        [*command, "--wheel-dir", str(tmp_path)], env=settings, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        built = {name.partition(".")[0] for name in content.namelist() if name.endswith(".so")}
    kernels = {
        "_C",
        "_ops_cpu",
        *({"_ops_cpu_avx512"} if _native.platform.machine() == "x86_64" else ()),
    }
    assert built >= {f"megatron_merak/{name}" for name in kernels}


def test_the_documents_say_what_is_declared():
    """The ranges that README and docs/native.md name are those of pyproject.toml."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("torch", "transformers"):
        (requirement,) = [line for line in PROJECT["dependencies"] if re.match(rf"{name}\b", line)]
        assert f"`{requirement}`" in readme
    assert f"Python `{PROJECT['requires-python']}`" in readme
    low, above = re.search(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(PROJECT["dependencies"])).groups()
    native = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
    assert set(re.findall(r"torch 2\.(\d+) to 2\.(\d+)", native)) == {(low, str(int(above) - 1))}
    rows = re.findall(r"^\| `(merak-[\w-]+)` \| `([\w/.]+)` \|", readme, re.MULTILINE)
    assert {name for name, _ in rows} == set(PROJECT["scripts"]) and all(
        (ROOT / file).exists() for _, file in rows
    )


def test_every_library_that_is_imported_is_declared():
    extras = PROJECT["optional-dependencies"]
    requirements = [
        *PROJECT["dependencies"],
        *extras["tracking"],
        *extras["mpi"],
        *extras["pictures"],
        *extras["trl"],
        *extras["tokenizers"],
        *extras["inputs"],
    ]
    declared = {
        re.match(r"[\w-]+", requirement).group().replace("-", "_") for requirement in requirements
    }
    # of another name than its module
    modules = {
        "pyyaml": "yaml",
        "mlflow_skinny": "mlflow",
        "opentelemetry_exporter_otlp_proto_http": "opentelemetry",
    }
    declared |= {modules[name] for name in declared if name in modules}
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"megatron_merak"} <= declared


def test_what_is_installed_is_named_as_a_clone_takes_it():
    """No package index has this project, and an extra that is named is one."""
    files = [*ROOT.glob("megatron_merak/**/*.py"), *ROOT.glob("examples/*.py")]
    files += [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    wrong = [path for path, text in texts.items() if re.search(r"megatron[-_]merak\[", text)]
    assert not wrong
    named = {
        extra
        for text in texts.values()
        for extra in re.findall(r"installed_by\(['\"](\w+)|'\.\[(\w+)\]'", text)
    }
    assert {one or other for one, other in named} <= PROJECT["optional-dependencies"].keys()
