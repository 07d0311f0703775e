"""A checkpoint by any path that leads to it: its own directory, or one that has several.

    ROOT/iter_0000010/                                   of the training commands and of Engine
    ROOT/checkpoint-10/training_state/iter_0000010/      of MerakTrainer, beside files of transformers

Nothing is changed, and no tensor is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_merak.checkpoint import unit
from megatron_merak.checkpoint.directories import Directories
from megatron_merak.checkpoint.directory import Iterations, iteration_of, read_manifest
from megatron_merak.checkpoint.foreign import foreign
from megatron_merak.checkpoint.manifest import NAME, Manifest
from megatron_merak.checkpoint.unit_directories import Units, step_of
from megatron_merak.errors import CheckpointError, ConfigError

DIRECTORY = "DIRECTORY"  # the argument of commands that read a checkpoint
REMEDY = (
    "Give a --save directory, an output_dir of MerakTrainer, or a checkpoint in one of these "
    "(iter_N or checkpoint-N)"
)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint.

    path:     its own directory, ``iter_N`` or ``checkpoint-N``.
    tensors:  the ``iter_N`` that has its tensors, ``path`` or below it.
    manifest: that of ``tensors``.
    files:    size in bytes of each file, by its path in ``path``.
    """

    path: Path
    tensors: Path
    manifest: Manifest
    files: dict[str, int]


@dataclass(frozen=True)
class Listed:
    """The complete checkpoints of a directory.

    paths:  newest first.
    faults: what is wrong with others.
    """

    paths: list[Path] = field(default_factory=list)
    faults: list[CheckpointError] = field(default_factory=list)


def check_directory(path: Path, what: str = DIRECTORY) -> None:
    """Raise CheckpointError unless ``path`` is a directory that is there.

    what: the flag or argument that names it.
    """
    if path.is_dir():
        return
    reason = "it is not a directory" if path.exists() else "there is no such directory"
    raise CheckpointError(what, path, reason, REMEDY)


def is_checkpoint(path: Path) -> bool:
    """Whether a path has the name of a checkpoint."""
    return iteration_of(path) >= 0 or step_of(path) is not None


def listed(root: Path) -> Listed:
    """Return the checkpoints of both kinds in a directory. Raises CheckpointError if it cannot be
    read.
    """
    found = Listed()
    kinds: tuple[Directories, ...] = (Iterations(root), Units(root))
    for kind in kinds:
        found.paths.extend(kind.newest_first(found.faults))
    found.paths.sort(key=number_of, reverse=True)
    return found


def number_of(path: Path) -> int:
    """Return the iteration or step in the name of a checkpoint."""
    step = step_of(path)
    return iteration_of(path) if step is None else step


def find(path: Path, iteration: int | None = None, what: str = DIRECTORY) -> FoundCheckpoint:
    """Return the checkpoint that a path names.

    path:      of a checkpoint, or of a directory that has some.
    iteration: which of these; None: the newest.
    what:      the flag or argument that names the path.

    Raises CheckpointError, and ConfigError for an iteration beside the path of another one.
    """
    check_directory(path, what)
    named = path if path.name else path.absolute()
    if not is_checkpoint(named):
        return opened(_chosen(path, iteration, what))
    if iteration not in (None, number_of(named)):
        reason = f"{path} is a single checkpoint"
        raise ConfigError("--ckpt-step", iteration, reason, "Leave it out")
    return opened(named)


def opened(path: Path) -> FoundCheckpoint:
    """Return what a checkpoint's own directory has. Raises CheckpointError if it is not complete,
    or has no training state.
    """
    if iteration_of(path) >= 0:
        manifest = read_manifest(path)[1]
        return FoundCheckpoint(path, path, manifest, _sizes(path, _bytes_of(manifest)))
    whole = unit.read(path, step_of(path))
    state = next(_states(whole), None)
    if state is None:
        reason = "it has the weights of a model, and no training state"
        remedy = "Open it with from_pretrained(), or give a checkpoint with training state"
        raise CheckpointError("checkpoint", path, reason, remedy)
    tensors = path / state
    sizes = _sizes(path, {name: file["bytes"] for name, file in whole.files.items()})
    return FoundCheckpoint(path, tensors, read_manifest(tensors)[1], sizes)


def size_of(path: Path) -> int:
    """Return the bytes of all files of a checkpoint. Raises CheckpointError."""
    if iteration_of(path) >= 0:
        return sum(_sizes(path, _bytes_of(read_manifest(path)[1])).values())
    files = unit.read(path, step_of(path)).files
    return sum(_sizes(path, {name: file["bytes"] for name, file in files.items()}).values())


def _chosen(root: Path, iteration: int | None, what: str) -> Path:
    found = listed(root)
    for path in found.paths:
        if iteration in (None, number_of(path)):
            return path
    if found.paths:
        known = ", ".join(str(number_of(path)) for path in found.paths)
        remedy = "Give one of these, or leave it out"
        raise CheckpointError("--ckpt-step", iteration, f"{root} has {known}", remedy)
    other = foreign(root, what)
    if other is not None:
        raise other
    if found.faults:
        raise found.faults[0]
    if (root / "config.json").is_file() or any(root.glob("*.safetensors")):
        reason = "it is a HuggingFace directory, and has no checkpoint of megatron_merak"
        remedy = "Open it with from_pretrained(), or convert it with merak-convert first"
        raise CheckpointError(what, root, reason, remedy)
    raise CheckpointError(what, root, "it has no complete checkpoint", REMEDY)


def _states(whole: unit.UnitManifest) -> Iterator[str]:
    """Yield the directories of the training states in a unit."""
    for file in whole.files.values():
        beside = Path(file.get(unit.SEALED_BY, NAME)).parent
        if iteration_of(beside) >= 0:
            yield beside.as_posix()


def _bytes_of(manifest: Manifest) -> dict[str, int]:
    return {name: file["bytes"] for name, file in manifest.files.items()}


def _sizes(path: Path, files: dict[str, int]) -> dict[str, int]:
    """Return the sizes of files with that of the manifest, which does not list itself."""
    return files | {NAME: (path / NAME).stat().st_size}
