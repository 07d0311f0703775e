"""A directory of any files that is one unit: complete once it has the manifest over all of them, written last.

    checkpoint-500/manifest.json     the size of every other file and its digest; sealed by its own digest
    checkpoint-500/config.json ...   the files that existed when the manifest was written

The tensor files of a training state inside have a digest per tensor in their own manifest, which is a file of the unit:
they are not hashed again. Files that were added later belong to others: they are neither verified nor removed. All
functions here are local to one rank.
"""

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron_merak.checkpoint import directories
from megatron_merak.checkpoint.digests import checked, digest_of_file, file_matches
from megatron_merak.checkpoint.directory import read_manifest
from megatron_merak.checkpoint.files import disk_errors, verify_tensors
from megatron_merak.checkpoint.manifest import FILE_NAME, NAME
from megatron_merak.checkpoint.sealed import OtherVersionError, seal, unseal
from megatron_merak.durable import sync, sync_folders
from megatron_merak.errors import CheckpointError, DamagedError

FORMAT = "megatron_merak directory"
VERSION = 2
READABLE = (1, VERSION)  # version 1 has SHA-256 in place of named digests
# of a file: the manifest beside it that has a digest of each of its tensors
SEALED_BY = "digests in"

_LARGEST_MANIFEST = 1 << 28  # bytes
_REMEDY = "Use another checkpoint, or restore this one from a copy"


@dataclass(frozen=True)
class UnitManifest:
    """A complete unit.

    files: path relative to the directory -> {"bytes": size, "digest": text or "digests in": manifest}.
    """

    step: int
    save_id: str
    files: Mapping[str, Mapping]


def complete(directory: Path, step: int, known: Mapping[str, str]) -> None:
    """Write the manifest over all files of ``directory``, which makes it a unit; all of it is on
    the disk then.

    known: digests by path, of files that were hashed when written.

    Raises `CheckpointError` for anything but regular files.
    """
    files = {}
    for path in sorted(_walk(directory)):
        name = path.relative_to(directory).as_posix()
        if not path.is_file() or path.is_symlink() or name == NAME:
            reason = "it is not a regular file, or has the name of the manifest"
            raise CheckpointError("checkpoint", path, reason, "Write other files in save_model")
        if FILE_NAME.fullmatch(path.name) and (path.parent / NAME).is_file():
            beside = (path.parent / NAME).relative_to(directory).as_posix()
            files[name] = {"bytes": path.stat().st_size, SEALED_BY: beside}
        else:
            files[name] = {
                "bytes": path.stat().st_size,
                "digest": _hash_and_sync(path, known.get(name)),
            }
    sync_folders(directory)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "save_id": secrets.token_hex(16),
        "files": files,
    }
    directories.seal(directory, seal(document))


def parse(path: Path) -> UnitManifest:
    """Read and check a manifest file alone. Raises `CheckpointError` if anything in it is
    invalid.
    """
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_MANIFEST:
            raise ValueError(f"it is not a regular file of at most {_LARGEST_MANIFEST} bytes")
        document = unseal(path.read_bytes(), FORMAT, READABLE)
        files = {_path(name): _file(written) for name, written in document["files"].items()}
        if any(each.get(SEALED_BY, NAME) not in {*files, NAME} for each in files.values()):
            raise ValueError("a file has its digests in a manifest that is not listed")
        return UnitManifest(_size(document["step"]), str(document["save_id"]), files)
    except FileNotFoundError as error:
        reason = (
            f"it has no {path.name}: its save was interrupted, or another program or "
            "version wrote it"
        )
        remedy = (
            "Use another checkpoint, or start a new run from its weights: "
            "from_pretrained(directory)"
        )
        raise DamagedError("checkpoint", path.parent, reason, remedy) from error
    except OSError as error:
        raise CheckpointError("manifest", path, error.strerror or str(error), _REMEDY) from error
    except KeyError as error:
        raise DamagedError("manifest", path, f"it has no {error}", _REMEDY) from error
    except OtherVersionError as error:
        remedy = "Read it with the version of megatron_merak that wrote it"
        raise CheckpointError("manifest", path, str(error), remedy) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError("manifest", path, str(error), _REMEDY) from error


def read(directory: Path, step: int | None = None) -> UnitManifest:
    """Return the manifest, if every file of it exists with its full size. Raises `CheckpointError`
    if not.

    step: that of the directory's name, if any.
    """
    unit = parse(directory / NAME)
    if step is not None and unit.step != step:
        raise DamagedError("manifest", directory / NAME, f"it belongs to step {unit.step}", _REMEDY)
    for path, written in unit.files.items():
        try:
            status = os.lstat(directory / path)
        except OSError as error:
            kind = (
                DamagedError
                if isinstance(error, FileNotFoundError | NotADirectoryError)
                else CheckpointError
            )
            raise kind(
                "checkpoint file", directory / path, error.strerror or str(error), _REMEDY
            ) from error
        if not stat.S_ISREG(status.st_mode):
            reason = "it is not a regular file (links are not followed)"
            raise DamagedError("checkpoint file", directory / path, reason, _REMEDY)
        if status.st_size != written["bytes"]:
            reason = f"it has {status.st_size} bytes but {written['bytes']} were written"
            raise DamagedError("checkpoint file", directory / path, reason, _REMEDY)
    return unit


def verify(directory: Path, unit: UnitManifest, part: int = 0, parts: int = 1) -> None:
    """Compare every byte of each ``parts``-th file with its digest. Raises `DamagedError` naming
    file and tensor.
    """
    for name in sorted(unit.files)[part::parts]:
        path = directory / name
        written = unit.files[name]
        with disk_errors(path, _REMEDY):
            if SEALED_BY in written:
                _verify_tensors(directory / written[SEALED_BY], path.name)
            elif not file_matches(path, written["digest"]):
                raise DamagedError(
                    "checkpoint file", path, "it was changed after it was written", _REMEDY
                )


def foreign(directory: Path, unit: UnitManifest, *ours: str) -> list[str]:
    """Return the files in ``directory`` that are neither the unit's nor have one of the names
    ``ours``.

    On a network file system, a file that is removed while open stays as .nfs... for a while; it is
    ignored.
    """
    names = (
        path.relative_to(directory).as_posix()
        for path in _walk(directory)
        if not path.name.startswith(".nfs")
    )
    return sorted(name for name in names if name not in unit.files and name not in ours)


def _walk(directory: Path) -> list[Path]:
    """Return everything below that is no directory, including links to directories."""
    paths = []
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        paths += [Path(folder, name) for name in (*names, *links)]
    return paths


def _hash_and_sync(path: Path, known: str | None) -> str:
    with open(path, "rb") as file:
        digest = digest_of_file(file) if known is None else known
        sync(file)
    return digest


def _verify_tensors(beside: Path, name: str) -> None:
    _, manifest = read_manifest(beside.parent)
    if name not in manifest.files:
        raise DamagedError(
            "checkpoint file", beside.parent / name, f"{beside} does not list it", _REMEDY
        )
    digests = manifest.files_of(sorted(manifest.tensors))[name]
    verify_tensors(beside.parent / name, manifest.files[name], digests, manifest.save_id)


def _path(name: object) -> str:
    """Return a path that stays inside the directory."""
    if (
        isinstance(name, str)
        and name
        and "\0" not in name
        and PurePosixPath(name).as_posix() == name
    ):
        if not name.startswith("/") and ".." not in name.split("/") and name != NAME:
            return name
    raise ValueError(f"{name!r} is not the path of a file in this directory")


def _file(value: dict) -> dict:
    entry = {"bytes": _size(value["bytes"])}
    if SEALED_BY in value:
        if not isinstance(value[SEALED_BY], str):
            raise ValueError(f"{value[SEALED_BY]!r} stands where a path belongs")
        return entry | {SEALED_BY: value[SEALED_BY]}
    return entry | {"digest": checked(value["digest"] if "digest" in value else value["sha256"])}


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r} stands where a size or a step belongs")
    return value
