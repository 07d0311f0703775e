"""Tests that need a GPU skip where there is none; with ``--no-skip``, which ``make gpu`` gives, that is a failure."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--no-skip", action="store_true", help="a test that skips fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skip", False):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped: {call.excinfo.value}"
    return report
