"""Loading: each shard reads its overlap with the saved parts, so that any layout can read any
other.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_merak.checkpoint.directory import (
    Iterations,
    directory_of,
    iteration_of,
    read_manifest,
)
from megatron_merak.checkpoint.files import (
    DTYPE_CODES,
    DTYPE_NAMES,
    damaged,
    disk_errors,
    open_tensors,
    verify_tensors,
)
from megatron_merak.checkpoint.manifest import (
    NAME,
    Manifest,
    StoredPart,
    StoredTensor,
    parse_manifest,
    stored_shape,
)
from megatron_merak.checkpoint.shard import Shard, Slices, StateKind, in_turns, overlaps
from megatron_merak.errors import CheckpointError, DamagedError
from megatron_merak.parallel.agree import broadcast_json, gather_json, together

# kinds that may be loaded with another dtype than they were saved with, and those dtypes
_WIDTHS = ("float32", "bfloat16")
CASTABLE: Mapping[str, Collection[str]] = {
    "model": DTYPE_NAMES,
    "exp_avg": _WIDTHS,
    "exp_avg_sq": _WIDTHS,
}

_REMEDY = "Check --load and --ckpt-step"
_RESTORE = "Restore one from a copy"
_NAMED = 5  # tensors named in one message
# name, what was saved, slices of it, the view it goes into
_Copy = tuple[str, StoredTensor, StoredPart, Slices, torch.Tensor]


def load(
    root: Path | str,
    shards: Mapping[str, StateKind | Sequence[Shard]],
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    iteration: int | None = None,
    verify: bool = True,
    say: Callable[[str], object] | None = None,
    check: Callable[[dict], object] | None = None,
) -> dict:
    """Copy a checkpoint into the tensors of ``shards`` and return its meta, which has "iteration".

    iteration: None: the newest complete checkpoint that the first rank sees, or if it is damaged,
               the one before it.
    say:       called on every rank with a sentence for each one skipped; None: the first rank logs
               a warning.
    verify:    compare every byte of the files read with its digest, each file on one rank.
    check:     called with the meta on every rank before anything else; may raise.

    Kinds that no rank requests are not read; of the others, the ranks together must request exactly
    the saved tensors. Those of ``CASTABLE`` kinds may change between some dtypes.

    Raises `CheckpointError` on every rank; `DamagedError` if no checkpoint, or not the requested
    one, is undamaged. Everything but a read failure while copying is detected before the first
    tensor is changed.
    """
    root = Path(root)
    first = group is None or dist.get_rank(group) == 0
    kinds = {name: StateKind.of(shards_of_kind) for name, shards_of_kind in shards.items()}
    messages: list[str] = []
    faults: list[CheckpointError] = []
    candidates = _candidates(root, iteration, faults)
    while True:
        candidate = None
        with together(group, device), disk_errors(root, _REMEDY):
            if first:
                candidate = next(candidates, None)
        candidate, seen = broadcast_json(
            (candidate, [fault.fault for fault in faults]), group, device
        )
        faults.clear()
        messages += seen
        if candidate is None:
            break
        try:
            manifest = parse_manifest(candidate[1].encode(), root / candidate[0] / NAME)
            with together(group, device):
                if check is not None:
                    check(dict(manifest.meta))
            _load(root / candidate[0], manifest, kinds, group, device=device, verify=verify)
        except DamagedError as error:
            if iteration is not None:
                raise
            messages.append(error.fault)
        else:
            _tell(messages, manifest.iteration, say, first)
            return dict(manifest.meta)
    if messages:
        reason = f"all of its checkpoints are damaged: {messages[0]}"
        raise DamagedError("checkpoint directory", root, reason, _RESTORE)
    raise CheckpointError("checkpoint directory", root, "it has no complete checkpoint", _REMEDY)


def _tell(
    messages: Sequence[str], loaded: int, say: Callable[[str], object] | None, first: bool
) -> None:
    for text in messages:
        text = f"A damaged checkpoint was passed over, and iteration {loaded} was loaded. {text}."
        if say is not None:
            say(text)
        elif first:
            logging.getLogger(__name__).warning("%s", text)


def _load(
    source: Path,
    manifest: Manifest,
    kinds: Mapping[str, StateKind],
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    verify: bool,
) -> None:
    shards = {name: kind.shards for name, kind in kinds.items()}
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    with together(group, device):
        _check_known(source, manifest, shards)
    needed = _check_complete(source, manifest, shards, group, device)
    if verify:
        files = manifest.files_of(needed)
        with together(group, device):
            for file in sorted(files)[rank::world]:
                verify_tensors(source / file, manifest.files[file], files[file], manifest.save_id)
    casts = 0
    for name, _, turn in in_turns(kinds, group, device):
        with together(group, device):
            casts += copy_parts(source, manifest, {name: turn.shards})
            turn.keep()
    counts = gather_json(casts, group, device)
    # the first rank may have none of these tensors
    if rank == next((other for other, count in enumerate(counts) if count), None):
        logging.getLogger(__name__).warning(
            "%s: %d tensors changed dtype while they were loaded", source, casts
        )


def _candidates(
    root: Path, iteration: int | None, faults: list[CheckpointError]
) -> Iterator[tuple[str, str]]:
    """Yield name and manifest of the directories to try. ``faults``: see
    `Iterations.candidates`.
    """
    iterations = Iterations(root)
    requested = [] if iteration is None else [requested_directory(iterations, iteration)]
    for directory in requested or iterations.candidates(faults):
        yield directory.name, read_manifest(directory)[0].decode()


def requested_directory(iterations: Iterations, iteration: int) -> Path:
    """Return the complete checkpoint of an iteration. Raises `CheckpointError` if there is none."""
    directory = iterations.locate(iteration)
    if directory is None:
        root = iterations.root
        if directory_of(root, iteration).is_dir():
            read_manifest(directory_of(root, iteration))  # raises, and says what is wrong with it
        others = map(iteration_of, iterations.newest_first())
        complete = ", ".join(map(str, others)) or "none"
        reason = (
            f"it has no complete checkpoint of iteration {iteration} (complete are: {complete})"
        )
        raise CheckpointError("checkpoint directory", root, reason, _REMEDY)
    return directory


def _check_known(source: Path, manifest: Manifest, shards: Mapping[str, Sequence[Shard]]) -> None:
    """Raise unless every requested part is of a saved tensor of the same shape, and dtype if it
    cannot be cast.
    """
    for kind, parts in shards.items():
        if kind not in manifest.tensors:
            reason = f"it has no {kind} state, only {', '.join(manifest.tensors)}"
            remedy = "Start with new optimizer state by --no-load-optim, or load another checkpoint"
            raise CheckpointError("checkpoint", source, reason, remedy)
        for part in parts:
            entry = manifest.tensors[kind].get(part.name)
            wanted = str(part.tensor.dtype).removeprefix("torch.")
            problem = ""
            if entry is None:
                problem = "it is missing"
            elif entry.shape != tuple(part.shape):
                problem = (
                    f"it was saved with shape {entry.shape}, and the model has {tuple(part.shape)}"
                )
            elif entry.dtype != wanted and not {entry.dtype, wanted} <= {*CASTABLE.get(kind, ())}:
                problem = f"it was saved as {entry.dtype}, and {part.tensor.dtype} is wanted"
            if problem:
                reason = f"tensor {kind}/{part.name}: {problem}"
                raise CheckpointError(
                    "checkpoint", source, reason, "Load it into the model that saved it"
                )


def _check_complete(
    source: Path,
    manifest: Manifest,
    shards: Mapping[str, Sequence[Shard]],
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> list[str]:
    """Return the kinds that any rank requests; raise on every rank if a saved tensor of these is
    requested by none.
    """
    names = {kind: sorted(manifest.tensors[kind]) for kind in shards}
    masks = {}
    for kind, parts in shards.items():
        place = {name: index for index, name in enumerate(names[kind])}
        mask = 0
        for part in parts:
            mask |= 1 << place[part.name]
        masks[kind] = f"{mask:x}"
    needed: dict[str, int] = {}
    for theirs in gather_json(masks, group, device):
        for kind, mask in theirs.items():
            needed[kind] = needed.get(kind, 0) | int(mask, 16)
    for kind, mask in needed.items():
        extra = [
            name
            for index, name in enumerate(sorted(manifest.tensors[kind]))
            if not mask >> index & 1
        ]
        if extra:
            named = ", ".join(extra[:_NAMED]) + (
                f" and {len(extra) - _NAMED} more" if len(extra) > _NAMED else ""
            )
            reason = f"it has {kind} tensors that the model does not have: {named}"
            raise CheckpointError(
                "checkpoint", source, reason, "Load it into the model that saved it"
            )
    return sorted(needed)


def copy_parts(source: Path, manifest: Manifest, shards: Mapping[str, Sequence[Shard]]) -> int:
    """Fill the tensors of ``shards``. Return how many changed their dtype."""
    copies: dict[str, list[_Copy]] = {}
    casts = 0
    for kind, parts in shards.items():
        for part in parts:
            entry = manifest.tensors[kind][part.name]
            casts += DTYPE_NAMES[entry.dtype] != part.tensor.dtype
            for saved in entry.parts if 0 not in entry.shape else ():
                held = (entry.dim, saved.intervals, saved.slab)
                for take, put in overlaps(entry.shape, held, part.part):
                    view = part.tensor.detach()[put]
                    copies.setdefault(saved.file, []).append((part.name, entry, saved, take, view))
    for name in sorted(copies):
        _copy_from(source / name, manifest.files[name]["bytes"], manifest.save_id, copies[name])
    return casts


def _copy_from(path: Path, size: int, save_id: str, copies: list[_Copy]) -> None:
    with open_tensors(path, size, save_id) as file:
        names = set(file.keys())
        for name, entry, part, take, view in copies:
            if name not in names:
                raise damaged(path, f"tensor {name} is missing")
            stored = file.get_slice(name)
            want = (list(stored_shape(entry, part)), DTYPE_CODES[DTYPE_NAMES[entry.dtype]])
            if (stored.get_shape(), stored.get_dtype()) != want:
                raise damaged(
                    path, f"tensor {name} has another shape or dtype than the manifest says"
                )
            view.copy_(stored[take] if take else file.get_tensor(name))
