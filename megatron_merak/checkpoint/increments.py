"""Increments: what the steps behind a checkpoint consumed, so that they can be done again from the gradients alone.

    ROOT/increments_<run>/                 of one run, whose name is drawn when it begins
        steps_0000011/                     of some steps from 11 on; complete: its manifest is valid
            step_0000011-rank-00000.safetensors    what one rank has written of the gradient of step 11
        steps_0000016.new/                 being written

A step is a kind of tensors in the manifest of its directory. Its tensors are one-dimensional: the
elements of a parameter of one tensor-parallel rank, as they lie in memory there, so that ranks that
share them write an interval each. The meta says where tensors of HuggingFace are among these, so
that any layout can read them, and has a `StepRecord` of each step. What forwards change beside the
gradient, such as running statistics, is in a step as a whole. All functions are local to one rank.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_merak.checkpoint.directories import DirectoryNames
from megatron_merak.checkpoint.directory import TensorDirectories, read_manifest, verify
from megatron_merak.checkpoint.manifest import Manifest
from megatron_merak.checkpoint.shard import Intervals, Shard, Slab, overlaps
from megatron_merak.checkpoint.stored import read_stored
from megatron_merak.errors import CheckpointError, DamagedError

META = "increment"  # in the meta of a directory of steps
RUN = "increments"  # in the meta of a checkpoint: the run whose steps it is among

_RUN_DIRECTORY = re.compile(r"increments_([0-9a-f]{16})")
_DIRECTORY = re.compile(r"(steps_(\d{7,}))(\.new|\.old)?")
_REMEDY = "Load an earlier step with --ckpt-step"


@dataclass(frozen=True)
class StepRecord:
    """What an optimizer step was, beside its gradient, as JSON.

    iteration, consumed_samples, skipped_iterations, skipped_samples, optimizer_steps, loss_scale:
            those of a checkpoint behind the step.
    square: squared norm of the gradient of the whole model, with its scale; None: it was not
            finite, so that the step was skipped.
    scaled: the factor by which the gradient was scaled.
    rates:  learning rate and weight decay of each parameter group.
    """

    iteration: int
    consumed_samples: int
    skipped_iterations: int
    skipped_samples: int
    optimizer_steps: int
    loss_scale: Mapping[str, Any] | None
    square: float | None
    scaled: float
    rates: Sequence[Sequence[float]]

    def counters(self) -> dict[str, Any]:
        """Return what a checkpoint behind the step would say of it."""
        counters = dataclasses.asdict(self)
        for name in ("square", "scaled", "rates"):
            del counters[name]
        return counters


@dataclass(frozen=True)
class PlacedTensor:
    """A rank's part of a tensor, and where it is among the elements of the rank's parameter.

    name, shape, dim, intervals, slab: as of a `Shard`.
    sizes, strides, offset:            of the part in the elements, as of `torch.as_strided`.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    intervals: Intervals
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    slab: Slab | None = None

    @classmethod
    def of(cls, shard: Shard, start: int) -> "PlacedTensor":
        """Return where a shard is that is a view of a parameter's elements.

        start: the storage offset of these.
        """
        tensor = shard.tensor
        return cls(
            shard.name,
            tuple(shard.shape),
            shard.dim,
            tuple(shard.intervals),
            sizes=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()) - start,
            slab=shard.slab,
        )

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "PlacedTensor":
        """Return what `dataclasses.asdict` made JSON of. Raises KeyError and TypeError."""
        return cls(
            value["name"],
            tuple(value["shape"]),
            value["dim"],
            tuple((start, stop) for start, stop in value["intervals"]),
            sizes=tuple(value["sizes"]),
            strides=tuple(value["strides"]),
            offset=value["offset"],
            slab=value.get("slab") and tuple(value["slab"]),
        )


Layout = Mapping[str, Sequence[PlacedTensor]]  # by the name of a stored tensor


@dataclass(frozen=True)
class Increment:
    """A complete directory of steps.

    run:     that wrote it.
    base:    iteration and save_id of the checkpoint that the run began at.
    records: of its steps, which follow each other.
    layout:  where tensors are among the stored ones.
    """

    path: Path
    manifest: Manifest
    run: str
    base: tuple[int, str]
    records: tuple[StepRecord, ...]
    layout: Layout

    @property
    def first(self) -> int:
        return self.records[0].iteration

    @property
    def last(self) -> int:
        return self.records[-1].iteration

    def files(self, iteration: int) -> dict[str, dict[str, str]]:
        """Return the digests of a step's tensors by file; none for a skipped step."""
        kind = kind_of(iteration)
        return self.manifest.files_of([kind] if kind in self.manifest.tensors else [])


def kind_of(iteration: int) -> str:
    """Return the kind of a step's tensors."""
    return f"step_{iteration:07d}"


class Increments(TensorDirectories):
    """The directories of steps of one run, numbered by their first steps."""

    def names(self, number: int) -> DirectoryNames:
        plain = self.root / f"steps_{number:07d}"
        return DirectoryNames(plain, fresh=Path(f"{plain}.new"), old=Path(f"{plain}.old"))

    def number_of(self, directory: Path) -> int | None:
        return first_of(directory)

    def check(self, directory: Path, number: int) -> None:
        read_increment(directory)

    def numbers(self) -> list[int]:
        """Return the first steps of all directories, complete or not, in order."""
        return sorted(self._numbers())


def directory_of_run(root: Path, run: str) -> Path:
    return root / f"increments_{run}"


def run_of(directory: Path) -> str | None:
    """Return the run in the name of a directory; None for another name."""
    match = _RUN_DIRECTORY.fullmatch(directory.name)
    return match[1] if match else None


def first_of(directory: Path) -> int | None:
    """Return the first step in a directory's name; None for a name that no increment has."""
    match = _DIRECTORY.fullmatch(directory.name)
    return int(match[2]) if match else None


def runs_of(root: Path) -> list[Path]:
    """Return the directories of runs that have increments in a ROOT."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if run_of(path) is not None and path.is_dir())


def read_increment(directory: Path) -> Increment:
    """Return what a complete directory of steps says.

    Raises `DamagedError` if its manifest is absent or invalid, and `CheckpointError` if it cannot
    be read.
    """
    number = first_of(directory)
    _, manifest = read_manifest(directory, number)
    try:
        meta = manifest.meta[META]
        iteration, save_id = meta["base"]
        records = tuple(StepRecord(**record) for record in meta["steps"])
        layout = {
            name: tuple(map(PlacedTensor.read, placed)) for name, placed in meta["layout"].items()
        }
        increment = Increment(
            directory, manifest, meta["run"], (iteration, save_id), records=records, layout=layout
        )
        numbers = [record.iteration for record in records]
        if not numbers or numbers != [*range(increment.first, increment.last + 1)]:
            raise ValueError("its steps do not follow each other")
        if number != increment.first:
            raise ValueError(f"its first step is {increment.first}")
        for record in records:
            if record.square is not None and kind_of(record.iteration) not in manifest.tensors:
                raise ValueError(f"it has no gradient of step {record.iteration}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it does not describe steps: {error}"
        raise DamagedError("manifest", directory, reason, _REMEDY) from error
    return increment


def verify_increment(directory: Path) -> None:
    """Read every byte of a directory of steps and compare it with the manifest. Raises
    `DamagedError`.
    """
    read_increment(directory)
    verify(directory, first_of(directory))


def read_gradient(increment: Increment, iteration: int, wanted: Sequence[Shard]) -> None:
    """Fill shards of the gradient's tensors with that of a step.

    Needs the memory of one parameter. Raises `DamagedError` for files that are not those of the
    manifest, whose bytes are not compared with digests, and `CheckpointError` for tensors that were
    not trained.
    """
    kind = kind_of(iteration)
    shards: dict[str, list[Shard]] = {}
    for shard in wanted:
        shards.setdefault(shard.name, []).append(shard)
    left = {id(shard): shard.tensor.numel() for shard in wanted}
    for key in increment.manifest.tensors[kind]:
        pairs = [
            (placed, shard)
            for placed in increment.layout.get(key, ())
            for shard in shards.get(placed.name, ())
            if _overlap(placed, shard)
        ]
        if not pairs:
            continue
        elements = read_stored(increment.path, increment.manifest, kind, key)
        for placed, shard in pairs:
            source = elements.as_strided(placed.sizes, placed.strides, placed.offset)
            for take, put in _overlaps(placed, shard):
                view = shard.tensor[put]
                view.copy_(source[take])
                left[id(shard)] -= view.numel()
    absent = next((shard.name for shard in wanted if left[id(shard)]), None)
    if absent is not None:
        reason = f"its steps did not train all of {absent}, which this run trains"
        remedy = "Load it into the model that saved it, or a whole checkpoint with --ckpt-step"
        raise CheckpointError("increment", increment.path, reason, remedy)


def _overlaps(placed: PlacedTensor, shard: Shard):
    if 0 in placed.shape:
        return ()
    return overlaps(placed.shape, (placed.dim, placed.intervals, placed.slab), shard.part)


def _overlap(placed: PlacedTensor, shard: Shard) -> bool:
    same = placed.shape == tuple(shard.shape)
    return same and any(True for _ in _overlaps(placed, shard))
