"""What a picture counts: micro-batches in flight over time, and the tables of figures."""

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.pipeline_parallel.pictures.palette import FACES, ink, time_text
from megatron_merak.pipeline_parallel.pictures.table import aligned, rank_rows, summary_rows
from megatron_merak.pipeline_parallel.pictures.view import View, in_flight

from .views import mixed, view


def test_micro_batches_in_flight_over_time():
    """Two ranks, F = 1, B = 2: rank 0 starts F1 at 1 and ends B0 at 6, when nothing more is to
    start.
    """
    shown = view("1f1b", 2, 2, forward=1, backward=2, weight=0, transfer=0, latency=0)
    assert in_flight(shown.timeline) == (
        ((0.0, 1), (1.0, 2), (6.0, 1), (9.0, 0)),
        ((0.0, 0), (1.0, 1), (4.0, 1), (7.0, 0)),
    )
    assert shown.peak_in_flight() == (2, 1)


def test_a_weight_gradient_of_its_own_holds_its_micro_batch():
    shown = view("zb-h1", 2, 4)
    ends = [
        event.end for event in shown.timeline.events if event.rank == 0 and event.op.kind == "W"
    ]
    curve = in_flight(shown.timeline)[0]
    falls = [
        time for (_, before), (time, after) in zip(curve, curve[1:], strict=False) if after < before
    ]
    assert falls and set(falls) <= set(ends)


@pytest.mark.parametrize("name", BUILDERS)
def test_peaks_are_those_of_the_checker(name):
    """Of ranks with one stage; of several, no more than all their stages' peaks and no less than
    the largest.
    """
    shown = view(name, 4, 8)
    peaks = shown.timeline.peak_in_flight
    for rank, held in enumerate(shown.peak_in_flight()):
        own = [peaks[stage] for stage in shown.stages_of(rank)]
        assert max(own) <= held <= sum(own)
    assert all(curve[-1][1] == 0 for curve in in_flight(shown.timeline))


def test_tables():
    views = [
        view("gpipe", 2, 2, transfer=0, latency=0),
        view("1f1b", 2, 2, transfer=0, latency=0),
        mixed(),
    ]
    header, first, second, third = summary_rows(views)
    assert dict(zip(header, first, strict=True)) == {
        "schedule": "gpipe",
        "times": "modelled",
        "makespan": "90 ms",
        "against the first": "1.000x",
        "bubble": "33.3%",
        "of the ranks": "33.3% to 33.3%",
        "in flight": "2",
        "peak bytes": "-",
    }
    assert second[2:5] == ("90 ms", "1.000x", "33.3%") and third[-1] == "3.0 GiB"
    assert "against the first" not in summary_rows(views[:1])[0]
    assert rank_rows(views[1]) == [
        ("rank", "stages", "busy", "idle", "bubble", "in flight"),
        ("0", "0", "60 ms", "30 ms", "33.3%", "2"),
        ("1", "1", "60 ms", "30 ms", "33.3%", "1"),
    ]
    assert [row[1] for row in rank_rows(mixed())] == ["stages", "0,3", "1,2"]
    assert aligned([("a", "b"), ("long", "1")]) == "a     b\nlong  1"


def test_words():
    assert [time_text(seconds) for seconds in (90, 0.0125, 3.3e-6, 0.0)] == [
        "90 s",
        "12.5 ms",
        "3.3 µs",
        "0 µs",
    ]
    assert {ink(face) for faces in FACES.values() for face in faces} == {"#FFFFFF", "#14181D"}
    assert ink("#FFFFFF") == "#14181D" and ink("#000000") == "#FFFFFF"


def test_views_that_cannot_be():
    timeline = view("1f1b").timeline
    with pytest.raises(ScheduleError, match="clock guessed"):
        View(timeline, clock="guessed")
    with pytest.raises(ScheduleError, match="memory curves 1: there is one for each of 4 ranks"):
        View(timeline, memory=((),))
