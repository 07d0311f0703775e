"""The HTML page: complete in itself, exact in what it holds, and drawn, by a browser or by Node,
where there is one.
"""

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.pipeline_parallel.pictures.page import encode, page, views_of
from megatron_merak.pipeline_parallel.pictures.palette import time_text
from megatron_merak.pipeline_parallel.pictures.view import in_flight
from tests.browser import document
from tests.markup import Reader

from .views import measured, mixed, view

ASSETS = files("megatron_merak.pipeline_parallel.pictures") / "assets"


@pytest.fixture(scope="module")
def views():
    return [view("1f1b"), view("interleaved"), view("zb-v"), mixed(), measured()]


@pytest.fixture(scope="module")
def html(views):
    return page(views)


def test_the_page_is_well_formed(html):
    reader = Reader(html)
    assert reader.open == []
    assert [tag for tag, _ in reader.tags].count("script") == 2
    identities = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    wanted = set(re.findall(r'getElementById\("(\w+)"\)', html))
    assert wanted <= set(identities)
    assert "{{" not in html


def test_nothing_is_fetched(html):
    """No address, no file, and a policy under which the browser would refuse them."""
    reader = Reader(html)
    assert reader.policy.startswith("default-src 'none'") and "http" not in reader.policy
    for _, attributes in reader.tags:
        assert not {"src", "href", "srcset", "action", "data", "poster"} & attributes.keys()
    text = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(
        r"https?:|//[a-z]+\.|url\(|@import|\bimport\s*\(|fetch\(|XMLHttp|WebSocket|eval\(", text
    )


def test_the_page_holds_the_timelines_exactly(views, html):
    assert views_of(html) == tuple(views)


def test_the_same_views_give_the_same_bytes(views, html):
    assert page(views) == html


def test_titles_are_text(html):
    assert "<b>mixed" not in html and "&lt;/script&gt;&lt;b&gt;mixed &amp; paired" in html


def test_figures_are_there_without_javascript(views, html):
    reader = Reader(re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    words = [word.strip() for word in reader.words if word.strip()]
    assert {
        "makespan",
        "bubble",
        "in flight",
        "peak bytes",
        "modelled",
        "1f1b",
        "against the first",
    } <= set(words)
    assert {time_text(shown.timeline.makespan) for shown in views} | {"3.0 GiB"} <= set(words)


def test_pages_that_cannot_be():
    with pytest.raises(ScheduleError, match="there are none"):
        page([])
    with pytest.raises(ScheduleError, match="it holds no timelines"):
        views_of("<html></html>")


def node(program: str, data: object) -> object:
    """What a program prints as JSON, run by Node behind the part of the page's script that needs no
    browser.
    """
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node is not installed")
    source = (ASSETS / "model.js").read_text(encoding="utf-8")
    program = f"{source}\nconst data = JSON.parse(require('fs').readFileSync(0));\n{program}"
    done = subprocess.run(
        [found, "-e", program], input=json.dumps(data), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def counted():
    """Of every schedule, what the page's script makes of it."""
    shown = [view(name, 4, 8, recompute=0.01) for name in BUILDERS] + [mixed()]
    program = """
    const all = data.views.map(readView);
    console.log(JSON.stringify(all.map((view) => ({
      held: view.held, bubbles: view.bubbles, idle: view.gaps.map((gap) => gap.end.map((end, i) => end - gap.start[i])),
      path: criticalPath(view).events.map((i) => opName(view.events, i)),
      first: Array.from(view.events.start, (_, i) => causes(view, i)[0] || null),
      tells: describe(view, data.names, {kind: "op", index: view.events.count - 1}),
    }))));"""
    return list(zip(shown, node(program, encode(shown)), strict=True))


def test_the_script_counts_as_python_does(counted):
    for shown, found in counted:
        curves = [
            [list(column) for column in zip(*curve, strict=True)]
            for curve in in_flight(shown.timeline)
        ]
        assert found["held"] == curves
        assert found["bubbles"] == list(shown.timeline.bubbles)
        idle = [sum(lengths) for lengths in found["idle"]]
        assert idle == pytest.approx(
            [shown.timeline.makespan - busy for busy in shown.timeline.busy], abs=1e-12
        )


def test_the_script_finds_what_every_op_waited_for(counted):
    """In a simulation an op starts the moment the last of them is over, so the critical path has no
    holes.
    """
    for shown, found in counted:
        for event, cause in zip(shown.timeline.events, found["first"], strict=True):
            assert (cause["end"] if cause else 0.0) == event.start
        path, at = found["path"], {str(event.op): event for event in shown.timeline.events}
        assert at[path[0]].end == shown.timeline.makespan and at[path[-1]].start == 0
        assert all(
            at[later].start >= at[earlier].end
            for later, earlier in zip(path, path[1:], strict=False)
        )


def test_untimed_messages_are_no_causes_by_themselves():
    """What an op of a real run waited for last is the op that ended last, not a message that lasts
    until it starts.
    """
    shown = measured()
    program = """const [view] = data.views.map(readView);
    console.log(JSON.stringify(Array.from(view.events.start, (_, i) => causes(view, i).map((one) => one.end))))"""
    for event, ends in zip(shown.timeline.events, node(program, encode([shown])), strict=True):
        assert ends == sorted(ends, reverse=True) and all(end < event.start for end in ends)


def test_hovering_tells(counted):
    shown, found = counted[0]
    last = shown.timeline.events[-1]
    assert found["tells"]["head"] == f"backward B7 · stage 0 · rank {last.rank}"
    rows = dict(found["tells"]["rows"])
    assert rows["duration"] == "30 ms" and rows["waits for"] == "B7 of stage 1, sent over a link"


def test_a_browser_draws_the_page(views, html, tmp_path):
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    found = document(tmp_path / "page.html", width=1400)
    assert "data-failed" not in found
    counts = re.search(r'data-drawn="([\d,]+)"', found)[1].split(",")
    assert list(map(int, counts)) == [len(shown.timeline.events) for shown in views]
    for shown in views:
        assert f"{shown.size} · " in found
    assert found.count('role="application"') == len(views)


def test_buttons_say_what_is_shown_and_save_a_picture(tmp_path):
    """The third stage of a rank has a shade of its own."""
    three = view("interleaved", 2, 4, chunks=3)
    script = """<script>
    const data = document.documentElement.dataset;
    HTMLAnchorElement.prototype.click = function () { data.saved = this.href.slice(0, 22); };
    setTimeout(() => document.querySelector('[data-key="g"]').click(), 500);
    </script>"""
    (tmp_path / "page.html").write_text(
        page([three]).replace("</body>", script + "</body>"), encoding="utf-8"
    )
    found = document(tmp_path / "page.html", width=1400)
    assert "data-failed" not in found and 'data-saved="data:image/png;base64,"' in found
    pressed = dict(re.findall(r'<button[^>]*data-key="(\w)"[^>]*aria-pressed="(\w+)"', found))
    assert pressed == {"c": "true", "m": "true", "p": "false", "l": "false", "n": "false"}
    assert "Memory: micro-batches" in found and "shades: the stages of a rank" in found


def test_a_browser_draws_32_stages_and_256_micro_batches(tmp_path):
    (tmp_path / "page.html").write_text(page([view("1f1b", 32, 256)]), encoding="utf-8")
    found = document(tmp_path / "page.html", width=1400)
    assert 'data-drawn="16384"' in found and "data-failed" not in found
