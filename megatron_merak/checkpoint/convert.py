"""Convert weights from a checkpoint to a HuggingFace directory and back, in one process with
bounded memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_merak.checkpoint import hf_names, store
from megatron_merak.checkpoint.hf import Source
from megatron_merak.checkpoint.hf_patchwork import Range
from megatron_merak.checkpoint.hf_save import write_hf
from megatron_merak.checkpoint.shard import Shard, StateKind, Turn
from megatron_merak.errors import CheckpointError

_AT_ONCE = 1 << 30  # bytes of tensors in memory at once, or the largest tensor


class _Read:
    """The tensors of a source, and the buffers of a model that the source lacks, as what `write_hf`
    reads from.
    """

    first = True

    def __init__(self, source: Source, buffers: Mapping[str, torch.Tensor]):
        self._source = source
        self._own = {k: v for k, v in buffers.items() if k not in source.names()}
        self.shapes = {name: source.shape(name) for name in source.names()}
        self.dtypes = {name: source.dtype(name) for name in source.names()}
        for name, tensor in self._own.items():
            self.shapes[name], self.dtypes[name] = tuple(tensor.shape), tensor.dtype

    def __call__(self, name: str, take: tuple[Range, ...]) -> torch.Tensor:
        every = tuple(slice(*bounds) for bounds in take)
        if name in self._own:
            return self._own[name].detach()[every]
        partial = [
            dim
            for dim, (bounds, extent) in enumerate(zip(take, self.shapes[name], strict=True))
            if bounds != (0, extent)
        ]
        if not partial:
            return self._source.read(name)
        dim = partial[0]
        rest = tuple(slice(None) if each == dim else bounds for each, bounds in enumerate(every))
        return self._source.read(name, dim, (take[dim],))[rest]


def to_hf(
    source: Source,
    model: nn.Module,
    directory: Path,
    tokenizer: Any = None,
    shard_size: str = "5GB",
) -> None:
    """Write a HuggingFace directory of the weights of ``source``.

    source:     every parameter of ``model`` under one of its names.
    model:      the model on fake parameters; its persistent buffers are real.
    directory:  where to write; earlier files stay if this fails.
    tokenizer:  saved beside the model if given.
    shard_size: the most bytes of one weight file.

    Raises CheckpointError.
    """
    buffers = {
        name: t for name, t in hf_names.expected(model).items() if not isinstance(t, nn.Parameter)
    }
    write_hf(
        directory,
        model,
        _Read(source, buffers),
        None,
        device="cpu",
        max_shard_size=shard_size,
        processing_class=tokenizer,
    )


def write_kinds(
    kinds: Mapping[str, tuple[Source, Mapping[str, str]]],
    root: Path,
    iteration: int,
    meta: dict[str, Any],
) -> Path:
    """Write a checkpoint of what some sources have; return its directory.

    kinds:     of state, "model" first: where its tensors are read from, and the names that they get.
    root:      the directory in which the checkpoint is made.
    iteration: of the checkpoint.
    meta:      what it says of its run.

    Raises CheckpointError, and NumericsError for numbers that are not finite.
    """
    source, names = next(iter(kinds.values()))
    for name in names:
        if not source.dtype(name).is_floating_point:
            dtype = str(source.dtype(name)).removeprefix("torch.")
            reason = f"its dtype is {dtype}, and weights of a checkpoint are floating-point numbers"
            raise CheckpointError(
                "tensor", name, reason, "Convert the model before it was quantized"
            )
    groups = {kind: list(_groups(source, list(names))) for kind, (source, names) in kinds.items()}
    most = 0
    for kind, each in groups.items():
        shape_of = kinds[kind][0].shape
        for group in each:
            most = max(most, sum(math.prod(shape_of(name)) for name in group))
    memory: dict[torch.dtype, torch.Tensor] = {}
    states = {}
    for kind, (source, names) in kinds.items():
        turns = [_turn(source, names, group, memory, most) for group in groups[kind]]
        states[kind] = StateKind(turns)
    path = store.save(root, iteration, states, meta, group=None, device="cpu")
    for source, _ in kinds.values():
        source.close()
    return path


def _turn(
    source: Source,
    names: Mapping[str, str],
    group: Sequence[str],
    memory: dict[torch.dtype, torch.Tensor],
    most: int,
) -> Turn:
    """Return the tensors of a group, in memory that all turns use one after the other."""
    views = {}
    at = 0
    for name in group:
        shape = source.shape(name)
        kept = source.dtype(name)
        if kept not in memory:
            memory[kept] = torch.empty(most, dtype=kept)
        views[name] = memory[kept][at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
    shards = [
        Shard(names[name], tuple(view.shape), None, (), tensor=view) for name, view in views.items()
    ]
    return Turn(shards, fetch=_reader(source, views))


def _reader(source: Source, views: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    def fetch() -> None:
        for name, view in views.items():
            view.copy_(source.read(name))

    return fetch


def _groups(source: Source, names: Sequence[str]) -> Iterator[list[str]]:
    """Names in the order of the source's files, in groups of at most `_AT_ONCE` bytes of fp32 or of
    one tensor.
    """
    group: list[str] = []
    nbytes = 0
    for name in sorted(names, key=source.place):
        size = 4 * math.prod(source.shape(name))
        if group and nbytes + size > _AT_ONCE:
            yield group
            group = []
            nbytes = 0
        group.append(name)
        nbytes += size
    if group:
        yield group
