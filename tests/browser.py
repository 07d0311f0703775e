"""A headless browser, where there is one: a page as it is after its script ran, and as a picture.

python -m tests.browser PAGE.html PICTURE.png [--dark] [--width 1280] [--height 2400]
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
)
QUIET = """--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=4000"""


def browser() -> str:
    """The path of a browser; skips the test without one."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no headless browser is installed")
    return found


def run(page: Path, *flags: str, width: int = 1280, height: int = 2400, dark: bool = False) -> str:
    """What a browser prints that opens ``page`` with further flags."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        own = [f"--user-data-dir={profile}", f"--window-size={width},{height}", scheme]
        command = [browser(), *QUIET.split(), *own, *flags, page.resolve().as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=100).stdout


def document(page: Path, **window: int) -> str:
    """The document as it is after its script ran."""
    return run(page, "--dump-dom", **window)


def picture(page: Path, into: Path, **window) -> None:
    """Write a PNG of a page."""
    run(page, f"--screenshot={into.resolve()}", **window)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("page", type=Path)
    flags.add_argument("picture", type=Path)
    flags.add_argument("--dark", action="store_true", help="as with a dark theme")
    flags.add_argument("--width", type=int, default=1280)
    flags.add_argument("--height", type=int, default=2400)
    given = flags.parse_args()
    picture(given.page, given.picture, width=given.width, height=given.height, dark=given.dark)
    print(f"wrote {given.picture}")
