"""Canonical JSON with its own digest, so that a change of any byte is detected."""

import hashlib
import json
from collections.abc import Collection, Mapping

DIGEST = "sha256"


def seal(document: Mapping) -> bytes:
    """Return the bytes of ``document`` with its digest. Raises `ValueError` or `TypeError` if it is
    not JSON.
    """
    return _dump({**document, DIGEST: _digest(document)}) + b"\n"


def unseal(text: bytes, kind: str, versions: Collection[int]) -> dict:
    """Return the document that `seal` turned into ``text``, whose "format" is ``kind``.

    Raises `OtherVersionError` for a "version" that is none of ``versions``, and `ValueError` or `KeyError` for anything
    else that is invalid.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    if document["format"] != kind:
        raise ValueError(f"its format is {document['format']!r}, not {kind!r}")
    digest = document.pop(DIGEST)
    if _digest(document) != digest or seal(document) != text:
        raise ValueError("it was changed after it was written")
    if document["version"] not in versions:
        *others, last = map(str, versions)
        known = f"{', '.join(others)} and {last}" if others else last
        raise OtherVersionError(
            f"its format version is {document['version']!r} and this program reads {known}"
        )
    return document


class OtherVersionError(ValueError):
    """The document of another version of this program."""


def _dump(document: Mapping) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _digest(document: Mapping) -> str:
    return hashlib.sha256(_dump(document)).hexdigest()
