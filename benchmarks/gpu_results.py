"""The files that keep what gpu_step.py measured: one per row, whole or not there. Imports no torch."""

import json
import os
from pathlib import Path

from gpu_rows import ROWS, Row


def path_of(row: Row, folder: Path) -> Path:
    return folder / f"step_{row.name.replace(' ', '_')}.json"


def write(path: Path, found: dict | list) -> None:
    """Write JSON so that a run that is killed leaves the file that was there, or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)


def read(path: Path) -> dict:
    """A result that is there; {} where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def results(folder: Path) -> list[dict]:
    """What is there of all rows, in the order in which they are measured."""
    found = (read(path_of(row, folder)) for row in ROWS)
    return [row for row in found if row]
