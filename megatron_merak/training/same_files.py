"""Files that settings name, of which every host may have its own copy."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from ..errors import ConfigError
from ..parallel.agree import gather_json, together


def check_same_files(paths: Mapping[str, str], control: dist.ProcessGroup | None) -> None:
    """Raise ConfigError on every rank unless all have files of the same content, or none.

    paths:   by the flag or argument that names them, the same on every rank.
    control: the group of all ranks; collective over it.
    """
    with together(control, "cpu"):
        digests = {name: _digest(Path(path)) for name, path in paths.items()}
    first, *others = gather_json(digests, control, "cpu")
    for rank, theirs in enumerate(others, 1):
        for name, digest in theirs.items():
            if digest != first[name]:
                absent = [
                    each for each, value in ((0, first[name]), (rank, digest)) if value is None
                ]
                reason = (
                    f"rank {absent[0]} finds no such file"
                    if absent
                    else f"rank {rank} finds another than rank 0"
                )
                raise ConfigError(name, paths[name], reason, "Provide the same file on all hosts")


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
