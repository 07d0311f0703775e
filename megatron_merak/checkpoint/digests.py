"""Digests of tensors and files, by which a changed byte is found.

A digest is text, "xxh3_128:<hexadecimal>". XXH3 is read at the speed of memory, where SHA-256 would take longer than
the disk; like any digest that is kept beside what it is of, it guards against accidents and not against forgers.
Checkpoints of earlier versions have SHA-256, without a name before it, and so has what is written where the package
xxhash is not installed.
"""

import hashlib
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any

try:
    from xxhash import xxh3_128 as _fast
except ImportError:  # a machine on which nothing can be installed
    _fast = None  # type: ignore[misc, assignment]

_UNNAMED = "sha256"
_FAST = "xxh3_128"
_KINDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {_UNNAMED: hashlib.sha256} | ({} if _fast is None else {_FAST: _fast})
)
_WRITTEN = _UNNAMED if _fast is None else _FAST


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of some bytes."""
    return f"{_WRITTEN}:{_KINDS[_WRITTEN](data).hexdigest()}"


def digest_of_file(file: BufferedReader) -> str:
    """Return the digest of what follows in an open file."""
    return f"{_WRITTEN}:{hashlib.file_digest(file, _KINDS[_WRITTEN]).hexdigest()}"


def matches(data: bytes | memoryview, digest: str) -> bool:
    """Whether some bytes have a digest, of any kind."""
    kind, value = _split(digest)
    return kind in _KINDS and _KINDS[kind](data).hexdigest() == value


def file_matches(path: Path, digest: str) -> bool:
    """Whether a file has a digest, of any kind."""
    kind, value = _split(digest)
    if kind not in _KINDS:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _KINDS[kind]).hexdigest() == value


def checked(value: object) -> str:
    """Return a digest from JSON. Raises `ValueError` for one that this program cannot compute."""
    kind = _split(value)[0] if isinstance(value, str) else ""
    if kind == _FAST and kind not in _KINDS:
        raise ValueError(f"its digests are {_FAST}, which takes the package xxhash")
    if not isinstance(value, str) or kind not in _KINDS:
        raise ValueError(f"{value!r} stands where a digest belongs")
    return value


def _split(digest: str) -> tuple[str, str]:
    kind, _, value = digest.rpartition(":")
    return kind or _UNNAMED, value
