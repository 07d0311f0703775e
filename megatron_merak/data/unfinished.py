"""What a preprocessing run that has not ended has written, so that the next one goes on from it.

    .NAME.unfinished/          beside the output, NAME the last part of its prefix
        lock                   held by the run that writes
        0.bin, 0.lengths       of the first key: ids as in PREFIX_KEY_document.bin, and the ids of
                               each document, int64; 1.bin and so on of others
        progress.json          the seal: what is written by whom, up to which size of each file, and
                               how far the inputs are read

A run writes on behind what is sealed, and seals that now and then: first the files are on the disk,
then the seal that names their sizes takes the place of the last one. Whatever is behind the sealed
sizes, a kill left there, and it is cut off. At the end the seal says so, the files get their names,
the indices are written, and the directory goes, its seal first.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..durable import make_directory, rename, replaced, sync, sync_directory, sync_file
from ..errors import DataError
from .documents import BEGINNING, Reached
from .indexed_dataset import data_path, index_path, write_index

_SEAL = "progress.json"
_VERSION = 1
Job = Mapping[str, Any]


@dataclass
class Written:
    """How far a run is.

    place:                      up to which the inputs are read.
    documents, tokens, skipped: so far.
    read:                       bytes of text so far.
    sizes:                      tokens so far, of each key.
    is_written:                 whether that is all.
    """

    place: Reached = BEGINNING
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    read: int = 0
    sizes: list[int] = field(default_factory=list)
    is_written: bool = False


class Unfinished:
    """The files of a run.

    prefixes: of the data sets that it writes.
    dtype:    of their ids.
    job:      what the output depends on: parts with a name for people. None: it never goes on from
              an earlier run.
    """

    def __init__(self, prefix: str, prefixes: Sequence[str], dtype: np.dtype, job: Job | None):
        whole = Path(prefix)
        self.prefix = prefix
        self.directory = whole.with_name(f".{whole.name}.unfinished")
        self.progress = Written(sizes=[0] * len(prefixes))
        self._prefixes = prefixes
        self._dtype = dtype
        self._job = job
        self._lock: IO[bytes] | None = None
        self._files: list[tuple[IO[bytes], IO[bytes]]] = []

    def open(self, overwrite: bool) -> None:
        """Begin, or go on from what an earlier run of the same job sealed. Raises `DataError` if
        that was another job, or another process writes.

        overwrite: begin anew.
        """
        make_directory(self.directory)
        self._lock = open(self.directory / "lock", "wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "Wait until it has ended, or give another prefix"
            reason = "another process writes these files"
            raise DataError("--output-prefix", self.prefix, reason, remedy) from error
        except OSError:
            pass  # a file system without locks
        sealed = None if overwrite or self._job is None else self._sealed()
        if sealed is None:
            self._begin()
        else:
            self.progress = sealed
        if not self.progress.is_written:
            self._open_files()

    def _sealed(self) -> Written | None:
        """Return how far the same job is; None: nothing is sealed."""
        path = self.directory / _SEAL
        try:
            seal = json.loads(path.read_bytes())
            version = seal["version"]
            job = seal["job"]
            progress = Written(**seal["progress"])
            progress.place = Reached(*progress.place)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            reason = f"{path} of an earlier run cannot be read ({error})"
            raise self._other(reason) from error
        assert self._job is not None, "asked for by a job"
        if version != _VERSION:
            raise self._other("an earlier run of another version has not ended")
        for name, part in json.loads(json.dumps(self._job)).items():
            if job.get(name) != part:
                raise self._other(f"a run with {_difference(name, job.get(name), part)}")
        return progress

    def _other(self, what: str) -> DataError:
        reason = f"{what} has not ended, its files are in {self.directory}"
        if "cannot be read" in what or "version" in what:
            reason = f"{what}, its files are in {self.directory}"
        remedy = "Start that command again to go on with it, or give --overwrite to begin anew"
        return DataError("--output-prefix", self.prefix, reason, remedy)

    def _begin(self) -> None:
        (self.directory / _SEAL).unlink(missing_ok=True)
        sync_directory(self.directory)
        for at in range(len(self._prefixes)):
            for path in self._paths(at):
                path.unlink(missing_ok=True)

    def _paths(self, at: int) -> tuple[Path, Path]:
        return self.directory / f"{at}.bin", self.directory / f"{at}.lengths"

    def _open_files(self) -> None:
        for at, tokens in enumerate(self.progress.sizes):
            ids, lengths = self._paths(at)
            sizes = (tokens * self._dtype.itemsize, 8 * self.progress.documents)
            self._files.append((self._cut(ids, sizes[0]), self._cut(lengths, sizes[1])))

    def _cut(self, path: Path, size: int) -> IO[bytes]:
        """Open a file for writing behind its sealed bytes."""
        file = open(path, "r+b" if size else "w+b")
        there = file.seek(0, os.SEEK_END)
        if there < size:
            file.close()
            reason = f"{path} has {there} bytes, and {size} were sealed"
            remedy = "Give --overwrite to begin anew"
            raise DataError("--output-prefix", self.prefix, reason, remedy)
        file.truncate(size)
        file.seek(size)
        return file

    def add(self, at: int, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of the key ``at``; ``lengths`` has the tokens of each."""
        ids, counts = self._files[at]
        ids.write(tokens.astype(self._dtype, copy=False).tobytes())
        counts.write(lengths.astype("<i8").tobytes())
        self.progress.sizes[at] += len(tokens)

    def seal(self) -> None:
        """Let the next run go on from here."""
        if self._job is None:
            return
        for file in (each for pair in self._files for each in pair):
            sync(file)
        sync_directory(self.directory)
        seal = {"version": _VERSION, "job": self._job, "progress": asdict(self.progress)}
        with replaced(self.directory / _SEAL) as file:
            file.write(json.dumps(seal).encode())

    def publish(self) -> None:
        """Give everything its place, and remove the directory."""
        self.progress.is_written = True
        self.seal()
        self._close()
        for at, prefix in enumerate(self._prefixes):
            ids, counts = self._paths(at)
            if ids.exists():  # else a kill came after it was renamed
                index_path(prefix).unlink(missing_ok=True)
                sync_directory(index_path(prefix).parent)  # no old index beside new tokens
                sync_file(ids)
                rename(ids, data_path(prefix))
            lengths = np.fromfile(counts, "<i8")
            documents = np.concatenate([[0], np.cumsum(lengths > 0)])
            aside = self.directory / f"{at}.idx"
            write_index(prefix, self._dtype, lengths[lengths > 0], documents, aside=aside)
        self.discard()

    def discard(self) -> None:
        """Remove what is written."""
        self._close()
        (self.directory / _SEAL).unlink(missing_ok=True)
        sync_directory(self.directory)
        shutil.rmtree(self.directory)
        self.close()

    def _close(self) -> None:
        for file in (each for pair in self._files for each in pair):
            file.close()
        self._files.clear()

    def close(self) -> None:
        """Leave everything as it is sealed."""
        self._close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _difference(name: str, old: Any, new: Any) -> str:
    """Say in which value of a part another job differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
        if isinstance(new.get(key), str | int | float | bool | list | None):
            return f"other {name} ({key}: {_shown(old.get(key))}, now {_shown(new.get(key))})"
    return f"other {name}"


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) < 40 else f"{text[:37]}..."
