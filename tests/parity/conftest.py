"""``--parity-table PATH``: write what the full sweep measured."""

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--parity-table", metavar="PATH", help="where the full sweep (-m slow) writes its table")


@pytest.fixture(scope="session")
def measured(request):
    """Case -> Distance of the full sweep, which the tests fill in."""
    from .cases import sweep
    from .table import markdown

    found = {}
    yield found
    path = request.config.getoption("--parity-table", None)
    if path and found.keys() == set(sweep()):
        Path(path).write_text(markdown(found))
