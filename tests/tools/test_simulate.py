"""tools/simulate.py as its users run it: schedules, files, plans and traces, side by side, and
mistakes.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

from megatron_merak.arguments import parse
from megatron_merak.cluster import CLUSTERS
from megatron_merak.pipeline_parallel.pictures.page import views_of
from megatron_merak.planner import plan

ROOT = Path(__file__).parents[2]
SHIFTED = """shifted-by-hand stages=4 microbatches=6
rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0R3 0B3 0R4 0B4 0R5 0B5
rank 1: 1F0 1F1 1F2 1R0 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1R4 1B4 1R5 1B5
rank 2: 2F0 2F1 2F2 2R0 2B0 2R1 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """The tool in this process: its arguments -> what it prints."""

    def printed(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["simulate.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / "tools" / "simulate.py"), run_name="__main__")
        return capsys.readouterr().out

    return printed


def test_one_schedule(run):
    printed = run("--ranks", 4, "--microbatches", 8)
    assert "modelled makespan 330.000 ms, bubble 27.3%" in printed
    assert printed.splitlines()[-1].split() == ["3", "3", "240", "ms", "90", "ms", "27.3%", "1"]
    assert run("--pipeline-schedule", "1f1b", "--stages", 4, "--microbatches", 8) == printed


def test_a_schedule_from_a_file(run, tmp_path):
    path = tmp_path / "shifted.txt"
    path.write_text(SHIFTED)
    printed = run("--schedule", path, "--recompute", "10,10,10,0", "--print-schedule", "--text")
    assert "makespan 300.000 ms" in printed and "2RECV_F0" in printed
    assert "rank 3 | .  .  .  F0 B0--- F1 B1---" in printed


def test_a_schedule_of_torch_from_a_file(run, tmp_path):
    """Their empty cells are left out: who waits follows from the costs."""
    (tmp_path / "theirs.csv").write_text("0F0,,,0F1,,0I0,0W0,,0B1\n,1F0,1I0,,1F1,1W0,1B1\n")
    printed = run(
        "--schedule", tmp_path / "theirs.csv", "--ranks", 2, "--microbatches", 2, "--text"
    )
    assert printed.startswith(
        "theirs: 2 stages on 2 ranks, 2 micro-batches\nmodelled makespan 90.000 ms"
    )


def test_the_work_is_the_same_however_many_stages_a_rank_has(run, tmp_path):
    """One number is a rank's; a list is of pieces of the model, which coarser schedules join and
    finer ones halve.
    """
    names = ["1f1b", "interleaved", "zb-v"]
    alike = []
    for forward, backward in (
        ("10", "20"),
        ("10,10,10,10", "20,20,20,20"),
        (",".join("5" * 8), ",".join(["10"] * 8)),
    ):
        run(
            "--schedule",
            *names,
            "--forward",
            forward,
            "--backward",
            backward,
            "--html",
            tmp_path / "a.html",
        )
        views = views_of((tmp_path / "a.html").read_text())
        assert all(busy == pytest.approx(0.24) for view in views for busy in view.timeline.busy)
        alike.append([view.timeline.makespan for view in views])
    assert alike[1] == pytest.approx(alike[0]) and alike[2] == pytest.approx(alike[0])
    assert alike[0][0] > alike[0][1] > alike[0][2]


def test_several_beside_each_other(run, tmp_path):
    out = [tmp_path / name for name in ("a.html", "a.png", "a.json")]
    files = ["--html", out[0], "--png", out[1], "--perfetto", out[2]]
    printed = run("--schedule", "gpipe", "1f1b", "zb-h1", "--transfer", 1, *files)
    assert [line.split()[0] for line in printed.splitlines()[-4:]] == [
        "schedule",
        "gpipe",
        "1f1b",
        "zb-h1",
    ]
    views = views_of(out[0].read_text(encoding="utf-8"))
    assert [view.name for view in views] == ["gpipe", "1f1b", "zb-h1"]
    assert views[2].detail == "forward 10 ms, backward 20 ms, transfer 1 ms"
    assert out[1].read_bytes().startswith(b"\x89PNG")
    again = run("--trace", out[2])
    assert again.splitlines()[-4:] == printed.splitlines()[-4:]


def test_a_schedule_that_is_searched_for(run, tmp_path):
    """Where no rank holds more than the first of 1F1B it is faster than 1F1B; given more, no slower
    than that.
    """
    costs = [
        "--forward",
        "10,10,10,14",
        "--backward",
        "20,20,20,28",
        "--latency",
        4,
        "--html",
        tmp_path / "a.html",
    ]
    printed = run("--schedule", "1f1b", "auto", *costs)
    plain, found = views_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert found.timeline.makespan < plain.timeline.makespan
    stages = found.timeline.schedule.stages // 4
    assert max(found.peak_in_flight()) <= stages * max(plain.peak_in_flight()) == 4 * stages
    assert (
        f"auto: {4 * stages} stages on 4 ranks" in printed
        and "no schedule is below" in found.detail
    )
    assert "within 4 micro-batches per rank, as many as 1f1b holds; " in found.detail
    places = (
        "one stage per rank: ",
        "2 stages per rank, interleaved: ",
        "2 stages per rank, V-shaped: ",
    )
    assert all(place in found.detail for place in places)
    run("--schedule", "auto", "--in-flight", 8, *costs)
    (roomy,) = views_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert roomy.timeline.makespan <= found.timeline.makespan


def test_the_searched_schedule_of_the_readme_is_the_fastest(run, tmp_path):
    names = ["1f1b", "interleaved", "zb-v", "auto"]
    run("--schedule", *names, "--microbatches", 8, "--html", tmp_path / "a.html")
    times = [
        view.timeline.makespan
        for view in views_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    ]
    assert times == pytest.approx([0.330, 0.285, 0.255, 0.250])
    run("--schedule", "auto", "--chunks", 1, "--html", tmp_path / "a.html")
    (found,) = views_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert found.timeline.schedule.stages == 4 and "interleaved" not in found.detail


def test_plans_and_the_bytes_of_their_ranks(run, tmp_path):
    flags = """--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500
        --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 2"""
    paths = []
    for name in ("1f1b", "gpipe"):
        made = plan(parse([*flags.split(), "--pipeline-schedule", name]), 2, CLUSTERS["dgx-h100"])
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(made.to_json())
    printed = run("--plan", *paths, "--schedule", "1f1b", "--html", tmp_path / "a.html")
    assert [line.split(":")[0] for line in printed.splitlines()[-2:]] == ["1f1b", "gpipe"]
    _, one, other = views_of((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert "2 ranks of H100" in one.detail and one.capacity == 76 * 2**30
    assert max(one.peak_bytes()) < max(other.peak_bytes())


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--ranks", "0"), "--ranks 0"),
        (("--schedule", "1f2b"), "--schedule 1f2b: it is neither a file nor one of naive"),
        (("--schedule", str(ROOT)), f"--schedule {ROOT}: it cannot be read as text"),
        (
            ("--schedule", str(ROOT / "pyproject.toml")),
            r"'\[build-system\]' in row 1, column 1 is no step",
        ),
        (("--forward", "1,2,3"), "--forward 1,2,3: 3 values do not fit 4 stages"),
        (("--transfer", "1,2"), "--transfer 1,2: 2 values, 3 or 1 are needed"),
        (("--transfer", "x"), "--transfer x: it is not a list of numbers"),
        (("--weight", "99"), "exceeds the backward"),
        (
            ("--schedule", "auto", "--in-flight", "1,2"),
            "--in-flight 1,2: 2 values, 4 or 1 are needed",
        ),
        (
            ("--schedule", "auto", "--in-flight", "0"),
            "--in-flight 0: one stage per rank: none fits .*Allow more",
        ),
        (("--png", f"{__file__}/a.png"), f"--png {__file__}/a.png: it cannot be written"),
        (("--perfetto", str(ROOT)), f"--perfetto {ROOT}: it is a directory"),
        (("--html", "/tmp/a.png"), "--html /tmp/a.png: it has another suffix"),
        (("--plan", "nowhere"), "plan nowhere: .*No such file"),
        (("--plan", __file__), "plan .*it does not parse"),
        (("--trace", __file__), "--trace .*Extra data"),
        (("--trace", "EMPTY"), "--trace .*does not describe a pipeline's timeline"),
    ],
)
def test_mistakes_are_told_without_a_traceback(run, tmp_path, arguments, message):
    (tmp_path / "empty.json").write_text(json.dumps({}))
    with pytest.raises(SystemExit, match=f"simulate.py: .*{message}"):
        run(
            *(
                str(tmp_path / "empty.json") if argument == "EMPTY" else argument
                for argument in arguments
            )
        )


def test_a_schedule_that_moves_what_takes_no_time_says_so(run):
    told = "its order moves recomputations, which take no time here: give --recompute"
    text = run("--schedule", "1f1b", "shifted")
    assert text.count(told) == 1 and told in text.partition("shifted: ")[2]
    assert told not in run("--schedule", "shifted", "--recompute", "10")
    assert "give --weight" in run("--schedule", "zb-h1", "--weight", "0")


def test_ops_that_run_together_in_a_file_are_shown(run, tmp_path):
    text = "pairs stages=2 microbatches=2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1|1B0 1B1\n"
    (tmp_path / "pairs.txt").write_text(text)
    assert run("--schedule", tmp_path / "pairs.txt").startswith("pairs: 2 stages on 2 ranks")
