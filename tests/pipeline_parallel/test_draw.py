"""Pictures as text and PNG, and files by their suffix."""

import json
import sys

import pytest

from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.pictures.draw import draw, draw_text
from megatron_merak.pipeline_parallel.pictures.files import check_suffix, write
from megatron_merak.pipeline_parallel.pictures.page import views_of
from megatron_merak.pipeline_parallel.pictures.trace import from_trace

from .views import mixed, view


def test_text():
    shown = view("gpipe", 2, 2, forward=0.1, backward=0.2, transfer=0, latency=0)
    text = draw_text(shown.timeline, unit=0.1)
    assert text.splitlines() == [
        "rank 0 | F0 F1 .  .  .  B0--- B1---",
        "rank 1 | .  F0 F1 B0--- B1--- .  .",
    ]


def test_png(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    sizes = []
    for name, views in (("one", [view("1f1b")]), ("three", [view("1f1b"), view("zb-v"), mixed()])):
        draw(views, tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as image:
            sizes.append(image.size)
            colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert {(0x2F, 0x7F, 0xC1), (0xE6, 0x9F, 0x00)} <= colours  # forward, backward
        assert ((0x12, 0x93, 0x6F) in colours) == (name == "three")  # weight gradients
        # of every second stage of a rank
        assert ((0x84, 0xCD, 0xB6) in colours) == (name == "three")
    assert sizes[1][1] > 2 * sizes[0][1]
    draw(
        [view("1f1b", 2, 2, forward=0, backward=0, weight=0, transfer=0, latency=0)],
        tmp_path / "zero.png",
    )


def test_the_suffix_says_what_is_written(tmp_path):
    shown = view("1f1b")
    for name in ("a.html", "a.json", "a.png"):
        write([shown], tmp_path / name)
    assert views_of((tmp_path / "a.html").read_text(encoding="utf-8")) == (shown,)
    assert (
        from_trace(json.loads((tmp_path / "a.json").read_text()))[0].timeline.schedule
        == shown.timeline.schedule
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"a.svg: its suffix is none of .png, .html, .json"):
        write([shown], tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()


def test_a_picture_that_nothing_can_draw_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ConfigError, match=r"--timeline a.png: .* pip install -e '\.\[pictures\]' in a clone\.$"
    ):
        check_suffix("--timeline", "a.png")
    write([view("1f1b")], tmp_path / "a.html")
    with pytest.raises(ConfigError, match="matplotlib, which is not installed"):
        write([view("1f1b")], tmp_path / "a.png")
