"""What is in a checkpoint, and what differs between two, as JSON."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from .inspected_run import inspected_run

if TYPE_CHECKING:
    from ..checkpoint.difference import KindDifference, TensorChange
    from ..checkpoint.found import FoundCheckpoint
    from ..checkpoint.values import TensorValues
    from .inspected_run import InspectedRun

Picked = Callable[[str, str], bool]


def facts_of(found: "FoundCheckpoint") -> dict[str, Any]:
    """Return what the manifest of a checkpoint says, JSON-safe."""
    run = inspected_run(found.manifest.meta)
    kinds = {kind: _kind(found, kind) for kind in found.manifest.tensors}
    others, faults = _others(found)
    return {
        "path": str(found.path),
        "iteration": found.manifest.iteration,
        "program": run.program or None,
        "model": run.model or None,
        "consumed_samples": run.samples,
        "epoch": run.epoch,
        "layout": _layout(run),
        "parameters": kinds.get("model", {}).get("elements", 0),
        "files": len(found.files),
        "bytes": sum(found.files.values()),
        "kinds": kinds,
        "others": others,
        "increments": _increments(found, faults),
        "faults": faults,
    }


def _layout(run: "InspectedRun") -> dict[str, Any] | None:
    if run.plan is None:
        return None
    grid = run.plan.grid
    degrees = {axis: getattr(grid, axis) for axis in ("tp", "cp", "pp", "dp")}
    return degrees | {"sharding": run.plan.sharding}


def _kind(found: "FoundCheckpoint", kind: str) -> dict[str, Any]:
    """Return the tensors of one kind, counted."""
    from ..checkpoint.files import DTYPE_NAMES

    entries = found.manifest.tensors[kind].values()
    elements = [math.prod(entry.shape) for entry in entries]
    sizes = [DTYPE_NAMES[entry.dtype].itemsize for entry in entries]
    return {
        "dtypes": sorted({entry.dtype for entry in entries}),
        "tensors": len(entries),
        "elements": sum(elements),
        "bytes": sum(map(math.prod, zip(elements, sizes, strict=True))),
    }


def _others(found: "FoundCheckpoint") -> tuple[list[dict[str, Any]], list[str]]:
    """Return the other checkpoints beside this one, and what is wrong with some."""
    from ..checkpoint.found import listed, number_of, size_of

    try:
        beside = listed(found.path.parent)
    except CheckpointError as fault:
        return [], [str(fault)]
    faults = [str(fault) for fault in beside.faults]
    others = []
    for path in beside.paths:
        if path.name == found.path.name:
            continue
        try:
            size = size_of(path)
        except CheckpointError as fault:
            if path.is_dir():  # a run may have removed it meanwhile
                faults.append(str(fault))
            continue
        others.append({"path": str(path), "iteration": number_of(path), "bytes": size})
    return others, faults


def _increments(found: "FoundCheckpoint", faults: list[str]) -> list[dict[str, Any]]:
    """Return the steps between checkpoints that each run has written, without a gap.

    faults: collects what is wrong with some.
    """
    from ..checkpoint.increments import Increments, read_increment, runs_of

    runs: list[dict[str, Any]] = []
    for directory in runs_of(found.path.parent):
        damaged: list[CheckpointError] = []
        complete = [*Increments(directory).newest_first(damaged)]
        faults += [str(fault) for fault in damaged]
        before: dict[str, Any] | None = None
        for path in reversed(complete):
            try:
                increment = read_increment(path)
            except CheckpointError as fault:
                if path.is_dir():  # a run may have renamed or removed it meanwhile
                    faults.append(str(fault))
                continue
            written = [file["bytes"] for file in increment.manifest.files.values()]
            if before is None or before["last"] + 1 != increment.first:
                before = {"path": str(directory), "first": increment.first, "bytes": 0}
                runs.append(before)
            before["last"] = increment.last
            before["bytes"] += sum(written)
    return sorted(runs, key=lambda each: (each["last"], each["path"]), reverse=True)


def tensors_of(found: "FoundCheckpoint", picked: Picked) -> list[dict[str, Any]]:
    """Return the tensors that are picked."""
    return [
        {
            "kind": kind,
            "name": name,
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "parts": len(entry.parts),
        }
        for kind, entries in found.manifest.tensors.items()
        for name, entry in entries.items()
        if picked(kind, name)
    ]


def health_of(found: "FoundCheckpoint", picked: Picked, most: int) -> dict[str, Any]:
    """Return what the values of each kind are like, and those of its most extreme tensors."""
    from ..checkpoint.values import joined, stored_values

    health = {}
    for kind, entries in found.manifest.tensors.items():
        names = [name for name in entries if picked(kind, name)]
        if not names:
            continue
        values = stored_values(found.tensors, found.manifest, kind, names)
        extreme = sorted(names, key=lambda name: values[name].extreme, reverse=True)
        health[kind] = _values(joined(values.values())) | {
            "tensors": [{"name": name} | _values(values[name]) for name in extreme[:most]]
        }
    return health


def _values(values: "TensorValues") -> dict[str, Any]:
    return {
        "nan": values.nan,
        "inf": values.infinite,
        "min": values.least,
        "max": values.most,
        "rms": values.rms,
    }


def difference_of(kind: "KindDifference", most: int) -> dict[str, Any]:
    """Return what differs between the tensors of one kind, with those that changed most."""
    return {
        "compared": len(kind.changes),
        "equal": kind.equal,
        "relative_change": kind.relative,
        "only_first": kind.only_first,
        "only_second": kind.only_second,
        "shapes": [
            {"name": name, "first": list(ours), "second": list(theirs)}
            for name, ours, theirs in kind.shapes
        ],
        "dtypes": [
            {"name": name, "first": ours, "second": theirs} for name, ours, theirs in kind.dtypes
        ],
        "most_changed": [_change(change) for change in kind.most(most)],
    }


def _change(change: "TensorChange") -> dict[str, Any]:
    return {
        "name": change.name,
        "relative_change": change.relative,
        "largest_difference": change.largest,
    }
