"""Tensor files in safetensors format whose every byte has a digest, and errors of the disk.

A tensor file is written one tensor at a time, hashed while it is being written, and never
unpickled.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header,
        data without gaps).
"""

import errno
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_merak.checkpoint.digests import digest_of, matches
from megatron_merak.durable import aside_of, move, written
from megatron_merak.errors import CheckpointError, DamagedError, FullDiskError, MerakError

LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPE_NAMES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES
}

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_RUST = re.compile(r"\(os error (\d+)\)")  # how errors of safetensors and tokenizers end
_RESTORE = "Load another iteration with --ckpt-step, or restore this one from a copy"


def damaged(path: Path, reason: str) -> DamagedError:
    """Return the error for a file that differs from its manifest."""
    return DamagedError("checkpoint file", path, reason, _RESTORE)


@contextmanager
def disk_errors(path: Path, remedy: str, needed: int | None = None) -> Iterator[None]:
    """Turn errors of the operating system and of libraries that write files in the body into a
    `CheckpointError`.

    So are paths with a NUL character, which no system call accepts. A full disk is a
    `FullDiskError`.

    needed: bytes that the body writes, if known.
    """
    try:
        yield
    except OSError as error:
        named = error.filename if error.filename is not None else path
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno in _FULL:
            raise _full_disk(named, path, reason, needed, remedy=remedy) from error
        raise CheckpointError("checkpoint", os.fspath(named), reason, remedy) from error
    except MerakError:
        raise
    except Exception as error:
        if _number_of_rust(error) in _FULL:
            raise _full_disk(path, path, str(error), needed, remedy=remedy) from error
        if isinstance(error, SafetensorError):
            raise damaged(path, f"it is not a valid safetensors file ({error})") from error
        if not isinstance(error, ValueError) or "null byte" not in str(error):
            raise
        raise CheckpointError(
            "checkpoint", repr(os.fspath(path)), "a path cannot hold a NUL", remedy
        ) from error


def _full_disk(
    named: Path | str | bytes, path: Path, reason: str, needed: int | None, remedy: str
) -> FullDiskError:
    counts = [] if needed is None else [f"{needed:,} bytes are needed"]
    for directory in (path, *path.absolute().parents):
        with suppress(OSError):
            counts.append(f"{shutil.disk_usage(directory).free:,} bytes are free")
            break
    reason = f"{reason} ({', '.join(counts)})" if counts else reason
    return FullDiskError("checkpoint", os.fspath(named), reason, remedy)


def _number_of_rust(error: Exception) -> int | None:
    """Return the number of the system's error that a library written in Rust reports as text."""
    match = _OF_RUST.search(str(error))
    return None if match is None else int(match[1])


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file with ``tensors`` in this order; their values are not
    read.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end = end + tensor.nbytes
        code = DTYPE_CODES[tensor.dtype]
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[dict, dict]:
    """Write a safetensors file into a directory that is aside; needs the memory of one tensor.

    Its name is on the disk once its directory is synced, with those of all other files.

    Returns ({"bytes": size, "header": digest of length and header}, {name: digest of the tensor's
    bytes}).
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    start = header({name: tensors[name] for name in names}, metadata)
    digests = {}
    with written(aside_of(path)) as file:
        file.write(start)
        for name in names:
            data = as_bytes(tensors[name])
            digests[name] = digest_of(data)
            file.write(data)
    move(aside_of(path), path)
    size = len(start) + sum(tensor.nbytes for tensor in tensors.values())
    return {"bytes": size, "header": digest_of(start)}, digests


@contextmanager
def open_tensors(path: Path, size: int, save_id: str) -> Iterator[safe_open]:
    """Open a tensor file of exactly ``size`` bytes that belongs to the save ``save_id``; refuse
    others.
    """
    with disk_errors(path, _RESTORE):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            raise damaged(path, "it is missing") from None
        if not stat.S_ISREG(status.st_mode):
            raise damaged(path, "it is not a regular file (links are not followed)")
        if status.st_size != size:
            raise damaged(path, f"it has {status.st_size} bytes where {size} were written")
        # says why it cannot be opened, where safetensors says that it does not exist
        open(path, "rb").close()
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("save_id") != save_id:
                raise damaged(path, "it belongs to another save than the manifest beside it")
            yield file


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; needs no memory."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    as_stored = tensor.detach().permute(
        sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    )
    return all(bound.isfinite() for bound in as_stored.aminmax())


def verify_tensors(
    path: Path,
    written: Mapping,
    digests: Mapping[str, str],
    save_id: str,
    finite: Container[str] = (),
) -> None:
    """Read a tensor file and compare every byte with what `write_tensors` returned; errors name the
    tensor.

    finite: names of tensors in which a NaN or an infinity counts as damage.
    """
    with open_tensors(path, written["bytes"], save_id) as file:
        with open(path, "rb") as raw:
            start = raw.read(8)
            length = struct.unpack("<Q", start)[0]
            if length > LONGEST_HEADER:
                raise damaged(path, f"its header would have {length} bytes")
            start += raw.read(length)
        if not matches(start, written["header"]):
            raise damaged(path, "its header was changed after it was written")
        if sorted(file.keys()) != sorted(digests):
            raise damaged(path, "it holds other tensors than the manifest lists")
        for name, digest in digests.items():
            tensor = file.get_tensor(name)
            if not matches(as_bytes(tensor), digest):
                raise damaged(path, f"tensor {name} was changed after it was written")
            if name in finite and not is_finite(tensor):
                raise damaged(path, f"tensor {name} holds numbers that are not finite")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in row-major order as flat bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
