"""Tests that need a GPU skip where there is none; with ``--no-skip``, which ``make gpu`` gives,
that is a failure.

Kernels that wait for each other need CUDA_MODULE_LOADING=EAGER: one that is loaded while another
waits never starts.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption("--no-skip", action="store_true", help="a test that skips fails")
    parser.addoption(
        "--patience", type=float, default=20.0, help="seconds that a kernel waits for its peer"
    )


@pytest.fixture
def patience(pytestconfig):
    """Seconds that kernels and process groups wait for a peer, which on one GPU may not be running
    beside them.
    """
    return pytestconfig.getoption("--patience", 20.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if (
        report.skipped
        and not hasattr(report, "wasxfail")
        and item.config.getoption("--no-skip", False)
    ):
        report.outcome, report.longrepr = (
            "failed",
            f"{item.nodeid} was skipped: {call.excinfo.value}",
        )
    return report
