"""Shards of webdataset: samples in a .tar, each of the members in a row that have one name up to
its first dot.

A document is the text of KEY.txt or, where there is none, KEY.json; other members are passed over.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

TAR_SUFFIXES = (".tar", ".tar.gz", ".tar.zst")
_KINDS = ("txt", "json")  # the first one of a sample that is there is its text
_CHUNK = tarfile.RECORDSIZE


class Member(NamedTuple):
    """The text of a sample.

    number: of samples up to it.
    end:    where the next one begins in the file.
    """

    name: str
    data: bytes
    is_json: bool
    number: int
    end: int


def is_tar(path: Path) -> bool:
    return path.name.endswith(TAR_SUFFIXES)


def shard_members(file: Any, skipped: int, begin: int) -> Iterator[Member]:
    """Yield the texts of the samples after the first ``skipped``. Raises OSError or EOFError for a
    file that is damaged.

    file:  opened, unpacked.
    begin: where the first of them begins; 0: everything before is read again.
    """
    number = skipped if begin else 0
    if begin:
        file.seek(begin)
    try:
        for member, end in _samples(_Chunks(file)):
            number += 1
            if number > skipped:
                yield member._replace(number=number, end=begin + end)
    except tarfile.TarError as error:
        raise OSError(str(error)) from error


def _samples(file: "_Chunks") -> Iterator[tuple[Member, int]]:
    """Yield the texts of all samples, and where each sample ends."""
    key = ""
    found: dict[str, Member] = {}
    read_only: Any = file  # tarfile asks for no more, and its types do
    with tarfile.open(fileobj=read_only, mode="r|", bufsize=_CHUNK) as archive:
        passed: list = vars(archive)["members"]
        while (member := archive.next()) is not None:
            passed.clear()  # which would grow with the file
            name, kind = _split(member.name)
            if name != key and found:
                yield _text(found), member.offset
                found = {}
            key = name
            if member.isreg() and kind in _KINDS:
                content = archive.extractfile(member)
                assert content is not None, "it is a regular file"
                found[kind] = Member(member.name, content.read(), kind == "json", 0, 0)
        # a damaged header ends the loop, too
        file.check_end(archive.offset)
        if found:
            yield _text(found), archive.offset


def _text(found: dict[str, Member]) -> Member:
    return next(found[kind] for kind in _KINDS if kind in found)


def _split(name: str) -> tuple[str, str]:
    """Return the name of a member up to the first dot of its last part, and what is behind it."""
    folder, slash, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return folder + slash + key, kind.lower()


class _Chunks:
    """A file that knows what it returned last."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._last = b""
        self._end = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._end += len(data)
        self._last = (self._last + data)[-2 * _CHUNK :]
        return data

    def check_end(self, offset: int) -> None:
        """Raise EOFError or OSError unless the mark of a shard's end is at ``offset``."""
        start = offset - (self._end - len(self._last))
        block = self._last[start : start + tarfile.BLOCKSIZE]
        if len(block) < tarfile.BLOCKSIZE:
            raise EOFError("it ends without the mark of its end")
        if any(block):
            raise OSError(f"there is no header at byte {offset}")
