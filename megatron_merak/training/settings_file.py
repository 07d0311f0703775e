"""The settings of a run, stored beside its checkpoints as a file for --config."""

from pathlib import Path

from ..checkpoint.files import disk_errors
from ..config import RunConfig
from ..config.file import text_of
from ..durable import replaced

NAME = "config.yaml"


def store_settings(config: RunConfig, directory: str) -> None:
    """Write ``config`` into a directory, atomically. Raises CheckpointError.

    config:    the settings of the run, as passed.
    directory: that of --save, which exists.
    """
    path = Path(directory) / NAME
    with (
        disk_errors(path, "Free space, or save to another directory"),
        replaced(path) as file,
    ):
        file.write(
            text_of(config.to_dict(), "The settings of a run; --config reads this file.").encode()
        )
