"""Files of pictures: the suffix determines the format."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_merak.errors import ConfigError
from megatron_merak.pipeline_parallel.pictures.draw import draw
from megatron_merak.pipeline_parallel.pictures.library import check_drawing
from megatron_merak.pipeline_parallel.pictures.page import page
from megatron_merak.pipeline_parallel.pictures.trace import to_trace
from megatron_merak.pipeline_parallel.pictures.view import View

SUFFIXES = (".png", ".html", ".json")


def check_suffix(flag: str, path: str) -> None:
    """Raise ConfigError for a suffix that ``write`` does not know, and for a picture without a
    drawing library.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        reason = "its suffix is none of " + ", ".join(SUFFIXES)
        remedy = (
            "Name a .png (a picture), an .html (a page to zoom into) or a .json (a trace "
            "for ui.perfetto.dev)"
        )
        raise ConfigError(flag, path, reason, remedy)
    if Path(path).suffix.lower() == ".png":
        check_drawing(flag, path)


def write(views: Sequence[View], path: str | Path, title: str = "") -> None:
    """Write a picture (.png), a page (.html) or a trace (.json). Raises ConfigError for any other
    suffix.
    """
    check_suffix("picture", str(path))
    match Path(path).suffix.lower():
        case ".png":
            draw(views, path)
        case ".html":
            Path(path).write_text(page(views, title), encoding="utf-8")
        case _:
            Path(path).write_text(json.dumps(to_trace(views)), encoding="utf-8")
