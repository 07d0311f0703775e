"""``--parity-table PATH``: write what the full sweep measured, on however many workers its cases ran."""

from pathlib import Path

import pytest

MEASURED = "parity"  # the property of a test's report with (case, its distance from one process)


def pytest_addoption(parser):
    parser.addoption("--parity-table", metavar="PATH", help="where the full sweep (-m slow) writes its table")


def pytest_configure(config):
    path = config.getoption("--parity-table", None)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(Path(path)))


class Table:
    """Listens to the reports of all tests; once every case of the sweep passed, writes the table."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[str, tuple[float, ...]] = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.found |= {case: tuple(far) for name, (case, far) in report.user_properties if name == MEASURED}

    def pytest_sessionfinish(self):
        from .cases import sweep
        from .compare import Distance
        from .table import markdown

        cases = {str(case): case for case in sweep()}
        if self.found.keys() == cases.keys():
            self.path.write_text(markdown({cases[name]: Distance(*far) for name, far in self.found.items()}))


@pytest.fixture
def measured(record_property):
    """Call it with a case of the sweep and its distance, as numbers."""

    def measured(case: object, far: tuple[float, ...]) -> None:
        record_property(MEASURED, (str(case), far))

    return measured
