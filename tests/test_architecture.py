"""The rules of docs/architecture.md, read off the source: levels, cycles, state, environment, heavy
imports, size.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME = "megatron_merak"
LEVELS = {
    "errors": 0,
    "_native": 0,
    "extras": 0,
    "counting": 0,
    "strict_json": 0,
    "config": 1,
    "cluster": 1,
    "pipeline_parallel": 1,
    "megatron_flags": 1,
    "other_flags": 1,
    "durable": 1,
    "shell": 1,
    "job_files": 1,
    "arguments": 2,
    "plan": 2,
    "planner": 3,
    "segment": 3,
    "ops": 3,
    "parallel": 3,
    "preflight": 4,
    "report": 4,
    "tensor_parallel": 4,
    "models": 5,
    "graph": 5,
    "runtime": 6,
    "optimizer": 6,
    "data": 6,
    "checkpoint": 6,
    "stages": 7,
    "megatron": 7,
    "training": 8,
    "probe": 9,
    "hf_trainer": 9,
    "formats": 8,
    "parameter_server": 9,
    "cli": 10,
    "trl": 10,
    "engine": 10,
    "__main__": 11,
}
# Subpackages, from the lowest; files of the package itself are above all of them.
INNER = {
    "graph": ("ir", "capture", "partition", "sharding", "lowering", "fusion"),
    "hf_trainer": ("arguments", "batches", "run"),
}
TORCH_FREE = {room for room, level in LEVELS.items() if level <= 2} | {"planner", "report"}
ENVIRONMENT_READERS = {"parallel/launch.py", "parallel/position.py", "_native.py"}
SCRIPT_LINES = 20


class Module:
    """One source file of the package at ``package``."""

    def __init__(self, path: Path, package: Path):
        self.path = path.relative_to(package).as_posix()
        parts = (NAME, *path.relative_to(package).with_suffix("").parts)
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.room = parts[1] if len(parts) > 1 else ""
        inner = INNER.get(self.room, ())
        self.floor = inner.index(parts[2]) if len(parts) > 2 and parts[2] in inner else len(inner)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    def imports(self) -> Iterator[tuple[int, list[str]]]:
        """(line, candidates) of every import, lazy ones and those of ``import_module`` included;
        longest name first.
        """
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, [alias.name]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = (
                    self.name.split(".")[: -node.level or None]
                    if not self.is_package
                    else self.name.split(".")
                )
                above = (
                    above[: len(above) - (node.level - 1)]
                    if self.is_package and node.level
                    else above
                )
                base = ".".join(
                    (above if node.level else []) + ([node.module] if node.module else [])
                )
                yield from ((node.lineno, [f"{base}.{alias.name}", base]) for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
                texts = [
                    arg.value
                    for arg in node.args
                    if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                ]
                yield from ((node.lineno, [text]) for text in texts)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def read(package: Path) -> list[Module]:
    return [Module(path, package) for path in sorted(package.rglob("*.py"))]


@pytest.fixture(scope="module")
def house() -> list[Module]:
    return read(ROOT / NAME)


def inner_imports(modules: list[Module]) -> Iterator[tuple[Module, int, Module]]:
    """(importing module, line, imported module of this package)."""
    known = {module.name: module for module in modules}
    for module in modules:
        for line, candidates in module.imports():
            target = next((known[name] for name in candidates if name in known), None)
            if target is not None and target is not module:
                yield module, line, target


def upward_imports(modules: list[Module]) -> list[str]:
    found = [
        f"{module.path}: room {module.room} has no level"
        for module in modules
        if module.room not in LEVELS and module.name != NAME
    ]
    for module, line, target in inner_imports(modules):
        if (
            module.name == NAME
            or target.name == NAME
            or (module.room == target.room and module.floor >= target.floor)
        ):
            continue
        if LEVELS.get(module.room, -1) <= LEVELS.get(target.room, 99):
            found.append(
                f"{module.path}:{line} imports {target.name}, which is not on a lower level"
            )
    return found


def reachable(modules: list[Module]) -> dict[str, set[str]]:
    """All files that a file imports, directly or through others, by path."""
    direct: dict[str, set[str]] = {module.path: set() for module in modules}
    for module, _, target in inner_imports(modules):
        direct[module.path].add(target.path)
    found: dict[str, set[str]] = {}
    for start in direct:
        seen, left = set(), [start]
        while left:
            new = direct[left.pop()] - seen
            seen |= new
            left += new
        found[start] = seen
    return found


def walks() -> list[list[str]]:
    """The files that each numbered list of docs/architecture.md's walks begins with."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Three walks")[2].partition("\n## ")[0]
    return [
        re.findall(r"^\d+\. `([\w/.]+)`", part, re.MULTILINE)
        for part in re.split(r"^\*\*", section, flags=re.MULTILINE)[1:]
    ]


def test_walks_follow_imports(house):
    imports, found = reachable(house), walks()
    assert len(found) == 3 and all(len(files) > 5 for files in found)
    for files in found:
        for one, other in pairwise(files):
            assert one in imports[other] or other in imports[one], (
                f"{one} and {other} do not import each other"
            )


def cycles(modules: list[Module]) -> list[str]:
    sorter = TopologicalSorter({module.name: [] for module in modules})
    for module, _, target in inner_imports(modules):
        sorter.add(module.name, target.name)
    try:
        sorter.prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def state(modules: list[Module]) -> list[str]:
    """``global``, an empty module-level container (something will fill it), or a module-level table
    that changes. What an object keeps is not seen: ``PROCESS`` of megatron/process.py is the one
    that a whole process shares, as Megatron-LM's interface asks.
    """
    found = []
    for module in modules:
        tables = set()
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, (*CONTAINERS, ast.Call)
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                tables |= {target.id for target in targets if isinstance(target, ast.Name)}
                if ast.unparse(node.value) in EMPTY:
                    found.append(f"{module.path}:{node.lineno} {ast.unparse(node)}")
        for node in ast.walk(module.tree):
            changed = _changed_name(node)
            if isinstance(node, ast.Global) or changed in tables:
                found.append(f"{module.path}:{node.lineno} {ast.unparse(node)}")
    return found


CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
EMPTY = {
    "[]",
    "{}",
    *(
        f"{name}()"
        for name in ("list", "dict", "set", "deque", "Counter", "OrderedDict", "bytearray")
    ),
}
CHANGES = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "remove",
    "discard",
    "clear",
}


def _changed_name(node: ast.AST) -> str | None:
    """The name whose value ``node`` changes in place, as in ``x[1] = 2``, ``del x[1]`` and
    ``x.append(1)``.
    """
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(
        node.ctx, ast.Store | ast.Del
    ):
        owner = node.value
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CHANGES
    ):
        owner = node.func.value
    else:
        return None
    return owner.id if isinstance(owner, ast.Name) else None


def environment_reads(modules: list[Module]) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        f"{module.path}:{node.lineno} {ast.unparse(node)}"
        for module in modules
        if module.path not in ENVIRONMENT_READERS
        for node in ast.walk(module.tree)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and ast.unparse(node.value) == "os"
        )
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {alias.name for alias in node.names} & names
        )
    ]


def heavy_imports(modules: list[Module]) -> list[str]:
    """Planning needs the standard library only, matplotlib once a drawing is asked for, and PyYAML
    for --config.
    """
    found = []
    for module in modules:
        if module.room not in TORCH_FREE and module.name != NAME:
            continue
        top_level = {
            node.lineno
            for node in module.tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        for line, candidates in module.imports():
            library = candidates[-1].split(".")[0]
            lazy = library in ("matplotlib", "yaml") and line not in top_level
            if library not in sys.stdlib_module_names and library != NAME and not lazy:
                found.append(f"{module.path}:{line} imports {library}")
    return found


def set_loops(modules: list[Module]) -> list[str]:
    """Ranks walk a set in different orders, so one that reaches a collective makes them
    disagree.
    """

    def unordered(node: ast.expr) -> bool:
        made = isinstance(node, ast.Call) and ast.unparse(node.func) in ("set", "frozenset")
        return made or isinstance(node, ast.Set | ast.SetComp)

    return [
        f"{module.path}:{node.iter.lineno} loops over a set: {ast.unparse(node.iter)[:60]}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.For | ast.comprehension) and unordered(node.iter)
    ]


def packed(modules: list[Module]) -> list[str]:
    """Three statements or more on a line, as in ``a, b, c = 1, 2, 3``."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            several = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            if several and isinstance(node.targets[0], ast.Tuple) and len(node.value.elts) > 2:
                found.append(f"{module.path}:{node.lineno} {ast.unparse(node)[:60]}")
    return found


def splatted(modules: list[Module]) -> list[str]:
    """Tuples written out to be taken apart at once, as in ``f(*(a, b))``."""
    return [
        f"{module.path}:{node.lineno} {ast.unparse(node)[:60]}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple)
    ]


# A setting is a field of its section; attributes of transformers.Trainer are its interface.
MANY = {"config", "hf_trainer/trainer.py", "hf_trainer/arguments/shared.py"}


def attributes(modules: list[Module]) -> list[str]:
    """Classes that hold more than 20 values of their own, which nobody keeps in mind; but for
    frozen records.
    """
    found = []
    for module in modules:
        if {module.path.split("/")[0], module.path} & MANY:
            continue
        for node in ast.walk(module.tree):
            frozen = "dataclass(frozen=True)"
            if isinstance(node, ast.ClassDef) and frozen not in map(
                ast.unparse, node.decorator_list
            ):
                names = {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and isinstance(each.ctx, ast.Store)
                    and ast.unparse(each.value) == "self"
                }
                names |= {
                    ast.unparse(each.target)
                    for each in node.body
                    if isinstance(each, ast.AnnAssign)
                }
                if len(names) > 20:
                    found.append(f"{module.path}:{node.lineno} {node.name} has {len(names)}")
    return found


def caches(modules: list[Module]) -> list[str]:
    """Functions that keep results for the life of the process, but for those whose results cannot
    change.
    """
    return [
        f"{module.path}:{node.lineno} {node.name} keeps its results"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef)
        and any(
            re.search(r"(^|\.)(cache|lru_cache)\b", ast.unparse(each))
            for each in node.decorator_list
        )
        and (module.path, node.name) not in CACHED
    ]


# Functions whose results depend on the source, or on frozen arguments of which a process sees few.
CACHED = {
    ("_native.py", "_cpu_features"),
    ("arguments.py", "_flags"),
    ("config/settings.py", "value_type"),
    ("plan/hardware.py", "hardware_of"),
    ("plan/parts.py", "_strides"),
    ("planner/links.py", "link_along"),
}


def names_of_servers(modules: list[Module]) -> list[str]:
    """Parameter servers by name. A mesh knows a `SampleDivision`, a world its `Team`, a job its
    `Strategy`.
    """
    words = re.compile(r"parameter[ _-]server|\bps[-_]a?sync\b|\bof_worker\b", re.IGNORECASE)
    found = []
    for module in modules:
        if module.room not in WITHOUT_SERVERS:
            continue
        lines = enumerate(module.text.splitlines(), 1)
        found += [
            f"{module.path}:{number} {line.strip()}" for number, line in lines if words.search(line)
        ]
        for node in ast.walk(module.tree):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            if name in ("role", "served", "worker", "workers"):
                found.append(f"{module.path}:{node.lineno} {ast.unparse(node)}")
    return found


def classes_of_one_name(modules: list[Module]) -> list[str]:
    """Classes that share a name: nobody who reads it knows which one is meant. Layers of
    megatron/tensor_parallel have Megatron-LM's names because they are Megatron-LM's.
    """
    found: dict[str, list[str]] = {}
    for module in (module for module in modules if module.room != "megatron"):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module.path)
    return [
        f"{name} is in {' and in '.join(paths)}"
        for name, paths in sorted(found.items())
        if len(paths) > 1
    ]


DOOR = {"os.fsync", "os.replace", "os.rename", "shutil.move", "shutil.disk_usage"}
BESIDE_THE_DOOR = {
    "checkpoint/files.py",  # says how much is free where a disk is full
    "checkpoint/lock.py",  # a lock is written in place, and is of a process
    "durable.py",
    "preflight/disks.py",  # measures a disk
}


def disk_calls(modules: list[Module]) -> list[str]:
    """Renames, syncs and questions for free space beside ``durable``, the one door."""
    return [
        f"{module.path}:{node.lineno} {ast.unparse(node)[:60]}"
        for module in modules
        if module.path not in BESIDE_THE_DOOR
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in DOOR)
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".rename"))
        or (
            isinstance(node, ast.ImportFrom)
            and any(f"{node.module}.{each.name}" in DOOR for each in node.names)
        )
    ]


# All below; but settings and an error are of servers, and a role in a graph is a weight's.
WITHOUT_SERVERS = {room for room, level in LEVELS.items() if level < LEVELS["parameter_server"]}
WITHOUT_SERVERS -= {"config", "errors", "graph"}
RULES = (
    upward_imports,
    cycles,
    state,
    environment_reads,
    heavy_imports,
    set_loops,
    packed,
    splatted,
    attributes,
    caches,
    names_of_servers,
    classes_of_one_name,
    disk_calls,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule, house):
    offenders = rule(house)
    assert not offenders, "\n" + "\n".join(offenders)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (upward_imports, "plan.py", "from .planner import plan"),
        (upward_imports, "plan.py", "def f():\n    import megatron_merak.runtime.engine"),
        (
            upward_imports,
            "plan.py",
            "import importlib\nimportlib.import_module('megatron_merak.planner')",
        ),
        (upward_imports, "data/blend.py", "from ..runtime import engine"),
        (upward_imports, "config/__init__.py", "from ..cluster import Cluster"),
        (upward_imports, "graph/ir/nodes.py", "from ..capture import capture"),
        (upward_imports, "graph/fusion/fuse.py", "from .. import measure"),
        (upward_imports, "novelty.py", ""),
        (cycles, "runtime/engine.py", "from . import stage"),
        (state, "cluster.py", "_seen = {}"),
        (state, "cluster.py", "table = {1: 2}\ndef f():\n    table[3] = 4"),
        (state, "cluster.py", "table = [1]\ndef f():\n    table.append(4)"),
        (state, "cluster.py", "def f():\n    global x\n    x = 1"),
        (environment_reads, "runtime/engine.py", "import os\nos.environ['HOME']"),
        (environment_reads, "runtime/engine.py", "from os import getenv"),
        (heavy_imports, "planner/__init__.py", "def f():\n    import torch"),
        (heavy_imports, "cluster.py", "import matplotlib.figure"),
        (set_loops, "runtime/engine.py", "[name for name in {1, 2}]"),
        (packed, "cluster.py", "a, b, c = 1, 2, 3"),
        (splatted, "cluster.py", "table = [*('a', 'b'), 'c']"),
        (
            attributes,
            "cluster.py",
            "class Odd:\n    " + "\n    ".join(f"x{n}: int" for n in range(21)),
        ),
        (classes_of_one_name, "cluster.py", "class Stage:\n    pass"),
        (disk_calls, "data/blend.py", "import os\nos.replace(a, b)"),
        (disk_calls, "data/blend.py", "from os import fsync"),
        (disk_calls, "data/blend.py", "path.rename(other)"),
        (caches, "cluster.py", "@functools.cache\ndef f(x):\n    return x"),
        (
            upward_imports,
            "runtime/engine.py",
            "def f():\n    from ..parameter_server import worker",
        ),
        (names_of_servers, "runtime/engine.py", "def f(mesh):\n    return mesh.workers"),
        (names_of_servers, "runtime/engine.py", "class Mesh:\n    worker: int = 0"),
        (names_of_servers, "data/blend.py", "def f(world):\n    return world.role is None"),
        (names_of_servers, "data/blend.py", '"""Of the workers of parameter servers."""'),
    ],
)
def test_a_breach_is_seen(rule, path, text, tmp_path):
    package = tmp_path / NAME
    house = {
        "__init__.py": "",
        "plan.py": "",
        "cluster.py": "",
        "planner/__init__.py": "from ..plan import x",
        "runtime/__init__.py": "",
        "runtime/engine.py": "",
        "runtime/stage.py": "from .engine import run\n\n\nclass Stage:\n    pass",
        "data/__init__.py": "",
        "parameter_server/worker.py": "",
        "config/__init__.py": "",
        "parallel/launch.py": "import os\nos.environ",
        "graph/ir/nodes.py": "",
        "graph/capture/capture.py": "from ..ir import nodes",
        "graph/fusion/fuse.py": "",
        "graph/measure.py": "from .capture import capture",
    }
    for name, source in house.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    assert rule(read(package)) == []
    (package / path).write_text(text)
    assert len(rule(read(package))) == 1


def test_planning_runs_without_torch(house):
    """Not only by the look of the imports: every module of the lower levels loads while torch and
    numpy are barred.
    """
    modules = [module.name for module in house if module.room in TORCH_FREE]
    barred = ("torch", "numpy", "transformers", "matplotlib")
    code = (
        f"import sys, importlib\nsys.modules.update(dict.fromkeys({barred!r}))\n"
        f"for name in {[NAME, *modules]!r}: importlib.import_module(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr


def test_the_document_shows_the_levels_that_are_enforced(house):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = {
        name: int(level)
        for name, level in re.findall(r"^  (\w+)(?:\.py|/)? +(\d+)  ", text, re.MULTILINE)
    }
    rooms = {module.room for module in house if module.room}
    assert shown == {room: level for room, level in LEVELS.items() if room in rooms}


def test_entry_scripts_stay_thin():
    commands = [ROOT / "tools" / path.name for path in (ROOT / NAME / "cli").glob("*.py")]
    for script in [*ROOT.glob("pretrain_*.py"), *filter(Path.exists, commands)]:
        assert len(script.read_text(encoding="utf-8").splitlines()) < SCRIPT_LINES, script.name
