"""Megatron-LM's checkpoints of one file for each rank, written a tensor at a time."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.foreign import RANK_FILE
from ..checkpoint.hf import Source
from ..durable import check_free, replaced
from ..errors import ConfigError
from .megatron_args import VERSION, arguments
from .megatron_directory import replaced_checkpoint
from .megatron_names import MegatronTable, MegatronTensor
from .megatron_rank_names import EMBEDDING, ENDS, OUTPUT, written_name
from .megatron_ranks import RankGrid, RankPlace, is_divisible, part_of, part_shape
from .megatron_rows import rows_of
from .model import CONFIG, empty_model, shapes_of
from .state import WEIGHTS, PortableState, check_whole
from .torch_file import LateTensor, write_torch

_FLAGS = "--target-{}-parallel-size"
_BESIDE = 1 << 16  # bytes of a rank's file beside those of its tensors


@dataclass(frozen=True)
class RankFormat:
    """What each rank of Megatron-LM expects.

    grid:    the ranks.
    divisor: rows of the vocabulary are padded to a multiple of it and of the tensor-parallel ranks
             (--make-vocab-size-divisible-by).
    fused:   whether norms are in the modules of the products after them (--transformer-impl
             transformer_engine).
    """

    grid: RankGrid = RankGrid()
    divisor: int = 128
    fused: bool = True


def write_megatron_legacy(state: PortableState, directory: Path, ranks: RankFormat) -> Path:
    """Write the weights of a state with a file for each rank; return the checkpoint's directory.

    state:     the weights; the optimizer's state is left out.
    directory: for the tracker and the directory of the checkpoint.
               One of the same name there is replaced once this one is complete.

    Raises CheckpointError, and ConfigError for a model without counterpart, or that does not divide
    into the ranks.
    """
    model: Any = empty_model(state.config)
    grid = ranks.grid
    table = MegatronTable(model.config, shapes_of(model), ranks.divisor * grid.tensor)
    _check_divides(table, model.config, grid)
    source = state.kinds[WEIGHTS]
    check_whole(WEIGHTS, source, table.shapes)
    args = arguments(model.config, table, state, grid)
    args.make_vocab_size_divisible_by = ranks.divisor
    args.transformer_impl = "transformer_engine" if ranks.fused else "local"
    args.moe_grouped_gemm = False
    beside = {
        "args": args,
        "checkpoint_version": VERSION,
        "iteration": state.iteration,
    }
    with replaced_checkpoint(directory, state.iteration) as (fresh, path):
        check_free(directory, _bytes(table, source, grid), "output directory", _FREE)
        for rank in grid.ranks():
            folder = fresh / grid.directory(rank)
            folder.mkdir()
            _write_rank(folder / RANK_FILE, rank, ranks, table, source, beside=beside)
        with replaced(fresh / CONFIG) as file:
            file.write(json.dumps(dict(state.config), indent=2).encode() + b"\n")
    return path


_FREE = "Free some space, or save elsewhere"


def _check_divides(table: MegatronTable, config: Any, grid: RankGrid) -> None:
    """Raise ConfigError for a model that ranks cannot share evenly."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    fits = heads % grid.tensor == 0 and (groups % grid.tensor == 0 or grid.tensor % groups == 0)
    if not fits:
        reason = f"the model has {heads} attention heads in {groups} groups"
        raise _does_not_divide("tensor", grid.tensor, reason)
    for tensor in table.tensors:
        if not is_divisible(tensor.shape, tensor.split, grid.tensor):
            reason = f"{tensor.key} has shape {tensor.shape}"
            raise _does_not_divide("tensor", grid.tensor, reason)
    if table.num_layers % grid.pipeline:
        reason = f"the model has {table.num_layers} layers"
        raise _does_not_divide("pipeline", grid.pipeline, reason)
    if grid.expert > 1 and not table.experts:
        flag = _FLAGS.format("expert")
        raise ConfigError(flag, grid.expert, "the model has no experts", "Leave it out")
    if table.experts % grid.expert:
        reason = f"the model has {table.experts} experts"
        raise _does_not_divide("expert", grid.expert, reason)


def _does_not_divide(axis: str, ranks: int, reason: str) -> ConfigError:
    return ConfigError(_FLAGS.format(axis), ranks, reason, "Give a number that divides them")


def _write_rank(
    path: Path,
    rank: RankPlace,
    ranks: RankFormat,
    table: MegatronTable,
    source: Source,
    beside: Mapping[str, Any],
) -> None:
    """Write the file of one rank.

    beside: what it has beside weights.
    """
    tensors = dict(_tensors_of(rank, ranks, table))
    count = ranks.grid.tensor

    def values(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return part_of(rows_of(source, tensor), tensor.split, rank.tensor, count)

    model: dict[str, LateTensor | None] = {}
    for name, tensor in tensors.items():
        shape = part_shape(tensor.shape, tensor.split, count)
        model[name] = LateTensor(name, shape, source.dtype(tensor.rows[0].name))
        module, _, end = name.rpartition(".")
        # of products, and empty where they have no fp8
        if end == "weight" and (".linear_" in module or module == "output_layer"):
            model[f"{module}._extra_state"] = None
    with replaced(path) as file:
        write_torch(file, {**beside, "model": model}, values)


def _tensors_of(
    rank: RankPlace, ranks: RankFormat, table: MegatronTable
) -> Iterator[tuple[str, MegatronTensor]]:
    """Yield the tensors of which a rank has a part, by their names there."""
    layers = table.num_layers // ranks.grid.pipeline
    experts = table.experts // ranks.grid.expert
    is_last = rank.pipeline == ranks.grid.pipeline - 1
    tied = all(tensor.key != OUTPUT for tensor in table.tensors)
    for tensor in table.tensors:
        layer = 0
        expert = 0
        if tensor.expert is not None:
            owner, expert = divmod(tensor.expert, experts)
            if owner != rank.expert:
                continue
        if tensor.layer is not None:
            stage, layer = divmod(tensor.layer, layers)
            if stage == rank.pipeline:
                yield written_name(tensor, layer, expert, ranks.fused), tensor
        elif is_last if tensor.key.startswith(ENDS) else rank.pipeline == 0:
            yield tensor.key, tensor
        # tied weights that are on different ranks are there twice
        if tensor.key == EMBEDDING and tied and is_last and rank.pipeline > 0:
            yield OUTPUT, tensor


def _bytes(table: MegatronTable, source: Source, grid: RankGrid) -> int:
    """Return the size of all files."""
    total = 0
    for tensor in table.tensors:
        part = part_shape(tensor.shape, tensor.split, grid.tensor)
        copies = grid.tensor * (grid.expert if tensor.expert is None else 1)
        # that of the last stage
        copies *= 2 if tensor.key == EMBEDDING else 1
        total += math.prod(part) * source.dtype(tensor.rows[0].name).itemsize * copies
    return total + _BESIDE * sum(1 for _ in grid.ranks())
