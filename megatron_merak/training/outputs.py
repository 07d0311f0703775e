"""Check the places that a run writes to before it starts: a path that fails after hours of training
wastes them.
"""

import tempfile
from pathlib import Path

from ..config import HFCheckpointConfig, RunConfig
from ..errors import ConfigError
from ..pipeline_parallel.pictures.files import check_suffix
from ..pipeline_parallel.pictures.library import check_drawing
from ..report.run_files import starts_before
from .trackers.chosen import check_trackers

_DRAWN = (".png", ".pdf", ".svg")  # what matplotlib draws by itself


def check_directory(flag: str, value: str, directory: Path, what: str = "it") -> None:
    """Create ``directory`` and write into it. Raises ConfigError.

    flag, value: named in the error.
    what:        the directory in the error, if it is not ``value``.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0")
    except (OSError, ValueError) as error:  # a ValueError: a path with a NUL
        reason = f"{what} cannot be written ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(
            flag, value, reason, "Name a path in a writable directory with free space"
        ) from error


def check_file(flag: str, value: str) -> None:
    """Check the place of a file that a run will write. Raises ConfigError."""
    if Path(value).is_dir():
        raise ConfigError(flag, value, "it is a directory", "Name a file")
    check_directory(flag, value, Path(value).parent)


def check_outputs(config: RunConfig, reports: bool) -> None:
    """Check what this rank writes: checkpoints, and if it ``reports``, logs and pictures. Raises
    ConfigError.
    """
    if config.checkpoint.save is not None:
        check_directory("--save", config.checkpoint.save, Path(config.checkpoint.save))
    if isinstance(config.checkpoint, HFCheckpointConfig) and config.checkpoint.save_hf is not None:
        check_directory("--save-hf", config.checkpoint.save_hf, Path(config.checkpoint.save_hf))
    if not reports:
        return
    logging = config.logging
    if "tensorboard" in logging.report_to and logging.tensorboard_dir is None:
        remedy = "Give --tensorboard-dir"
        raise ConfigError("--report-to", "tensorboard", "it has no directory", remedy)
    check_trackers(logging)
    if logging.tensorboard_dir is not None:
        check_directory("--tensorboard-dir", logging.tensorboard_dir, Path(logging.tensorboard_dir))
    if logging.run_dir is not None:
        check_directory("--run-dir", logging.run_dir, Path(logging.run_dir))
        starts_before(logging.run_dir)
    for flag, value in (
        ("--metrics", logging.metrics),
        ("--timeline", logging.timeline),
        ("--curve", logging.curve),
    ):
        if value is not None:
            check_file(flag, value)
    if logging.timeline is not None:
        check_suffix("--timeline", logging.timeline)
    if logging.curve is not None:
        check_drawing("--curve", logging.curve)
        if Path(logging.curve).suffix.lower() not in _DRAWN:
            reason = f"its suffix is none of {', '.join(_DRAWN)}"
            raise ConfigError("--curve", logging.curve, reason, "Name a .png")
