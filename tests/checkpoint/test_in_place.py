"""Files of a directory are replaced all at once: a kill before any call that touches the disk shows
old or new ones.
"""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from megatron_merak.checkpoint import in_place
from megatron_merak.checkpoint.hf_files import has_weights
from megatron_merak.errors import CheckpointError
from tests.checkpoint.kills import DISK, NAMES, fork, kill_before_call

CHANGES = NAMES | {"link", "symlink"}
CALLS = DISK | CHANGES | {"readlink"}
SWEEPS = [(CHANGES, False), (CALLS, True), (CALLS, False)]
MINE = {"notes.txt": "mine", "sub/notes.txt": "mine"}
ODD = {
    "config.json": "1",
    "sub/code.py": "1",
    "model-1.safetensors": "1",
    "model.safetensors.index.json": "1",
}
EVEN = {"config.json": "2", "sub/code.py": "2", "more/code.py": "2", "model.safetensors": "2"}
WEIGHTS = ("model-1.safetensors", "model.safetensors.index.json", "model.safetensors")


@pytest.fixture
def root(tmp_path):
    """A directory in memory where there is one: a kill, unlike a power cut, does not care, and
    fsync is slow.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=memory if os.access(memory, os.W_OK) else tmp_path
    ) as directory:
        yield Path(directory)


def _write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def _save(directory: Path, files: dict[str, str]) -> None:
    _write(in_place.begin(directory), files)
    in_place.publish(directory, WEIGHTS)


def _shown(directory: Path) -> dict[str, str]:
    """What a program sees that opens files by their names; `more/code.py` and the like stay, as in
    save_pretrained.
    """
    names = {*MINE, *ODD, *EVEN}
    return {
        name: (directory / name).read_text()
        for name in sorted(names)
        if (directory / name).is_file()
    }


def _expected(files: dict[str, str], first: bool) -> dict[str, str]:
    return dict(sorted(({} if first else {"more/code.py": "2"} | MINE | files).items()))


@pytest.mark.parametrize(
    ("calls", "tidy"),
    [(CHANGES, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SWEEPS)],
)
def test_a_kill_shows_old_or_new_files(root, calls, tidy, record_property):
    place = root / "model"
    _write(place, MINE)
    _save(place, EVEN)
    _save(place, ODD)
    held, other = ODD, EVEN
    kills = 0
    seen = set()
    done = False
    while not done:

        def work(report, number=kills, other=other):
            kill_before_call(number, calls)
            _save(place, other)
            report()

        done, reports = fork(work)
        shown = _shown(place)
        assert shown in (_expected(held, False), _expected(other, False)), (kills, shown)
        after = other if shown == _expected(other, False) else held
        assert after is other or not reports
        assert has_weights(place)
        seen.add(after is other)
        kills += not done
        if after is other:
            held, other = other, held
        if tidy:
            _save(place, held)
    _save(place, other)
    assert _shown(place) == _expected(other, False)
    assert not (place / in_place.PLACE).exists() and not any(
        path.is_symlink() for path in place.rglob("*")
    )
    record_property("kills", kills)
    assert kills >= 30 and seen == {True, False}, (kills, seen)


def test_a_first_save_that_is_killed_shows_nothing_or_all(root, record_property):
    kills = 0
    done = False
    while not done:
        place = root / str(kills)

        def work(report, number=2 * kills, place=place):
            kill_before_call(number, CHANGES)
            _save(place, EVEN)

        done, _ = fork(work)
        assert _shown(place) in ({}, dict(sorted(EVEN.items()))), kills
        assert has_weights(place) == bool(_shown(place))
        kills += not done
    record_property("kills", kills)
    assert kills >= 8


def test_without_links_files_are_replaced_one_by_one(root, monkeypatch, caplog):
    _save(root, ODD)
    kept = os.link

    def forbidden(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", forbidden)
    _save(root, EVEN)
    assert _shown(root) == dict(sorted(EVEN.items())) and not (root / in_place.PLACE).exists()
    assert (
        "one after the other, since links cannot be made there (Operation not permitted)"
        in caplog.text
    )
    monkeypatch.setattr(os, "link", kept)


def test_an_error_leaves_the_old_files(root, monkeypatch):
    _write(root, MINE)
    _save(root, EVEN)
    _save(root, ODD)
    replace = os.replace

    def full(source, target):
        if Path(target).name == "model.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        _save(root, EVEN)
    in_place.abandon(root)
    assert _shown(root) == _expected(ODD, False)
    assert not (root / in_place.PLACE).exists()


def test_a_directory_in_the_place_of_a_file_is_refused_before_anything_changes(root):
    _save(root, ODD)
    (root / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors in it is a directory"):
        _save(root, EVEN)
    in_place.abandon(root)
    assert _shown(root) == dict(sorted(ODD.items()))


def test_links_to_files_and_to_the_directory_itself(root):
    _write(root / "blobs", {"a": "blob"})
    (root / "model").mkdir()
    (root / "model" / "config.json").symlink_to("../blobs/a")
    (root / "link").symlink_to("model")
    kills = 0
    done = False
    while not done:

        def work(report, number=5 * kills):
            kill_before_call(number, CHANGES)
            _save(root / "link", EVEN)

        done, _ = fork(work)
        assert (root / "model" / "config.json").read_text() in ("blob", "2")
        kills += not done
    assert _shown(root / "model") == dict(sorted(EVEN.items()))
    assert (root / "blobs" / "a").read_text() == "blob" and (root / "link").is_symlink()
