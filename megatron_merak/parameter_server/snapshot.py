"""A server's pieces on disk, for the server that replaces it: one file each, replaced
atomically.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..durable import make_directory, rename, sync_file
from ..errors import CheckpointError
from .layout import PieceLayout
from .piece import KINDS, ServedPiece


def snapshot_path(directory: Path, server: int, place: int) -> Path:
    """Return the file of a snapshot.

    server: the rank that serves.
    place:  of the workers' ranks whose parameters it has a piece of.
    """
    return directory / f"server-{server}-place-{place}.safetensors"


def write_snapshot(path: Path, piece: ServedPiece, sequences: dict[int, int], job: str) -> None:
    """Write a snapshot.

    sequences: per worker, the number of its last gradient that is in the piece.
    job:       identifies the job.

    Raises CheckpointError; an earlier file then stays.
    """
    words = {
        "job": job,
        "version": piece.version,
        "steps": piece.steps,
        "sequences": list(sequences.items()),
    }
    metadata = {"layout": piece.layout.to_json(), "state": json.dumps(words)}
    partial = path.with_suffix(".partial")
    try:
        make_directory(path.parent)
        save_file(piece.state, partial, metadata)
        sync_file(partial)
        rename(partial, path)
    except (OSError, SafetensorError) as error:
        remedy = "Make room, or name another directory with --save"
        raise CheckpointError(
            "parameter server's snapshot", path, f"it cannot be written: {error}", remedy
        ) from error


def read_snapshot(path: Path, layout: PieceLayout, job: str) -> tuple[ServedPiece, dict[int, int]]:
    """Return the arguments of `write_snapshot`. Raises CheckpointError for a damaged file or
    another job's.
    """
    piece = ServedPiece(layout)
    remedy = "Start the job again from its last checkpoint"
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            words = json.loads(metadata["state"])
            if words["job"] != job or PieceLayout.from_json(metadata["layout"]) != layout:
                reason = "it is one of another job, and this one has none yet"
                raise CheckpointError("parameter server's snapshot", path, reason, remedy)
            for kind in KINDS:
                piece.state[kind].copy_(file.get_tensor(kind))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            "parameter server's snapshot", path, f"it cannot be read: {error}", remedy
        ) from error
    piece.version = words["version"]
    piece.steps = words["steps"]
    piece.refresh()
    return piece, {int(worker): sequence for worker, sequence in words["sequences"]}
