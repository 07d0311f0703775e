"""One thread per process, decided before torch is imported: the machine's cores belong to the
ranks. And no test leaves behind another way to compute fp32 products."""

import gc
import os
import signal
import subprocess
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


SIGNALS = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def pytest_configure():
    """Signals that the caller ignores, as a shell script does for `make test &` and nohup does,
    would be ignored by every process that a test starts and sends them to."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """What tests are found in stays: garbage collections while it grows took a third of the time,
    and later each took half a second for a million objects of modules and items.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def fp32_products():
    """A trainer in the test's own process chooses how they are computed, where the CPU leaves a
    choice; what a later test computes here would have other bits than on the ranks that it is
    compared with."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def signals_stay():
    """A handler that a test leaves behind changes what later tests of the same worker find."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    left = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if left[number] is not before[number]:
            signal.signal(number, before[number])
    assert left == before


MUCH = 20_000  # characters, from the end


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failure that names only a command and its status says nothing: what the command printed
    belongs to it.
    """
    report = yield
    failure = call.excinfo.value if call.excinfo else None
    if isinstance(failure, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        for name, text in (("output", failure.stdout), ("errors", failure.stderr)):
            if text:
                text = text.decode(errors="replace") if isinstance(text, bytes) else text
                report.sections.append((f"{name} of the command", text[-MUCH:]))
    return report


def pytest_terminal_summary(terminalreporter):
    """How often processes were killed, by the tests that passed and by those that did not."""
    for outcome in ("passed", "failed"):
        reports = terminalreporter.stats.get(outcome, [])
        told = [
            value for each in reports for name, value in each.user_properties if name == "kills"
        ]
        if told:
            tests = f"{len(told)} {outcome} test{'s' * (len(told) > 1)}"
            terminalreporter.write_line(f"{sum(told):,} processes were killed by {tests}")


LONG = ("parity", "training", "hf_trainer", "rehearsal", "zoo")


def pytest_collection_modifyitems(items):
    """Folders with long files come first: else one worker runs the last of them while the others
    are idle.
    """
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.parent.name, len(LONG)))
