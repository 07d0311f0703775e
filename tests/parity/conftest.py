"""``--parity-table PATH``: write what the full sweep measured, on however many workers its cases
ran. What a sweep that was ended early measured is kept in pytest's cache, and not measured again
while the sources are the same."""

import json
from pathlib import Path

import pytest

MEASURED = "parity"  # the property of a test's report with (case, its distance from one process)
SOURCES = ("megatron_merak", "csrc", "tests/parity")


def pytest_addoption(parser):
    parser.addoption(
        "--parity-table", metavar="PATH", help="where the full sweep (-m slow) writes its table"
    )


def pytest_configure(config):
    if path := config.getoption("--parity-table", None):
        kept = Path(config.cache.mkdir("parity")) / "measured.jsonl"
        config.pluginmanager.register(Table(Path(path), kept, hasattr(config, "workerinput")))


class Table:
    """Listens to the reports of all tests; once every case of the sweep passed, writes the table. A
    ``worker`` only leaves out what was measured before."""

    def __init__(self, path: Path, kept: Path, worker: bool):
        from tests.zoo.sweep import digest, read_cache

        self.path, self.kept, self.worker, self.digest = path, kept, worker, digest(SOURCES)
        self.found = {case: row["far"] for case, row in read_cache(kept, self.digest).items()}

    def pytest_collection_modifyitems(self, config, items):
        old = [
            item for item in items if item.get_closest_marker("slow") and _case(item) in self.found
        ]
        config.hook.pytest_deselected(items=old)
        items[:] = [item for item in items if item not in old]

    def pytest_runtest_logreport(self, report):
        if self.worker or report.when != "call" or not report.passed:
            return
        for case, far in (value for name, value in report.user_properties if name == MEASURED):
            self.found[case] = far
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"type": case, "digest": self.digest, "far": far}) + "\n")

    def pytest_sessionfinish(self):
        from .cases import sweep
        from .compare import Distance
        from .table import markdown

        cases = {str(case): case for case in sweep()}
        if not self.worker and self.found.keys() == cases.keys():
            self.path.write_text(
                markdown({cases[name]: Distance(*far) for name, far in self.found.items()})
            )


def _case(item) -> str:
    """What a test of one case calls it."""
    return str(item.callspec.params.get("case")) if hasattr(item, "callspec") else ""


@pytest.fixture
def measured(record_property):
    """Call it with a case of the sweep and its distance, as numbers."""

    def measured(case: object, far: tuple[float, ...]) -> None:
        record_property(MEASURED, (str(case), far))

    return measured
