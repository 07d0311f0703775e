"""Megatron-LM's distributed checkpoints (--ckpt-format torch_dist), in and out, for any layout.

    DIR/iter_0000100/, DIR/release/            one checkpoint
        .metadata, __R_N.distcp                a store of torch.distributed.checkpoint with whole tensors
        common.pt                              what is no tensor
        metadata.json                          the format; last

Layers that are alike share one tensor, whose first dimension is the layer, and experts the next.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.foreign import FORMAT
from ..checkpoint.hf import Source
from ..durable import replaced
from ..errors import CheckpointError, DamagedError
from .dcp_files import DcpFiles, DcpTensor, StoredChunk, write_dcp
from .megatron_args import check_arguments, common_state, optimizer_steps
from .megatron_directory import chosen_megatron, has_rank_files, replaced_checkpoint
from .megatron_names import LAYERS, MegatronTable, MegatronTensor
from .megatron_rows import RowsSource, rows_of
from .model import CONFIG, config_beside, empty_model, shapes_of
from .pickles import REMEDY, read_torch, unpickling
from .state import MASTER, MOMENTS, WEIGHTS, PortableState, check_whole

COMMON = "common.pt"

_OPTIMIZER = "optimizer.state."
_CHAINED = re.compile(r"^chained_\d+\.(?=optimizer\.)")
_KINDS = {**{name: name for name in MOMENTS}, MASTER: "fp32_param"}
# layers whose modules store something beside weights, empty where they have no fp8
_EXTRA = "_extra_state"
_OF_MODEL = ("embedding.", "decoder.", "output_layer.", "mtp.", "encoder.")


class MegatronSource(RowsSource):
    """Tensors of a store under HuggingFace's names.

    files:  the store.
    table:  what its tensors consist of.
    kind:   what stands before Megatron's names: "" or "optimizer.state.exp_avg." ...; of optimizers
            that are chained, each has its number before that.

    Raises CheckpointError for tensors that are missing or have another shape.
    """

    def __init__(self, files: DcpFiles, table: MegatronTable, kind: str = ""):
        self._files = files
        names = {_CHAINED.sub("", name): name for name in files.tensors}
        self._places = {
            tensor: _place(files, names, tensor, table, kind=kind) for tensor in table.tensors
        }
        self._last: tuple[tuple[str, int | None], torch.Tensor] | None = None
        super().__init__(table, lambda tensor: files.tensors[self._places[tensor][0]].dtype)

    @property
    def stored(self) -> frozenset[str]:
        """The names of what it reads, in the store."""
        return frozenset(stored for stored, _, _ in self._places.values())

    def place(self, name: str) -> tuple:
        stored, layer = self._places[self._table.by_name[name][0][0]][:2]
        return (*self._files.place(stored), layer or 0, name)

    def close(self) -> None:
        self._last = None
        self._files.close()

    def _whole(self, tensor: MegatronTensor) -> torch.Tensor:
        stored, layer, expert = self._places[tensor]
        if self._last is None or self._last[0] != (stored, layer):
            values = (
                self._files.read(stored)
                if layer is None
                else self._files.read(stored, 0, ((layer, layer + 1),))[0]
            )
            self._last = ((stored, layer), values)
        values = self._last[1]
        return values if expert is None else values[expert]


def read_megatron(
    directory: Path,
    config: Path | None,
    allow_pickle: bool,
    optimizer: bool = True,
) -> PortableState:
    """Return the state in a distributed checkpoint of Megatron-LM.

    directory:    that of one checkpoint, or of several: then the one that the tracker names.
    config:       the model's config.json, or a directory with it; None where it lies beside.
    allow_pickle: whether its files, which are pickles, may be read.
    optimizer:    whether to read the optimizer's state, if there is any.

    Raises CheckpointError or ConfigError for what is missing, damaged, of another model, or sharded
    so that it cannot be read for any layout.
    """
    path = chosen_megatron(directory, None)
    if has_rank_files(path):
        reason = "it has a file for each rank"
        raise CheckpointError("checkpoint", path, reason, "Read it with --from megatron-legacy")
    _check_format(path)
    described = config_beside(path, config)
    model: Any = empty_model(described)
    table = MegatronTable(model.config, shapes_of(model))
    files = DcpFiles(path, allow_pickle)
    common = _common(path, files)
    check_arguments(common.get("args"), model.config, table, path)
    weights = MegatronSource(files, table)
    _refuse_extra(files, table, weights)
    kinds: dict[str, Source] = {WEIGHTS: weights}
    if not optimizer:
        pass
    elif any(_OPTIMIZER + MOMENTS[0] in name for name in files.tensors):
        for kind, theirs in _KINDS.items():
            before = f"{_OPTIMIZER}{theirs}."
            if any(_CHAINED.sub("", name).startswith(before) for name in files.tensors):
                kinds[kind] = MegatronSource(files, table, before)
        if kinds[WEIGHTS].dtypes()[0] == torch.float32:
            kinds.pop(MASTER, None)  # the weights themselves
    elif any("optimizer" in name for name in files.tensors):
        reason = "its optimizer state is laid out for one number of ranks"
        remedy = (
            "Save it with --dist-ckpt-optim-fully-reshardable, or convert the weights alone "
            "with --no-load-optim"
        )
        raise CheckpointError("checkpoint", path, reason, remedy)
    return PortableState(
        kinds=kinds,
        config=described,
        iteration=int(common.get("iteration", 0) or 0),
        optimizer_steps=optimizer_steps(common) if len(kinds) > 1 else 0,
        consumed_samples=int(getattr(common.get("args"), "consumed_train_samples", 0) or 0),
    )


def write_megatron(state: PortableState, directory: Path, divisor: int = 128) -> Path:
    """Write a distributed checkpoint of Megatron-LM, which any layout of it loads; return its
    directory.

    state:     the weights and, if it has any, the optimizer state.
    directory: for the tracker and the directory of the checkpoint.
               One of the same name there is replaced once this one is complete.
    divisor:   rows of the vocabulary are padded to a multiple of it
               (--make-vocab-size-divisible-by x tensor-parallel ranks).

    Raises CheckpointError, and ConfigError for a model without counterpart.
    """
    model: Any = empty_model(state.config)
    table = MegatronTable(model.config, shapes_of(model), divisor)
    tensors: dict[str, DcpTensor] = {}
    pieces: dict[tuple[str, tuple[int, ...]], tuple[Source, MegatronTensor]] = {}
    for kind, source in state.kinds.items():
        before = "" if kind == WEIGHTS else f"{_OPTIMIZER}{_KINDS[kind]}."
        check_whole(kind, source, table.shapes)
        _plan(table, source, before, tensors, pieces)

    def values(name: str, chunk: StoredChunk) -> torch.Tensor:
        source, tensor = pieces[name, chunk.offsets]
        return rows_of(source, tensor).view(chunk.shape)

    with replaced_checkpoint(directory, state.iteration) as (fresh, path):
        write_dcp(fresh, tensors, values, _extra_states(table))
        with replaced(fresh / COMMON) as file:
            torch.save(common_state(model.config, table, state), file)
        with replaced(fresh / CONFIG) as file:
            file.write(json.dumps(dict(state.config), indent=2).encode() + b"\n")
        with replaced(fresh / FORMAT) as file:
            file.write(json.dumps(_FORMAT).encode())
    return path


_FORMAT: Mapping[str, Any] = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _plan(
    table: MegatronTable,
    source: Source,
    before: str,
    tensors: dict[str, DcpTensor],
    pieces: dict[tuple[str, tuple[int, ...]], tuple[Source, MegatronTensor]],
) -> None:
    """Add the tensors of one kind of state, with a chunk for each layer and expert."""
    counts = (table.num_layers, table.experts)
    parts: dict[str, list[MegatronTensor]] = {}
    for tensor in table.tensors:
        parts.setdefault(tensor.key, []).append(tensor)
        # small, and read under this name by layers that are not fused
        for other in tensor.others if table.experts else ():
            parts.setdefault(other, []).append(tensor)
    for key, members in parts.items():
        first = members[0]
        leading = tuple(
            count
            for count, at in zip(counts, (first.layer, first.expert), strict=True)
            if at is not None
        )
        rest = first.shape
        chunks = []
        for tensor in members:
            at = tuple(each for each in (tensor.layer, tensor.expert) if each is not None)
            offsets = at + (0,) * len(rest)
            chunks.append(StoredChunk(offsets, (1,) * len(at) + rest))
            pieces[before + key, offsets] = (source, tensor)
        dtype = source.dtype(first.rows[0].name)
        tensors[before + key] = DcpTensor(leading + rest, dtype, tuple(chunks))


def _extra_states(table: MegatronTable) -> dict[str, Any]:
    """Return the objects that modules of Megatron-LM ask for beside their weights."""
    found: dict[str, Any] = {}
    for tensor in table.tensors:
        module, _, end = tensor.key.rpartition(".")
        if tensor.layer is None or end != "weight" or "linear_" not in module:
            continue
        numbers = [(tensor.layer, table.num_layers)]
        if tensor.expert is not None:
            numbers.append((tensor.expert, table.experts))
        at = ".".join(str(number) for number, _ in numbers)
        of = ".".join(str(count) for _, count in numbers)
        found[f"{module}.{_EXTRA}/shard_{at}_{of}"] = [None]
    return found


def _place(
    files: DcpFiles,
    names: Mapping[str, str],
    tensor: MegatronTensor,
    table: MegatronTable,
    kind: str,
) -> tuple[str, int | None, int | None]:
    """Return where a tensor is: a name in the store, and the layer and expert in it.

    names: in the store, by what they are without the number of an optimizer.

    Raises CheckpointError.
    """
    leading = () if tensor.expert is None else (table.experts,)
    for key in (tensor.key, *tensor.others):
        if kind + key in names:
            stored = names[kind + key]
            layered = () if tensor.layer is None else (table.num_layers,)
            _check_shape(files, stored, layered + leading, tensor)
            return stored, tensor.layer, tensor.expert
        alone = kind + key.replace(LAYERS, f"{LAYERS}{tensor.layer}.")
        if tensor.layer is not None and alone in names:
            _check_shape(files, names[alone], leading, tensor)
            return names[alone], None, tensor.expert
    reason = f"{kind}{tensor.key} is not in it"
    raise CheckpointError("checkpoint", files.directory, reason, "Give that model's --config")


def _refuse_extra(files: DcpFiles, table: MegatronTable, weights: MegatronSource) -> None:
    """Raise CheckpointError for weights that the config's model does not have."""
    known = {other for tensor in table.tensors for other in tensor.others} | weights.stored
    extra = [
        name
        for name in sorted(files.tensors)
        if name not in known and name.startswith(_OF_MODEL) and _EXTRA not in name
    ]
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        reason = f"it has {extra[0]}{more}, which the config's model does not have"
        raise CheckpointError("checkpoint", files.directory, reason, "Give that model's --config")


def _check_shape(
    files: DcpFiles, name: str, leading: tuple[int, ...], tensor: MegatronTensor
) -> None:
    shape = files.tensors[name].shape
    want = leading + tensor.shape
    # the vocabulary has rows of padding
    padded = tensor.key in ("embedding.word_embeddings.weight", "output_layer.weight")
    fits = shape == want or (padded and shape[1:] == want[1:] and shape[0] >= want[0])
    if not fits:
        reason = f"{name} has shape {shape}, and the model of the config {want}"
        raise CheckpointError("checkpoint", files.directory, reason, "Give that model's --config")


def _check_format(path: Path) -> None:
    try:
        described = json.loads((path / FORMAT).read_text(encoding="utf-8"))
        backend = described["sharded_backend"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(
            "checkpoint file", path / FORMAT, f"it says no format ({error})", REMEDY
        ) from error
    if backend != _FORMAT["sharded_backend"]:
        reason = f"its format is {backend}"
        raise CheckpointError("checkpoint", path, reason, "Save it with --ckpt-format torch_dist")


def _common(path: Path, files: DcpFiles) -> Mapping[str, Any]:
    """Return what is no tensor: a file of its own, or an object of the store in later versions."""
    if (path / COMMON).is_file():
        with unpickling(path / COMMON):
            found = read_torch(path / COMMON)
    else:
        names = sorted(name for name in files.objects if name.split("/")[0] == "common_state")
        found = files.object(names[0]) if names else {}
    if not isinstance(found, Mapping):
        name = os.fspath(path / COMMON)
        raise DamagedError("checkpoint file", name, "it holds no dictionary", REMEDY)
    return found
