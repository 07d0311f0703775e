"""Saving: every rank writes what it owns into a fresh directory; the manifest, written last, makes
it a checkpoint.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_merak.checkpoint.directories import MANIFEST, seal
from megatron_merak.checkpoint.directory import Iterations, check_files
from megatron_merak.checkpoint.files import disk_errors, is_finite, write_tensors
from megatron_merak.checkpoint.manifest import (
    BUFFER,
    MODEL,
    Manifest,
    StoredPart,
    StoredTensor,
    check_entry,
    parse_manifest,
)
from megatron_merak.checkpoint.shard import Shard, StateKind, in_turns
from megatron_merak.durable import sync_directory
from megatron_merak.errors import CheckpointError, NumericsError
from megatron_merak.parallel.agree import broadcast_json, gather_json, together

SAVE_REMEDY = "Check --save, its permissions and its free space; earlier checkpoints are untouched"

_KIND = re.compile(r"[a-z][a-z0-9_]*")


def save(
    root: Path | str,
    iteration: int,
    shards: Mapping[str, StateKind | Sequence[Shard]],
    meta: dict,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> Path:
    """Write a checkpoint to ROOT/iter_<iteration> and return that path.

    shards: kind ("model", "master", "exp_avg", "exp_avg_sq") -> this rank's parts; over all ranks,
            those with ``owner`` tile each tensor exactly once.
    meta:   a JSON object; the first rank's is stored, with "iteration" added.

    A complete checkpoint of the same iteration is replaced once the new one is complete. On failure
    every rank raises `CheckpointError`, complete checkpoints stay, and the partial directory is
    removed. Numbers that are not finite raise `NumericsError` before anything is written;
    parameters without moments are not checked.
    """
    check_finite(shards, group, device)
    return write(root, iteration, shards, meta, group, device)


def write(
    root: Path | str,
    iteration: int,
    shards: Mapping[str, StateKind | Sequence[Shard]],
    meta: dict,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> Path:
    """Do what `save` does, without looking for numbers that are not finite."""
    assert iteration >= 0, iteration
    root = Path(root)
    rank = 0 if group is None else dist.get_rank(group)
    iterations = Iterations(root)
    names = iterations.names(iteration)
    fresh = names.fresh
    kinds = {name: StateKind.of(shards_of_kind) for name, shards_of_kind in shards.items()}
    own_shards = [part for kind in kinds.values() for part in kind.shards if part.is_written]
    needed = sum(gather_json(sum(part.tensor.nbytes for part in own_shards), group, device))
    with together(group, device), disk_errors(root, SAVE_REMEDY):
        if rank == 0:
            iterations.begin(iteration, needed)
    save_id = broadcast_json(secrets.token_hex(16), group, device)
    try:
        files: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {name: {} for name in kinds}
        metadata = {"format": "pt", "save_id": save_id, "iteration": str(iteration)}
        for name, number, turn in in_turns(kinds, group, device):
            with together(group, device), disk_errors(fresh, SAVE_REMEDY, needed):
                file = f"{name}-rank-{rank:05d}" + (
                    f"-{number:04d}" if len(kinds[name].turns) > 1 else ""
                )
                fresh.mkdir(parents=True, exist_ok=True)
                written, entries = write_file(
                    fresh, f"{file}.safetensors", name, turn.shards, metadata
                )
                assert not entries.keys() & tensors[name].keys(), (
                    f"{name}: this rank owns two parts of one tensor"
                )
                files |= written
                tensors[name] |= entries
        with together(group, device), disk_errors(fresh, SAVE_REMEDY, needed):
            sync_directory(fresh)
        reports = gather_json({"files": files, "tensors": tensors}, group, device)
        with together(group, device), disk_errors(fresh, SAVE_REMEDY, needed):
            if rank == 0:
                complete(fresh, iteration, save_id, reports, meta)
                iterations.publish(iteration)
    except Exception as error:
        if rank == 0:
            iterations.abandon(iteration, error)
        raise
    return names.plain


def check_finite(
    shards: Mapping[str, StateKind | Sequence[Shard]],
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> None:
    """Raise `NumericsError` on every rank if a trained parameter or its optimizer state is NaN or
    infinite.
    """
    kinds = {name: StateKind.of(each) for name, each in shards.items() if name != BUFFER}
    states = [kind for name, kind in kinds.items() if name != MODEL]
    trained = {part.name for kind in states for part in kind.shards} or None
    for name, _, turn in in_turns(kinds, group, device):
        with together(group, device):
            for part in turn.shards:
                if (trained is None or part.name in trained) and not is_finite(part.tensor):
                    remedy = (
                        "Resume from an earlier checkpoint with a lower learning rate; "
                        "nothing was written"
                    )
                    reason = (
                        "it has values that are not finite, and a checkpoint with them "
                        "would be useless"
                    )
                    raise NumericsError("tensor", f"{name}/{part.name}", reason, remedy)


def write_file(
    fresh: Path, file: str, kind: str, parts: Sequence[Shard], metadata: Mapping[str, str]
) -> tuple[dict, dict]:
    """Write a file of what this rank owns of one kind. Return JSON-safe entries of files and
    tensors, which `complete` takes.
    """
    assert _KIND.fullmatch(kind), kind
    parts = [part for part in parts if part.is_written]
    if not parts:
        return {}, {}
    tensors = {part.name: part.tensor for part in parts}
    assert len(tensors) == len(parts), f"{kind}: this rank owns two parts of one tensor"
    written, digests = write_tensors(fresh / file, tensors, {**metadata, "kind": kind})
    entries = {
        part.name: {
            "shape": part.shape,
            "dtype": str(part.tensor.dtype).removeprefix("torch."),
            "dim": part.dim,
            "file": file,
            "intervals": () if part.dim is None else part.intervals,
            "digest": digests[part.name],
            "slab": part.slab,
        }
        for part in parts
    }
    return {file: written}, entries


def complete(fresh: Path, iteration: int, save_id: str, reports: list[dict], meta: dict) -> None:
    """Write the manifest, which makes the directory complete.

    reports: of every rank, {"files", "tensors"} of all that `write_file` returned.
    """
    files = {name: written for report in reports for name, written in report["files"].items()}
    try:
        manifest = Manifest(
            iteration, save_id, files, _join(reports), meta={**meta, "iteration": iteration}
        )
        text = manifest.render()
    except (ValueError, TypeError) as error:
        remedy = "Give each part of a tensor one owner, and a meta that JSON can represent"
        raise CheckpointError("checkpoint", fresh, str(error), remedy) from error
    # what cannot be read back (two keys that JSON says alike) must not be published
    parse_manifest(text, fresh / MANIFEST)
    check_files(fresh, manifest)
    seal(fresh, text)


def _join(reports: list[dict]) -> dict[str, dict[str, StoredTensor]]:
    """Join the ranks' parts; raise `ValueError` if they disagree or do not tile a tensor."""
    tensors: dict[str, dict[str, StoredTensor]] = {}
    for report in reports:
        for kind, values in report["tensors"].items():
            entries = tensors.setdefault(kind, {})
            for name, value in values.items():
                slab = value["slab"] and tuple(value["slab"])
                part = StoredPart(value["file"], tuple(value["intervals"]), value["digest"], slab)
                described = (tuple(value["shape"]), value["dtype"], value["dim"])
                known = entries.get(name)
                if known is not None and (known.shape, known.dtype, known.dim) != described:
                    raise ValueError(f"the ranks disagree on shape, dtype or dim of {kind}/{name}")
                entries[name] = StoredTensor(*described, (*(known.parts if known else ()), part))
    for kind, entries in tensors.items():
        for name, entry in entries.items():
            check_entry(f"{kind}/{name}", entry)
    return tensors
