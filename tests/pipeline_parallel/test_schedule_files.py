"""Schedules from files: both formats mean what they say, torch's own files are read, and wrong
files are told.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import Kind, Schedule, ops_of
from megatron_merak.pipeline_parallel.pairs import pair
from megatron_merak.pipeline_parallel.passes import add_communication, resize, without
from megatron_merak.pipeline_parallel.schedule_files import executable, read_schedule
from tests.pipeline_parallel.written import drawn, dump

PAGE = Path(__file__).parents[2] / "docs" / "schedule_files.md"
TEXT = "mine stages=2 microbatches=2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
CSV = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"


def read(path: Path, content: str | bytes, name: str = "x.txt") -> Schedule:
    file = path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_schedule(file)


@pytest.mark.parametrize("ranks,microbatches", [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", BUILDERS)
def test_text_is_what_a_schedule_prints(tmp_path, name, ranks, microbatches):
    built = build_schedule(name, ranks, microbatches)
    assert read(tmp_path, str(built)) == built == executable(built, "", "")
    assert read(tmp_path, f"\ufeff\n{str(built)}\n\n", "a.csv") == built
    assert executable(read(tmp_path, str(add_communication(built))), "", "") == built


@pytest.mark.parametrize("ranks,microbatches", [(2, 4), (4, 8), (4, 12)])
@pytest.mark.parametrize(
    "ours,name,chunks",
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
    ],
)
def test_a_file_of_torch_is_our_schedule_of_that_name(
    tmp_path, ours, name, chunks, ranks, microbatches
):
    found = read_schedule(dump(tmp_path / "a file.csv", name, ranks, microbatches, chunks))
    assert found == replace(build_schedule(ours, ranks, microbatches, chunks), name="a-file")


def test_groups_and_splits_of_torch(tmp_path):
    """Overlapped forwards and backwards, and stages that split some of their backwards only."""
    dual = read_schedule(dump(tmp_path / "dual", "ScheduleDualPipeV", 2, 4, 2))
    assert dual.placement == (0, 1, 1, 0) and executable(dual, "", "") == dual
    assert str(dual).splitlines()[1].endswith("3F1 0F3|3B1 3F2|0B0 3B2 3F3|0B1 3B3 0B2 0W2 0B3 0W3")
    looped = read_schedule(dump(tmp_path / "looped", "ScheduleInterleavedZeroBubble", 2, 6, 2))
    split = [op for entry in looped.entries() for op in ops_of(entry) if op.kind is Kind.W]
    assert len(split) == 4 * 6 and not looped.placement


def cell(entry, separate: set) -> str:
    ops = [
        str(op).replace("B", "I") if (op.stage, op.microbatch) in separate else str(op)
        for op in ops_of(entry)
    ]
    return ops[0] if len(ops) == 1 else f"({';'.join(ops)})OVERLAP_F_B"


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_csv_holds_every_schedule_and_torch_reads_it_alike(tmp_path, name, paired):
    """Of R, which torch does not know, there is none."""
    built = without(build_schedule(name, 4, 8), Kind.R)
    built = pair(built) if paired else built
    separate = {
        (op.stage, op.microbatch) for e in built.entries() for op in ops_of(e) if op.kind is Kind.W
    }
    rows = [",,".join(cell(entry, separate) for entry in program) for program in built.ranks]
    assert read(tmp_path, "\n".join(rows), f"{name}.csv") == built
    actions = {
        rank: [theirs._Action.from_str(text) for text in row.split(",")]
        for rank, row in enumerate(rows)
    }
    placed = theirs._validate_schedule(actions, 4, built.stages, 8)
    assert placed == {stage: built.rank_of(stage) for stage in range(built.stages)}


def test_the_examples_of_the_documentation(tmp_path):
    found = re.findall(r"```(text|csv)\n(.*?)```", PAGE.read_text(), re.S)
    text, lifo, csv = (executable(read(tmp_path, written, kind), "", "") for kind, written in found)
    assert not lifo.ordered_sums and lifo.name == "lifo"
    assert (text.stages, text.microbatches, text.placement) == (4, 4, (0, 1, 1, 0))
    assert str(csv).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0B0 0W0 0B1",
        "rank 1: 1F0 1B0 1F1 1W0 1B1",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_any_order_that_can_run_is_read_and_stays_one_in_other_lengths(tmp_path, seed):
    for placement in ((0, 1, 1, 0), (1, 0, 2), (0,), (2, 2, 0, 1, 0, 1)):
        schedule = drawn(seed, placement, 4, split=0.5, early=0.3, paired=0.5)
        assert executable(read(tmp_path, str(schedule)), "", "") == schedule
        for microbatches in range(1, 20):
            changed = resize(schedule, microbatches)
            check(add_communication(changed))
            assert (
                executable(changed, "", "") == changed and changed.placement == schedule.placement
            )


TOKENS = [
    '"',
    ",",
    "\n",
    " ",
    "0F0",
    "0B0",
    "0I0",
    "1W0",
    "(",
    ";",
    ")OVERLAP_F_B",
    "rank 0:",
    "x stages=1 microbatches=1",
]
WRONG = {
    "empty": ("", "it is empty"),
    "blanks": (" \n\n", "it is empty"),
    "empty cells": (',,\n,"",', "it is empty"),
    "binary": (b"\x80\x02\xff\x00", "it cannot be read as text"),
    "another file": (
        "import os\nprint(1)\n",
        "'import os' in row 1, column 1 is no step of a schedule",
    ),
    "JSON": ('{"stages": 2}', "in row 1, column 1 is no step of a schedule"),
    "header": ("mine stages=2\nrank 0: 0F0", "'mine stages=2': its first line does not name it"),
    "endless number": (
        f"mine stages={'9' * 5000} microbatches=1\nrank 0: 0F0",
        "its first line does not name it",
    ),
    "no ranks": ("mine stages=2 microbatches=2", "it has 0 ranks for 2 stages"),
    "rank": (
        TEXT.replace("rank 1", "rank 2"),
        "line 3 of a schedule 'rank 2: .*: the program of rank 1 belongs here",
    ),
    "op": (
        TEXT.replace("1F0", "1X0"),
        "schedule op in line 3 '1X0': it is not a stage, a kind and a micro-batch",
    ),
    "cell": (CSV.replace("1F1", "1X1"), "'1X1' in row 2, column 4 is no step"),
    "half a cell": (CSV.replace("1F1", "1F"), "'1F' in row 2, column 4 is no step"),
    "group": (CSV.replace("0F1", "(0F1;)OVERLAP_F_B"), "'' in row 1, column 2 is no step"),
    "quotes": (CSV.replace("0F1", '"0F1" x'), "'0F1 x' in row 1, column 2 is no step"),
    "long cell": (CSV.replace("0F1", "0" * 200_000), "row 1 is no CSV"),
    "UNSHARD": (
        CSV.replace("0F0", "0UNSHARD,0F0"),
        "'0UNSHARD' in row 1, column 1 is a step of torch's runtime",
    ),
    "REDUCE_GRAD": (
        CSV.rstrip() + ",1REDUCE_GRAD",
        "'1REDUCE_GRAD' in row 2, column 6 is a step of torch's runtime",
    ),
    "SEND": (
        CSV.replace(",0F1", ",0SEND_F0,0F1"),
        "'0SEND_F0' in row 1, column 2 is a step of torch's runtime",
    ),
    "two ranks": (
        CSV.replace("1B1", "0B1"),
        "stage 0 is on two ranks: 0F0 in row 1, 0B1 in row 2, column 5",
    ),
    "two ranks, text": (
        TEXT.replace("1B1", "0B1"),
        r"0B1 is on rank 1 .*stage 0 lives on rank 0 \(0B1: line 3, col",
    ),
    "no rank": (CSV.replace("1", "2"), "no row has a step of stage 1, and there is a stage 2"),
    "idle first rank": (",,\n0F0,0B0", "row 1 is empty: rank 0 has nothing to do"),
    "idle rank": ("0F0,0B0\n,,\n1F0,1B0", "row 2 is empty: rank 1 has nothing to do"),
    "missing": (CSV.replace(",1B1", ""), "rank 1 never runs 1B1"),
    "missing, text": (TEXT.replace(" 0F1", ""), "rank 0 never runs 0F1"),
    "twice": (CSV.replace("0F1", "0F0"), "rank 0 runs 0F0 2 times"),
    "I without W": (
        CSV.replace("1B0", "1I0"),
        r"micro-batch 0 it has 1I0 in row 2, column 3 \(input gradient\)",
    ),
    "B and W": (
        CSV.replace("1F1", "1F1,1W0"),
        r"1B0 in row 2, column 3 \(full backward\), 1W0 in row 2, column 5",
    ),
    "B and I": (
        CSV.replace("1F1", "1F1,1I0,1W0"),
        "micro-batch 0 it has .* 1I0 in row 2, column 5",
    ),
    "order": (CSV.replace("1F0,1B0", "1B0,1F0"), r"\(1B0: row 2, column 2; 1F0: row 2, column 3\)"),
    "sums": ("0F0,0F1,0I1,0W1,0B0", "its backwards are out of order .*0B1: 0I1 in row 1, column 3"),
    "deadlock": (
        CSV.replace("0F1,,0B0", ",0B0,0F1").replace("1F0,1B0,1F1", "1F0,1F1,1B0"),
        "deadlock: rank 0 stops",
    ),
    "deadlock in a group": ("(0F0;1F0)OVERLAP_F_B,1B0,0B0", "deadlock: rank 0 stops at 1F0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_told_with_the_place(tmp_path, name):
    content, message = WRONG[name]
    with pytest.raises(ScheduleError, match=message) as caught:
        read(tmp_path, content)
    error = caught.value
    assert (error.what, error.value) == ("schedule file", tmp_path / "x.txt") and error.remedy


def test_what_is_no_file_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere", "/dev/zero", "a\0b"):
        with pytest.raises(ScheduleError, match="it cannot be read as text"):
            read_schedule(path)


@pytest.mark.parametrize(
    "text,message",
    [
        (TEXT.replace("0F1", "0SEND_F0 0F1").replace("1F0", "1RECV_F0 1F0"), "lacks"),
        ("x stages=1 microbatches=2\nrank 0: 0F0|0F1 0B0 0B1", "runs 0F0|0F1 together"),
        ("x stages=1 microbatches=2\nrank 0: 0F0 0F1|0B0 0W0|0B1", r"runs 0W0\|0B1 together"),
        ("x stages=1 microbatches=2\nrank 0: 0F0 0F1|0R0 0B0 0B1", r"runs 0F1\|0R0 together"),
        (
            "x stages=1 microbatches=2\nrank 0: 0F1 0F0 0B0 0B1",
            "runs 0F0 after 0F1: its forwards are out of order",
        ),
    ],
)
def test_what_the_runtime_would_not_run_as_it_is_written(tmp_path, text, message):
    with pytest.raises(ScheduleError, match=message):
        executable(read(tmp_path, text), "--schedule-file", tmp_path)


def test_transfers_at_other_places_are_refused(tmp_path):
    """They would be posted elsewhere than they are written."""
    text = str(add_communication(build_schedule("1f1b", 2, 4)))
    moved = text.replace("0F0 0SEND_F0 0RECV_B0 0F1", "0F0 0SEND_F0 0F1 0RECV_B0")
    with pytest.raises(ScheduleError, match="its transfers stand elsewhere"):
        executable(read(tmp_path, moved), "--schedule-file", tmp_path)


@settings(max_examples=300, deadline=None)
@given(
    source=st.sampled_from(["", TEXT, CSV, "0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1"]),
    at=st.integers(0, 90),
    length=st.integers(0, 6),
    new=st.one_of(
        st.text('0123FBIW;()|,\n :="_RA', max_size=6),
        st.text(max_size=3),
        st.lists(st.sampled_from(TOKENS)).map("".join),
    ),
)
def test_a_damaged_file_is_a_schedule_or_a_typed_error(tmp_path_factory, source, at, length, new):
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_text(source[:at] + new + source[at + length :], encoding="utf-8", errors="replace")
    try:
        executable(read_schedule(path), "schedule file", path)
    except ScheduleError as error:
        assert error.value == path
