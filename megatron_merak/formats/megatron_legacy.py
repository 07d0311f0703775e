"""Megatron-LM's checkpoints of one file for each rank (--ckpt-format torch), read for any layout.

    DIR/iter_0000100/, DIR/release/            one checkpoint
        mp_rank_TT[_PPP][_EEE]/                a rank: tensor-, pipeline- and expert-parallel
            model_optim_rng.pt                 what torch.save writes of a dictionary
            distrib_optim.pt                   of the distributed optimizer; not read

The dictionary has ``model``, or ``model0`` ... for virtual stages, ``args``, ``iteration`` and
``checkpoint_version``. Weights alone are read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.foreign import RANKS
from ..errors import CheckpointError
from .megatron_args import check_arguments
from .megatron_directory import chosen_megatron, has_rank_files
from .megatron_names import MegatronTable, MegatronTensor
from .megatron_rank_files import RankFile, read_ranks
from .megatron_rank_names import EMBEDDING, ENDS, OUTPUT, layers_in, packed_names, rank_names
from .megatron_ranks import RankGrid, RankPlace, joined, part_shape
from .megatron_rows import RowsSource
from .model import config_beside, empty_model, shapes_of
from .native import Say
from .state import WEIGHTS, PortableState
from .torch_file import TensorOnDisk

_OF_OPTIMIZER = "distrib_optim.pt"
_CONFIG = "Give that model's --config"


def read_megatron_legacy(
    directory: Path,
    config: Path | None,
    allow_pickle: bool,
    say: Say,
    optimizer: bool = True,
) -> PortableState:
    """Return the weights in a checkpoint of one file for each rank.

    directory:    that of one checkpoint, or of several: then the one that the tracker names.
    config:       the model's config.json, or a directory with it; None where it lies beside.
    allow_pickle: whether its files, which are pickles, may be read.
    say:          called with a line on what is left out.
    optimizer:    whether to say so of the optimizer's state.

    Raises CheckpointError or ConfigError for what is missing, damaged or of another model.
    """
    path = chosen_megatron(directory, None)
    if not has_rank_files(path):
        reason = "it is a distributed checkpoint"
        raise CheckpointError("checkpoint", path, reason, "Read it with --from megatron")
    if not allow_pickle:
        reason = "its files are pickles, and unpickling can run code"
        remedy = "Allow it with --allow-pickle (only tensors and plain settings are then unpickled)"
        raise CheckpointError("checkpoint", path, reason, remedy)
    described = config_beside(path, config)
    model: Any = empty_model(described)
    table = MegatronTable(model.config, shapes_of(model))
    grid, ranks = read_ranks(path, table.experts > 0, table.num_layers)
    first = ranks[RankPlace()]
    check_arguments(first.args, model.config, table, path)
    source = _RankSource(path, table, grid, ranks)
    if optimizer and (first.has_optimizer or any(path.glob(f"{RANKS}/{_OF_OPTIMIZER}"))):
        say(f"{path}: the optimizer's state is left out; of files for each rank, weights are read.")
    samples = getattr(first.args, "consumed_train_samples", 0)
    return PortableState(
        kinds={WEIGHTS: source},
        config=described,
        iteration=first.iteration,
        consumed_samples=samples if isinstance(samples, int) else 0,
    )


@dataclass(frozen=True)
class _Stage:
    """The layers from ``start`` on, of one virtual stage of a pipeline rank."""

    pipeline: int
    chunk: int
    start: int
    layers: int


class _RankSource(RowsSource):
    """Tensors of ranks under HuggingFace's names.

    path:  the directory of the checkpoint.
    table: what the tensors consist of.
    grid:  the ranks.
    ranks: their files.

    Raises CheckpointError for tensors that are missing, extra, or have another shape.
    """

    def __init__(
        self,
        path: Path,
        table: MegatronTable,
        grid: RankGrid,
        ranks: Mapping[RankPlace, RankFile],
    ):
        self._grid = grid
        self._ranks = ranks
        self._experts = table.experts // grid.expert
        if self._experts * grid.expert != table.experts:
            reason = f"its experts are on {grid.expert} ranks, and the config has {table.experts}"
            raise CheckpointError("checkpoint", path, reason, _CONFIG)
        self._stages = _stages(path, table, ranks)
        self._used: set[tuple[int, int, str]] = set()
        self._parts = {tensor: self._find(tensor) for tensor in table.tensors}
        self._refuse_others(table)
        self._last: tuple[MegatronTensor, torch.Tensor] | None = None
        super().__init__(table, lambda tensor: self._parts[tensor][0].dtype)

    def place(self, name: str) -> tuple:
        tensor = self._table.by_name[name][0][0]
        return (str(self._parts[tensor][0].file.path), tensor.layer or 0, name)

    def close(self) -> None:
        self._last = None

    def _whole(self, tensor: MegatronTensor) -> torch.Tensor:
        if self._last is None or self._last[0] != tensor:
            parts = [part.read() for part in self._parts[tensor]]
            self._last = (tensor, joined(parts, tensor.split))
        return self._last[1]

    def _stage_of(self, tensor: MegatronTensor) -> _Stage:
        if tensor.layer is None:
            return self._stages[-1 if tensor.key.startswith(ENDS) else 0]
        stages = [stage for stage in self._stages if stage.start <= tensor.layer]
        return stages[-1]

    def _find(self, tensor: MegatronTensor) -> list[TensorOnDisk]:
        """Return the part of each tensor-parallel rank."""
        stage = self._stage_of(tensor)
        expert = 0
        local = 0
        if tensor.expert is not None:
            expert, local = divmod(tensor.expert, self._experts)
        layer = (tensor.layer or 0) - stage.start
        parts = []
        for number in range(self._grid.tensor):
            file = self._ranks[RankPlace(number, stage.pipeline, expert)]
            weights = file.chunks[stage.chunk]
            names = [*rank_names(tensor, layer, local), *packed_names(tensor, layer)]
            name = next((each for each in names if each in weights), None)
            if name is None:
                reason = f"{names[0]} is not in it"
                raise CheckpointError("checkpoint file", file.path, reason, _CONFIG)
            part = weights[name]
            if name in packed_names(tensor, layer):
                part = self._unpacked(file, name, part, local)
            self._used.add((stage.pipeline, stage.chunk, name))
            self._check_shape(file, name, part, tensor)
            parts.append(part)
        return parts

    def _unpacked(
        self, file: RankFile, name: str, packed: TensorOnDisk, expert: int
    ) -> TensorOnDisk:
        """Return the part of one expert of a tensor of all."""
        whole = packed.shape if len(packed.shape) == 2 else (0, 0)
        # either way, numbers of an expert are consecutive
        rows = whole[0] if name.endswith("1") else whole[0] // self._experts
        columns = whole[1] if name.endswith("2") else whole[1] // self._experts
        size = rows * columns
        if not size or not packed.is_contiguous or size * self._experts != math.prod(whole):
            reason = f"{name} of shape {packed.shape} is not that of {self._experts} experts"
            raise CheckpointError("checkpoint file", file.path, reason, _CONFIG)
        offset = packed.offset + expert * size
        return replace(packed, offset=offset, shape=(columns, rows), stride=(1, columns))

    def _check_shape(
        self, file: RankFile, name: str, part: TensorOnDisk, tensor: MegatronTensor
    ) -> None:
        ranks = self._grid.tensor
        want = part_shape(tensor.shape, tensor.split, ranks)
        fits = part.shape == want
        if tensor.key in (EMBEDDING, OUTPUT):
            # the vocabulary has rows of padding
            rows = part.shape[0] if part.shape else 0
            fits = part.shape[1:] == want[1:] and rows * ranks >= tensor.shape[0]
        if not fits:
            of = f" for {ranks} ranks" if ranks > 1 else ""
            reason = f"{name} has shape {part.shape}, and the model of the config {want}{of}"
            raise CheckpointError("checkpoint file", file.path, reason, _CONFIG)

    def _refuse_others(self, table: MegatronTable) -> None:
        """Raise CheckpointError for weights that the config's model does not have."""
        last = self._stages[-1]
        tied = all(tensor.key != OUTPUT for tensor in table.tensors) and self._grid.pipeline > 1
        for rank, file in self._ranks.items():
            for chunk, weights in enumerate(file.chunks):
                for name, tensor in weights.items():
                    if (rank.pipeline, chunk, name) in self._used:
                        continue
                    ends = (rank.pipeline, chunk) == (last.pipeline, last.chunk)
                    if name == OUTPUT and tied and ends:
                        self._check_tied(rank, file, tensor)
                        continue
                    reason = f"it has {name}, which the config's model does not have"
                    raise CheckpointError("checkpoint file", file.path, reason, _CONFIG)

    def _check_tied(self, rank: RankPlace, file: RankFile, output: TensorOnDisk) -> None:
        """Raise CheckpointError unless the last stage has the embedding once more."""
        first = self._ranks[replace(rank, pipeline=0)].chunks[0].get(EMBEDDING)
        alike = first is not None and first.shape == output.shape
        if first is None or not alike or not torch.equal(first.read(), output.read()):
            reason = f"its {OUTPUT} is not the embedding, to which the config ties it"
            raise CheckpointError("checkpoint file", file.path, reason, _CONFIG)


def _stages(
    path: Path, table: MegatronTable, ranks: Mapping[RankPlace, RankFile]
) -> Sequence[_Stage]:
    """Return the stages in the order of their layers: the first of every pipeline rank, then the
    second of every one ...

    Raises CheckpointError unless they have the layers of the config.
    """
    stages: list[_Stage] = []
    chunks = range(len(next(iter(ranks.values())).chunks))
    pipelines = sorted({rank.pipeline for rank in ranks})
    for chunk in chunks:
        for pipeline in pipelines:
            start = stages[-1].start + stages[-1].layers if stages else 0
            layers = layers_in(ranks[RankPlace(pipeline=pipeline)].chunks[chunk])
            stages.append(_Stage(pipeline, chunk, start, layers))
    count = stages[-1].start + stages[-1].layers
    if count != table.num_layers:
        reason = f"its ranks have {count} layers, and the config {table.num_layers}"
        raise CheckpointError("checkpoint", path, reason, _CONFIG)
    return stages
