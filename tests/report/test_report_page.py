"""The page of a run: complete in itself, a point per iteration, and drawn by a browser where there
is one.
"""

import json
import re

import pytest

from megatron_merak.report.axis import Axis, short, whole_ticks
from megatron_merak.report.chart import MOST, Chart, Line, _envelope, data, drawn, running_mean
from megatron_merak.report.facts import facts_of
from megatron_merak.report.figures import charts, notes, tiles, time
from megatron_merak.report.page import page
from megatron_merak.report.run_files import RunFiles
from tests.browser import browser, document, picture
from tests.markup import Reader

from .runs import made, resumed, start, train, trainer

# Lets a pointer rest on the chart of the loss, in the middle.
HOVER = """<script>
const plot = document.querySelector('[data-chart="loss"] .plot'), box = plot.getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 5}));
</script></body>"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return facts_of(resumed(tmp_path_factory.mktemp("runs") / "a <b> run"))


@pytest.fixture(scope="module")
def html(facts):
    return page(facts)


def test_the_page_is_well_formed_and_fetches_nothing(html):
    reader = Reader(html)
    assert reader.open == [] and "{{" not in html and "<b> run" not in html
    assert reader.policy.startswith("default-src 'none'") and "http" not in reader.policy
    for _, attributes in reader.tags:
        assert not {"src", "href", "srcset", "action", "data", "poster"} & attributes.keys()
    text = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|WebSocket|eval\(", text)
    identities = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert set(re.findall(r'getElementById\("(\w+)"\)', html)) <= set(identities)


def test_the_same_facts_give_the_same_bytes(facts, html):
    assert page(facts) == html


def points(html: str) -> dict[str, list[int]]:
    """Points of the lines of each chart, counted in what is drawn."""
    found = {}
    for key, body in re.findall(r'data-chart="(\w+)".*?<svg(.*?)</svg>', html, re.DOTALL):
        lines = re.findall(r'data-points="(\d+)" d="([^"]*)"', body)
        assert all(len(re.findall("[ML]", path)) == int(count) for count, path in lines)
        found[key] = [int(count) for count, _ in lines]
    return found


def test_charts_have_a_point_per_iteration(html):
    counted = {"loss": [60, 3], "learning_rate": [60], "grad_norm": [60], "throughput": [60]}
    assert points(html) == counted
    values = json.loads(re.search(r'id="data">(.*?)</script>', html)[1])
    assert {
        one["key"]: [len(line["y"]) for line in one["lines"]] for one in values["charts"]
    } == counted


def test_the_figures_are_those_of_the_run(facts, html):
    shown = {name: (value, more) for name, value, more in tiles(facts)}
    assert shown["iterations"] == ("60", "of 60")
    assert shown["training loss"] == ("4.6839", "at iteration 60")
    assert shown["tokens per second"] == ("10,240", "50.0 GFLOP/s per rank")
    assert shown["time in iterations"] == ("24 s", "245,760 tokens")
    assert notes(facts) == [
        "The run was restarted after iteration 50; 7 iterations done before were repeated, and the later values are "
        "shown."
    ]
    for text in (
        "8 ranks = tp 2 x cp 1 x dp 2 x pp 2",
        "Some CPU",
        "--train-iters",
        "2.13.0",
        "embedding .. ",
        "measured",
    ):
        assert text in html
    assert html.count('class="restart"') == 4


def test_a_loss_scale_and_skipped_iterations_are_shown_where_there_are_any(tmp_path):
    config, plan = made()
    files = RunFiles(tmp_path, start(config, plan), plan)
    train(files, 1, 4, loss_scale=65536.0)
    train(files, 5, 5, loss_scale=32768.0, skipped=True, grad_norm=float("nan"))
    files.close()
    facts = facts_of(tmp_path)
    assert [chart.key for chart in charts(facts)] == [
        "loss",
        "learning_rate",
        "grad_norm",
        "throughput",
        "loss_scale",
    ]
    told = " ".join(notes(facts))
    assert (
        "1 iteration skipped, as the gradient was not finite (5)" in told
        and "has done 5 of 60 iterations" in told
    )
    assert 'class="skipped"' in page(facts)


def test_a_trainer_of_huggingface_has_its_page(tmp_path):
    html = page(facts_of(trainer(tmp_path / "out")))
    assert points(html) == {
        "loss": [6, 3],
        "learning_rate": [6],
        "grad_norm": [6],
        "eval_accuracy": [3],
    }
    assert "means over 5 steps" in html


def test_a_run_without_iterations_has_a_page(tmp_path):
    config, plan = made()
    RunFiles(tmp_path, start(config, plan), plan).close()
    assert "no values of iterations yet" in page(facts_of(tmp_path))


def test_axes_label_round_values():
    assert [text for _, text in Axis(0.0, 11_000.0).ticks()] == ["0", "2500", "5000", "7500", "10k"]
    assert [text for _, text in Axis(3.9, 8.1).ticks()] == ["4", "5", "6", "7", "8"]
    assert [text for _, text in Axis(0.0, 4.2e-3).ticks()] == ["0", "1e-3", "2e-3", "3e-3", "4e-3"]
    assert [text for _, text in Axis(0.5, 2e3, log=True).ticks()] == ["1", "10", "100", "1000"]
    assert [short(value) for value in (0.25, 12_000, 3.4e6, 4e-4, 0)] == [
        "0.25",
        "12k",
        "3.4M",
        "4e-4",
        "0",
    ]
    assert whole_ticks(1, 160) == [50, 100, 150]
    assert Axis(0.0, 4.0).place(1.0) == 0.25 and Axis(1.0, 100.0, log=True).place(10.0) == 0.5


def test_means_and_envelopes():
    assert running_mean([(1, 2.0), (2, None), (3, 4.0), (4, 9.0)], 2) == [
        (1, 2.0),
        (2, 2.0),
        (3, 3.0),
        (4, 6.5),
    ]
    long = [(at, float((at * 7919) % 1000)) for at in range(4 * MOST)]
    kept = _envelope(long)
    assert (
        len(kept) <= MOST + 2
        and set(kept) <= set(long)
        and [at for at, _ in kept] == sorted(at for at, _ in kept)
    )
    assert {max(value for _, value in kept), min(value for _, value in kept)} == {999.0, 0.0}
    chart = Chart("loss", "Loss", "", (Line("training", long),))
    assert len(data(chart)["lines"][0]["y"]) == len(long) and f'data-points="{len(long)}"' in drawn(
        chart, 0, len(long)
    )


def test_gaps_are_no_lines():
    (path,) = re.findall(r'data-points="4" d="([^"]*)"', drawn(
        Chart("loss", "Loss", "", (Line("x", [(1, 1.0), (2, None), (3, 1.0), (4, 2.0)]),)), 1, 4
    ))  # fmt: skip
    assert path.count("M") == 2 and path.count("L") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (66, "1 min 6 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_times(seconds, text):
    assert time(seconds) == text


def test_a_browser_draws_every_chart_and_shows_values(html, tmp_path):
    browser()
    place = tmp_path / "report.html"
    place.write_text(html.replace("</body>", HOVER), encoding="utf-8")
    found = document(place)
    assert (
        'data-ready="loss,learning_rate,grad_norm,throughput"' in found
        and "data-failed" not in found
    )
    assert points(found) == {
        "loss": [60, 3],
        "learning_rate": [60],
        "grad_norm": [60],
        "throughput": [60],
    }
    tip = re.search(r'<div id="tip"[^>]*>(.*?)</div>', found, re.DOTALL)[1]
    assert "iteration 30" in tip and "10,240" in tip and found.count('class="cursor"') == 4
    for dark in (False, True):
        picture(place, tmp_path / f"{dark}.png", width=420, height=900, dark=dark)
        assert (tmp_path / f"{dark}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "True.png").read_bytes() != (tmp_path / "False.png").read_bytes()
