"""The weight files of a HuggingFace directory: checked before any value is read, then read in slices.

    model.safetensors                  or  model.safetensors.index.json  {"weight_map": {tensor: file}}
    pytorch_model.bin                  or  pytorch_model.bin.index.json, with ``allow_pickle`` only

A safetensors file: 8 bytes little-endian header length, JSON header {tensor: {dtype, shape, data_offsets}}, data
without gaps. The directory is not trusted: an index cannot lead out of it.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_merak.checkpoint import in_place
from megatron_merak.checkpoint.files import DTYPE_CODES, LONGEST_HEADER
from megatron_merak.errors import CheckpointError

WEIGHTS = "model.safetensors"
PICKLED = "pytorch_model.bin"
INDEX = ".index.json"

_DTYPES: Mapping[str, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}
_SIZES: Mapping[str, int] = {code: dtype.itemsize for code, dtype in _DTYPES.items()}
_LARGEST_JSON = 1 << 28  # bytes; the index of a model with a million tensors has a tenth of it
_RESTORE = "Copy the model directory again, or convert it with save_pretrained of transformers"


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor is stored, its shape and dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def bad(what: str, path: Path, reason: str, remedy: str = _RESTORE) -> CheckpointError:
    return CheckpointError(what, os.fspath(path), reason, remedy)


def has_weights(directory: Path) -> bool:
    """Whether a directory has weights of any format, readable or not."""
    return any(
        _is_there(directory / (name + end)) for name in (WEIGHTS, PICKLED) for end in ("", INDEX)
    )


def _is_there(path: Path) -> bool:
    """Whether a directory has a file, be it a link that leads nowhere."""
    return os.path.lexists(path) and not in_place.is_absent(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Raises `CheckpointError` if it is unreadable, not JSON, or
    repeats a key.
    """
    with _readable(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise bad("file", path, "it is not a regular file")
        if status.st_size > _LARGEST_JSON:
            raise bad("file", path, f"it is larger than {_LARGEST_JSON} bytes")
        return _parse(path, path.read_bytes())


class WeightFiles:
    """The tensors of a directory under their stored names; at most one file is open at a time.

    ``entries``: every tensor, checked.

    Raises `CheckpointError` for a directory without readable weights, an invalid index or header,
    and files that are missing, truncated or links out of the directory.
    """

    def __init__(self, directory: Path | str, allow_pickle: bool = False):
        self.directory = Path(directory)
        self.entries: dict[str, FileTensor] = {}
        self._open: tuple[Path, Any] | None = None
        name, weight_map = self._listed(allow_pickle)
        describe = _describe_pickled if name == PICKLED else _describe
        for file in sorted({*weight_map.values()} if weight_map else {name}):
            path = self._inside(file)
            for tensor, entry in describe(path).items():
                if not weight_map or weight_map.get(tensor, file) == file:
                    self.entries.setdefault(tensor, entry)
        lost = sorted(set(weight_map) - set(self.entries))
        if lost:
            reason = f"it lists {lost[0]} in {weight_map[lost[0]]}, which does not contain it"
            raise bad("index", self.directory / (name + INDEX), reason)

    def read(self, name: str, take: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Return the rectangle ``take``, [start, stop) per dimension, of the stored tensor
        ``name``.
        """
        entry = self.entries[name]
        full = all(bounds == (0, extent) for bounds, extent in zip(take, entry.shape, strict=True))
        with _readable(entry.file):
            handle = self._handle(entry.file)
            if isinstance(handle, dict):
                return handle[name][tuple(slice(*bounds) for bounds in take)].clone()
            if full:
                return handle.get_tensor(name)
            return handle.get_slice(name)[tuple(slice(*bounds) for bounds in take)]

    def close(self) -> None:
        """Close the open file; reading opens it again."""
        self._open = None

    def _handle(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = None  # before the next one is mapped
            self._open = (
                path,
                _load_pickled(path) if path.suffix == ".bin" else safe_open(path, framework="pt"),
            )
        return self._open[1]

    def _listed(self, allow_pickle: bool) -> tuple[str, dict[str, str]]:
        """Return WEIGHTS or PICKLED, in transformers' order of preference, and the index's weight
        map, empty for a single file.
        """
        directory = self.directory
        if not directory.is_dir():
            raise bad(
                "model directory",
                directory,
                "it is not a directory",
                "Give the path of a local directory",
            )
        for name in (WEIGHTS, PICKLED):
            single, index = (_is_there(directory / (name + end)) for end in ("", INDEX))
            if not single and not index:
                continue
            if name == PICKLED and not allow_pickle:
                reason = "its weights are pickled, and unpickling can run code"
                remedy = (
                    "Convert it to safetensors, or allow it with --allow-pickle (only "
                    "tensors are then unpickled)"
                )
                raise bad("model directory", directory, reason, remedy)
            return name, {} if single else _weight_map(
                directory / (name + INDEX), Path(name).suffix
            )
        remedy = f"Give a directory with {WEIGHTS} or {WEIGHTS}{INDEX}"
        raise bad("model directory", directory, "it has no weights", remedy)

    def _inside(self, file: str) -> Path:
        """Return the path of a weight file, which must be a regular file of this directory or of
        its hub cache.
        """
        path = self.directory / file
        with _readable(path):
            real = path.resolve(strict=True)
            home = self.directory.resolve(strict=True)
        # models--X/snapshots/REVISION/FILE is a link to models--X/blobs/HASH
        blobs = home.parent.parent / "blobs"
        in_cache = home.parent.name == "snapshots" and real.parent == blobs
        if not real.is_relative_to(home) and not in_cache:
            raise bad(
                "weight file",
                path,
                f"it is a link to {real}, which is outside of the model directory",
            )
        if not real.is_file():
            raise bad("weight file", path, "it is not a regular file")
        return path


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise bad("file", path, error.strerror or str(error)) from error
    except SafetensorError as error:
        raise bad("weight file", path, f"it is not a valid safetensors file ({error})") from error


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
        return mapping

    try:
        value = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise bad("file", path, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise bad("file", path, f"it holds a JSON {type(value).__name__} where an object belongs")
    return value


def _weight_map(path: Path, suffix: str) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise bad("index", path, "it has no weight_map")
    for tensor, file in weight_map.items():
        pure = PurePosixPath(file) if isinstance(file, str) else PurePosixPath("..")
        if pure.is_absolute() or ".." in pure.parts or "\\" in file or "\0" in file:
            raise bad(
                "index",
                path,
                f"it leads to {file!r} for {tensor}, which is not a file of this directory",
            )
        if pure.suffix != suffix:
            raise bad(
                "index", path, f"it leads to {file!r} for {tensor}, which is no {suffix} file"
            )
    return weight_map


def _describe(path: Path) -> dict[str, FileTensor]:
    """Return the tensors in a safetensors header, once it agrees with itself and with the size of
    the file.
    """
    with _readable(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, LONGEST_HEADER):
            raise bad(
                "weight file",
                path,
                f"it has {size} bytes, too few for its header, or its header is damaged",
            )
        header = _parse(path, file.read(length))
    header.pop("__metadata__", None)
    entries = {}
    spans = []
    for name, value in header.items():
        entries[name], span = _entry(path, name, value)
        spans.append(span)
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise bad(
                "weight file",
                path,
                f"its header leaves or overlaps bytes between {end} and {first}",
            )
        end = last
    if 8 + length + end != size:
        raise bad(
            "weight file",
            path,
            f"it has {size} bytes where its header describes {8 + length + end}",
        )
    return entries


def _entry(path: Path, name: str, value: Any) -> tuple[FileTensor, tuple[int, int]]:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    code = fields.get("dtype")
    if (
        not _natural(shape)
        or not _natural(offsets)
        or len(offsets) != 2
        or not isinstance(code, str)
    ):
        raise bad("weight file", path, f"its header describes {name} as {str(value)[:100]}")
    if code not in _DTYPES:
        remedy = "Convert the model to bfloat16, float16 or float32 first"
        raise bad(
            "weight file", path, f"tensor {name} has dtype {code}, which is not supported", remedy
        )
    if offsets[1] - offsets[0] != math.prod(shape) * _SIZES[code]:
        reason = (
            f"tensor {name} of shape {tuple(shape)} and dtype {code} has "
            f"{offsets[1] - offsets[0]} bytes"
        )
        raise bad("weight file", path, reason)
    return FileTensor(path, tuple(shape), _DTYPES[code]), (offsets[0], offsets[1])


def _natural(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )


def _describe_pickled(path: Path) -> dict[str, FileTensor]:
    entries = {}
    for name, value in _load_pickled(path).items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise bad(
                "weight file", path, f"{name!r} is a {type(value).__name__} where a tensor belongs"
            )
        if value.dtype not in DTYPE_CODES:
            raise bad(
                "weight file",
                path,
                f"tensor {name} has dtype {value.dtype}, which is not supported",
            )
        entries[name] = FileTensor(path, tuple(value.shape), value.dtype)
    return entries


def _load_pickled(path: Path) -> dict:
    """Return the tensors of a PyTorch file, memory-mapped. Only tensors are unpickled."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise bad("weight file", path, error.strerror or str(error)) from error
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (
            f"it is not a file of tensors that torch can map ({str(error).splitlines()[0][:200]})"
        )
        raise bad(
            "weight file", path, reason, "Convert it to safetensors on a machine that trusts it"
        ) from error
    if not isinstance(value, dict):
        raise bad(
            "weight file", path, f"it holds a {type(value).__name__} where named tensors belong"
        )
    return value
