"""The files that Megatron-LM's ranks wrote (--ckpt-format torch): all of one save, and what is in each."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.foreign import RANK_FILE, RANKS
from ..errors import CheckpointError, DamagedError
from .megatron_rank_names import core_name, flattened, is_old, layers_in
from .megatron_ranks import RankGrid, RankPlace, numbers_of
from .pickles import REMEDY
from .torch_file import TensorOnDisk, TorchFile

_ORDERED = 2.0  # checkpoint_version since which rows of queries, keys and values are as today
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_EXPERT_SIZE = "expert_tensor_parallel_size"
_OTHERS = "Remove those of other runs"


@dataclass(frozen=True)
class RankFile:
    """What one rank has.

    path:          of the file.
    chunks:        the weights of each of its virtual stages, under megatron-core's names.
    args:          of the run, if it says them.
    iteration:     of the run.
    has_optimizer: whether there is an optimizer's state.
    """

    path: Path
    chunks: Sequence[Mapping[str, TensorOnDisk]]
    args: Namespace | None
    iteration: int
    has_optimizer: bool


def read_ranks(
    path: Path, has_experts: bool, layers: int
) -> tuple[RankGrid, dict[RankPlace, RankFile]]:
    """Return how many ranks there are along each axis, and the file of each.

    path:        the directory of the checkpoint.
    has_experts: whether the model has any.
    layers:      of the model.

    Raises CheckpointError for files that are missing, damaged, or of different saves.
    """
    names = sorted(each.parent.name for each in path.glob(f"{RANKS}/{RANK_FILE}"))
    numbers = [numbers_of(name) for name in names]
    if not all(numbers) or len({len(each) for each in numbers}) > 1:
        reason = f"the names of its directories differ: {names[0]} and {names[-1]}"
        raise CheckpointError("checkpoint", path, reason, _OTHERS)
    files = [_read(path / name / RANK_FILE) for name in names]
    first = files[0]
    # with two numbers, the second is of a stage, or of experts where there are no stages
    whole = sum(map(layers_in, first.chunks)) >= layers
    of_experts = len(numbers[0]) == 2 and has_experts and whole
    ranks = {}
    for each, file in zip(numbers, files, strict=True):
        _check_alike(file, first)
        ranks[RankPlace(each[0], 0, each[1]) if of_experts else RankPlace(*each)] = file
    return _grid(path, [*ranks], first.args), ranks


def _read(path: Path) -> RankFile:
    value = TorchFile(path).load()
    if not isinstance(value, Mapping):
        raise DamagedError("checkpoint file", path, "it holds no dictionary", REMEDY)
    chunks = [_weights(path, value, name) for name in _keys(value)]
    if not any(chunks):
        raise DamagedError("checkpoint file", path, "it holds no weights of a model", REMEDY)
    args = value.get("args")
    iteration = value.get("iteration")
    return RankFile(
        path=path,
        chunks=chunks,
        args=args if isinstance(args, Namespace) else None,
        iteration=iteration if isinstance(iteration, int) else 0,
        has_optimizer=bool(value.get("optimizer")),
    )


def _keys(value: Mapping[str, Any]) -> list[str]:
    """Return the key of the weights, or those of virtual stages, in order."""
    keys = ["model"] if "model" in value else []
    while f"model{len(keys)}" in value:
        keys.append(f"model{len(keys)}")
    return keys


def _weights(path: Path, value: Mapping[str, Any], key: str) -> dict[str, TensorOnDisk]:
    found = value[key]
    weights = dict(flattened(found)) if isinstance(found, Mapping) else {}
    for name, tensor in weights.items():
        if not isinstance(tensor, TensorOnDisk) or not tensor.dtype.is_floating_point:
            reason = f"{name} in it is no tensor of floating-point numbers"
            remedy = "Save it with weights in bf16, fp16 or fp32"
            raise CheckpointError("checkpoint file", path, reason, remedy)
    if not is_old(weights):
        return weights
    version = value.get("checkpoint_version")
    if not isinstance(version, int | float) or version < _ORDERED:
        reason = f"checkpoint_version is {version}, with queries, keys and values in another order"
        remedy = "Load and save it once with a Megatron-LM that writes version 3.0"
        raise CheckpointError("checkpoint file", path, reason, remedy)
    return {core_name(name): tensor for name, tensor in weights.items()}


def _check_alike(file: RankFile, first: RankFile) -> None:
    """Raise DamagedError for files of different saves."""
    if file.iteration != first.iteration or len(file.chunks) != len(first.chunks):
        reason = (
            f"it is of iteration {file.iteration} with {len(file.chunks)} stages, and "
            f"{first.path.parent.name} of iteration {first.iteration} with {len(first.chunks)}"
        )
        raise DamagedError("checkpoint file", file.path, reason, REMEDY)


def _grid(path: Path, ranks: Sequence[RankPlace], args: Namespace | None) -> RankGrid:
    """Return how many ranks there are along each axis.

    Raises CheckpointError for one that is missing, for more than the run had, and for experts that
    are split otherwise than the rest of the model.
    """
    counts = [max(column) + 1 for column in zip(*map(astuple, ranks), strict=True)]
    for at, name in enumerate(_SIZES):
        saved = getattr(args, name, None)
        if not isinstance(saved, int):
            continue
        if saved < counts[at]:
            reason = f"it has files of {counts[at]} ranks where the run had {name} {saved}"
            raise CheckpointError("checkpoint", path, reason, _OTHERS)
        counts[at] = saved
    grid = RankGrid(*counts)
    missing = next((rank for rank in grid.ranks() if rank not in ranks), None)
    if missing is not None:
        reason = (
            f"{grid.directory(missing)} is missing, of {grid.tensor} x {grid.pipeline} x "
            f"{grid.expert} ranks (tensor x pipeline x expert)"
        )
        raise DamagedError("checkpoint", path, reason, REMEDY)
    experts = getattr(args, _EXPERT_SIZE, None)
    if getattr(args, "num_experts", None) and isinstance(experts, int) and experts != grid.tensor:
        reason = f"the run had {_EXPERT_SIZE} {experts}, and {_SIZES[0]} {grid.tensor}"
        remedy = "Save it with --ckpt-convert-format torch_dist"
        raise CheckpointError("checkpoint", path, reason, remedy)
    return grid
