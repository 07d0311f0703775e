"""The line that shows how far a search is: on a terminal alone, after some seconds, and gone in the
end.
"""

import io

import pytest

from megatron_merak.pipeline_parallel.search import progress
from megatron_merak.pipeline_parallel.search.progress import SearchProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def run(clock, stream, **options):
    with SearchProgress("searching", stream, **options) as told:
        for seconds, share in ((0, 0.1), (1.9, 0.2), (2.1, 0.3), (2.2, 0.4), (2.5, 0.5)):
            clock[0] = 100 + seconds
            told(share)
    return stream.getvalue()


def test_a_line_comes_after_two_seconds_and_goes(clock):
    assert run(clock, Terminal()) == "\rsearching: 30%\rsearching: 50%\r              \r"


def test_nothing_is_written_to_files_or_unasked(clock):
    assert run(clock, io.StringIO()) == run(clock, Terminal(), shown=False) == ""


def test_parts_of_the_work_count_together(clock):
    stream = Terminal()
    told = SearchProgress("searching", stream)
    told.part(1, 4)
    clock[0] += 3
    told(0.5)
    assert stream.getvalue().endswith("searching: 38%")
