"""Trace files: what Perfetto needs of them, and that they read back."""

import json
from collections import defaultdict

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.pictures.trace import from_trace, messages_between, to_trace

from .views import measured, mixed, view


def rows_of(views, phase):
    return [
        row for row in json.loads(json.dumps(to_trace(views)))["traceEvents"] if row["ph"] == phase
    ]


def test_every_op_and_message_in_microseconds():
    shown = view("1f1b", 3, 4)
    spans = rows_of([shown], "X")
    assert len(spans) == 3 * 4 * 2 + 2 * 4 * 2
    found = {(span["pid"], span["name"]): span for span in spans}
    assert found[0, "0B3"]["dur"] == pytest.approx(20_000)
    assert found[1, "1SEND_B0"]["dur"] == pytest.approx(1_500)
    assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(
        shown.timeline.makespan * 1e6
    )


@pytest.mark.parametrize(
    "shown", [view("1f1b", 4, 8, latency=0.05), view("interleaved", 4, 8), mixed()]
)
def test_spans_of_a_thread_do_not_cross(shown):
    """A slow link has many messages under way at once; Perfetto drops spans that overlap without
    nesting.
    """
    threads = defaultdict(list)
    for span in rows_of([shown], "X"):
        threads[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(
            first[1] <= second[0] * (1 + 1e-9)
            for first, second in zip(spans, spans[1:], strict=False)
        )
    named = {
        (row["pid"], row["tid"]) for row in rows_of([shown], "M") if row["name"] == "thread_name"
    }
    assert named == set(threads)


def test_arrows_join_the_op_that_sends_to_the_op_that_reads():
    views = [view("1f1b", 3, 4), mixed()]
    starts = {(row["pid"], row["tid"], row["ts"]): row["name"] for row in rows_of(views, "X")}
    tails = {row["id"]: starts[row["pid"], row["tid"], row["ts"]] for row in rows_of(views, "s")}
    heads = {row["id"]: starts[row["pid"], row["tid"], row["ts"]] for row in rows_of(views, "f")}
    assert len(tails) == sum(len(shown.timeline.transfers) for shown in views)
    assert {(tails[number], heads[number]) for number in tails} >= {
        ("0F0", "1F0"),
        ("2B3", "1B3"),
        ("2F1", "3F1"),
    }
    assert tails.keys() == heads.keys()


def test_counters_end_at_nothing_held():
    last = {}
    for row in rows_of([view("zb-v", 4, 8)], "C"):
        last[row["pid"]] = row["args"]["held"]
    assert last == dict.fromkeys(range(4), 0)


def test_a_trace_reads_back():
    views = [view("1f1b"), view("zb-v"), mixed(), measured()]
    again = from_trace(json.loads(json.dumps(to_trace(views))))
    assert len(again) == len(views)
    for one, other in zip(views, again, strict=True):
        for name in ("title", "clock", "detail", "capacity", "timed"):
            assert getattr(one, name) == getattr(other, name)
        assert one.timeline.schedule == other.timeline.schedule
        assert (
            one.peak_in_flight() == other.peak_in_flight()
            and one.peak_bytes() == other.peak_bytes()
        )
        assert one.timeline.makespan == pytest.approx(other.timeline.makespan, rel=1e-12)
        assert one.timeline.busy == pytest.approx(other.timeline.busy, rel=1e-12)
        for name in ("events", "transfers"):
            mine, others = getattr(one.timeline, name), getattr(other.timeline, name)
            assert [_place(item) for item in mine] == [_place(item) for item in others]
            assert _times(mine) == pytest.approx(_times(others), rel=1e-12, abs=1e-15)


def _place(item):
    return {name: getattr(item, name) for name in item.__slots__ if name not in ("start", "end")}


def _times(items):
    return [time for item in items for time in (item.start, item.end)]


def test_other_files_are_refused():
    good = to_trace([view("1f1b", 2, 2)])
    with pytest.raises(ScheduleError, match="format is 2"):
        from_trace(good | {"otherData": good["otherData"] | {"format": 2}})
    for bad in (
        {},
        [],
        {"otherData": {"format": 1}},
        {"traceEvents": []},
        good | {"traceEvents": [{"ph": "X"}]},
    ):
        with pytest.raises(ScheduleError, match="does not describe a pipeline's timeline"):
            from_trace(bad)


def test_messages_nobody_timed_are_from_maker_to_reader():
    shown = view("interleaved", 4, 8)
    found = {
        str(message.op): message
        for message in messages_between(shown.timeline.schedule, shown.timeline.events)
    }
    assert found.keys() == {str(message.op) for message in shown.timeline.transfers}
    for timed in shown.timeline.transfers:
        other = found[str(timed.op)]
        assert (other.source, other.destination) == (timed.source, timed.destination)
        assert other.start <= timed.start and timed.end <= other.end
