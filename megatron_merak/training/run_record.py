"""The record of a start in --run-dir: time, command, machine and versions of libraries."""

import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..arguments import changed
from ..parallel.launch import World
from ..plan import layout
from ..report.run_files import RunFiles
from .console import Throughput
from .trainer import Trainer

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def files_of(trainer: Trainer, world: World, work: Throughput) -> RunFiles | None:
    """Return the files of --run-dir, with this start recorded; None without the flag."""
    directory = trainer.config.logging.run_dir
    return (
        None
        if directory is None
        else RunFiles(directory, start_of(trainer, world, work), trainer.plan)
    )


def start_of(trainer: Trainer, world: World, work: Throughput) -> dict[str, Any]:
    """Return the facts of this start, JSON-safe. work: of a sample."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        "ranks": work.ranks,
        "layout": layout(trainer.plan),
        "planned_on": trainer.plan.cluster.device_names,
        "planned_samples": trainer.plan.global_batch_size,
        "predicted_seconds": trainer.plan.predicted_time,
        "step_factor": trainer.plan.cluster.devices[0].step_factor,
        "device": world.device.type,
        "device_name": device_name(world.device),
        "iterations": trainer.iterations,
        "work": asdict(work),
        "settings": {flag: list(pair) for flag, pair in changed(trainer.config).items()},
        "versions": dict(versions()),
    }


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def versions() -> Iterator[tuple[str, str]]:
    """Yield the versions of Python and of the libraries."""
    yield "megatron_merak", __version__
    yield "Python", platform.python_version()
    for name in _LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        yield "CUDA", torch.version.cuda
