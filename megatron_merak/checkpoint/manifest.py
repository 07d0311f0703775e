"""The manifest: the content of a checkpoint and the digest of each part. A directory with a valid
one is complete.

The file is canonical JSON with its own digest, so that a change of any byte is detected.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_merak.checkpoint.digests import checked
from megatron_merak.checkpoint.directories import MANIFEST
from megatron_merak.checkpoint.files import DTYPE_NAMES
from megatron_merak.checkpoint.sealed import OtherVersionError, seal, unseal
from megatron_merak.checkpoint.shard import Intervals, Slab, local_shape, untiled
from megatron_merak.errors import CheckpointError, DamagedError

NAME = MANIFEST
FORMAT = "megatron_merak checkpoint"
VERSION = 2
SLABS = 3  # the version of a manifest with parts of slabs
READABLE = (1, VERSION, SLABS)  # version 1 has SHA-256 in place of named digests
MODEL = "model"
BUFFER = "buffer"  # what training does not change, with any numbers in it: masks have infinities
FILE_NAME = re.compile(r"[a-z][a-z0-9_]*-rank-\d{5,}(-\d{4,})?\.safetensors")

_LARGEST = 2**62


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor in a file, under the tensor's name: ``intervals`` along the tensor's
    ``dim``, of a slab of it or of all of it.
    """

    file: str
    intervals: Intervals
    digest: str
    slab: Slab | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A full tensor: its shape without padding, its dtype ("float32"), and the parts that tile it
    along ``dim``.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint, except the tensors' values.

    files:   name -> {"bytes": size, "header": digest}.
    tensors: kind -> name -> `StoredTensor`.
    meta:    any JSON object.
    """

    iteration: int
    save_id: str
    files: Mapping[str, Mapping]
    tensors: Mapping[str, Mapping[str, StoredTensor]]
    meta: Mapping

    def files_of(self, kinds: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return file name -> {tensor name: digest} for every file with tensors of these kinds."""
        digests: dict[str, dict[str, str]] = {}
        for kind in kinds:
            for name, entry in self.tensors[kind].items():
                for part in entry.parts:
                    digests.setdefault(part.file, {})[name] = part.digest
        return digests

    @property
    def _has_slabs(self) -> bool:
        entries = (entry for entries in self.tensors.values() for entry in entries.values())
        return any(part.slab is not None for entry in entries for part in entry.parts)

    def render(self) -> bytes:
        """Return the bytes of the manifest file. Raises `ValueError` or `TypeError` if ``meta`` is
        not JSON.
        """
        return seal(
            {
                "format": FORMAT,
                "version": SLABS if self._has_slabs else VERSION,
                "iteration": self.iteration,
                "save_id": self.save_id,
                "files": self.files,
                "tensors": {
                    kind: {name: _entry_json(entry) for name, entry in entries.items()}
                    for kind, entries in self.tensors.items()
                },
                "meta": self.meta,
            }
        )


def parse_manifest(text: bytes, path: Path) -> Manifest:
    """Read and check a manifest file.

    Raises `DamagedError` naming ``path`` if anything in it is invalid, and `CheckpointError` for
    another version's.
    """
    remedy = "Load another iteration with --ckpt-step, or restore this one from a copy"
    try:
        return _parse(unseal(text, FORMAT, READABLE))
    except KeyError as error:
        raise DamagedError("manifest", path, f"it has no {error}", remedy) from error
    except OtherVersionError as error:
        remedy = "Read it with the version of megatron_merak that wrote it"
        raise CheckpointError("manifest", path, str(error), remedy) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError("manifest", path, str(error), remedy) from error


def check_entry(label: str, entry: StoredTensor) -> None:
    """Raise `ValueError` unless the parts of a tensor tile it exactly once."""
    if entry.dim is None:
        if len(entry.parts) != 1:
            raise ValueError(f"tensor {label} is stored in full {len(entry.parts)} times")
        return
    parts = ((part.intervals, part.slab) for part in entry.parts)
    if problem := untiled(entry.shape, entry.dim, parts):
        raise ValueError(f"tensor {label} of shape {entry.shape}, {problem}")


def stored_shape(entry: StoredTensor, part: StoredPart) -> tuple[int, ...]:
    """Return the shape under which the file has the part."""
    return local_shape(entry.shape, entry.dim, part.intervals, part.slab)


def _entry_json(entry: StoredTensor) -> dict:
    parts = [
        {"file": part.file, "intervals": part.intervals, "digest": part.digest}
        | ({} if part.slab is None else {"slab": part.slab})
        for part in entry.parts
    ]
    return {"shape": entry.shape, "dtype": entry.dtype, "dim": entry.dim, "parts": parts}


def _parse(document: dict) -> Manifest:
    files = {_file_name(name): _file(name, file) for name, file in document["files"].items()}
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for kind, entries in document["tensors"].items():
        tensors[kind] = {
            name: _entry(f"{kind}/{name}", entry, files) for name, entry in entries.items()
        }
    if not isinstance(document["meta"], dict):
        raise ValueError("its meta is not an object")
    return Manifest(
        _integer(document["iteration"]),
        _text(document["save_id"]),
        files,
        tensors,
        meta=document["meta"],
    )


def _file(name: str, value: dict) -> dict:
    return {"bytes": _integer(value["bytes"]), "header": checked(value["header"])}


def _file_name(value: object) -> str:
    if not isinstance(value, str) or not FILE_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of a tensor file in this directory")
    return value


def _entry(label: str, value: dict, files: Mapping[str, dict]) -> StoredTensor:
    shape = tuple(_integer(extent) for extent in value["shape"])
    dim = value["dim"]
    if dim is not None and _integer(dim) >= len(shape):
        raise ValueError(f"tensor {label} of shape {shape} has no dim {dim}")
    if value["dtype"] not in DTYPE_NAMES:
        raise ValueError(f"tensor {label} has the unknown dtype {value['dtype']!r}")
    parts = []
    for part in value["parts"]:
        if _file_name(part["file"]) not in files:
            raise ValueError(f"tensor {label} is in {part['file']}, which is not listed")
        intervals = tuple((_integer(start), _integer(stop)) for start, stop in part["intervals"])
        if any(start > stop for start, stop in intervals):
            raise ValueError(f"tensor {label} has an interval that ends before it starts")
        slab = _slab(label, shape, dim, part.get("slab"))
        parts.append(StoredPart(part["file"], intervals, _digest(part), slab))
    entry = StoredTensor(shape, value["dtype"], dim, tuple(parts))
    check_entry(label, entry)
    return entry


def _slab(label: str, shape: tuple[int, ...], dim: int | None, value: object) -> Slab | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"tensor {label} has the slab {value!r}")
    across, start, stop = map(_integer, value)
    if dim in (None, across) or across >= len(shape) or start > stop:
        raise ValueError(f"tensor {label} of shape {shape} has the slab {value!r}")
    return across, start, stop


def _digest(value: dict) -> str:
    return checked(value["digest"] if "digest" in value else value["sha256"])


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{value!r} stands where a size or index belongs")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} stands where text belongs")
    return value
