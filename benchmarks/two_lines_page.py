"""Pages that benchmarks write into, and the machine and versions that they name."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "transformers", "megatron-core", "deepspeed")


class PageError(Exception):
    """A page without the two marks between which the table is written."""


def write(into: Path, text: str, first: str, last: str) -> None:
    """Replace what is between the two marks of a page. Raises PageError where they are missing."""
    before, begin, rest = into.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise PageError(f"{into} has no lines {first} and {last}")
    into.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor()


def versions() -> dict[str, str]:
    """Of those PACKAGES that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
