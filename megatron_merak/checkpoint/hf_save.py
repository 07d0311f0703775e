"""Write a model that is sharded over ranks as a HuggingFace directory, on the first rank, one
tensor at a time.
"""

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn

from megatron_merak.checkpoint import hf_names, in_place
from megatron_merak.checkpoint.files import DTYPE_CODES, as_bytes, disk_errors, header
from megatron_merak.checkpoint.hf_files import INDEX, WEIGHTS
from megatron_merak.checkpoint.hf_gather import Gather, Tensors
from megatron_merak.checkpoint.hf_patchwork import Patchwork, read, stored
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.durable import check_free, sync
from megatron_merak.errors import CheckpointError
from megatron_merak.parallel.agree import raise_together, together

_REMEDY = "Check the output directory, its permissions and its free space"
# of dtypes in a safetensors file
_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
LARGEST_FILE = "5GB"


@dataclass(frozen=True)
class FilesOfModel:
    """The weight files of a model.

    tensors: what they have, by name.
    files:   names of tensors by file.
    index:   what the index says; None for a single file.
    """

    tensors: Mapping[str, Patchwork]
    files: Mapping[str, Sequence[str]]
    index: dict | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def of(cls, model: nn.Module, gather: Tensors, limit: int | str) -> "FilesOfModel":
        """Return those of ``model``, as transformers divides it into files of at most ``limit``.

        Raises `CheckpointError` if ranks lack a part.
        """
        tensors = _tensors(model, gather)
        return cls(tensors, *_split(model, tensors, limit))

    def write(
        self,
        directory: Path,
        gather: Tensors,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        """Write the files, but for the index, into an existing directory. Collective.

        Raises `CheckpointError` on every rank.
        """
        for file, names in self.files.items():
            tensors = {name: self.tensors[name] for name in names}
            _write_weights(directory / file, tensors, gather, group, device=device)

    def write_index(self, directory: Path) -> None:
        """Write the index, if there is one. Local to one rank."""
        if self.index is not None:
            _write_json(directory / (WEIGHTS + INDEX), self.index)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model, by name."""
    tensors = hf_names.expected(model).items()
    return {name: tensor for name, tensor in tensors if not isinstance(tensor, nn.Parameter)}


def save_hf(
    directory: Path | str,
    model: nn.Module,
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    max_shard_size: int | str = LARGEST_FILE,
    processing_class: Any = None,
) -> None:
    """Write what ``model.save_pretrained`` and ``processing_class.save_pretrained`` would write,
    from ``shards``.

    shards: over all ranks, those with ``owner`` tile each parameter of ``model`` once (under any of
            its names if tied).
    model:  on the first rank, its persistent buffers are written; parameters need no memory.
    group:  collective over it; None for a single process.

    Names and bytes are transformers' (a file may end elsewhere, where transformers overfills it
    with the parts of a tensor); a plain module gets weights only. The first rank needs memory for
    one tensor, or for the operands of a conversion that mixes elements. If it fails or is killed,
    the directory shows the old model or the new one, see ``in_place``; other files stay as they
    are. Raises `CheckpointError` on every rank.
    """
    gather = Gather(shards, buffers_of(model), group, device)
    write_hf(
        Path(directory),
        model,
        gather,
        group,
        device=device,
        max_shard_size=max_shard_size,
        processing_class=processing_class,
    )


def write_hf(
    directory: Path,
    model: nn.Module,
    gather: Tensors,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    max_shard_size: int | str,
    processing_class: Any,
) -> None:
    """Write a directory like `save_hf`, from the tensors that ``gather`` brings to the
    first rank.
    """
    with together(group, device):
        files = FilesOfModel.of(model, gather, max_shard_size)
    fresh = directory
    try:
        with together(group, device), disk_errors(directory, _REMEDY):
            if gather.first:
                fresh = _prepare(directory, files.nbytes)
                write_config(fresh, model, gather.dtypes, processing_class)
        files.write(fresh, gather, group, device)
        with together(group, device), disk_errors(directory, _REMEDY):
            if gather.first:
                files.write_index(fresh)
                in_place.publish(directory, _replaced(directory))
    finally:
        if gather.first:
            in_place.abandon(directory)


def _tensors(model: nn.Module, gather: Tensors) -> dict[str, Patchwork]:
    """Return every tensor of the files as a patchwork. Raises `CheckpointError` if ranks lack a
    part.
    """
    state = {}
    aliases = hf_names.aliases(model)
    names: dict[str, list[str]] = {}
    for alias, canonical in aliases.items():
        names.setdefault(canonical, [canonical]).append(alias)
    for name, tensor in hf_names.saved(model).items():
        canonical = aliases.get(name, name)
        source = next(
            (other for other in names.get(canonical, [name]) if other in gather.dtypes), None
        )
        if source is None:
            raise CheckpointError(
                "tensor", name, "no rank has it", "Pass the shards of the complete model"
            )
        if gather.shapes[source] != tuple(tensor.shape):
            reason = (
                f"the ranks have shape {gather.shapes[source]}, and the model has "
                f"{tuple(tensor.shape)}"
            )
            raise CheckpointError("tensor", name, reason, "Pass the shards of this model")
        state[name] = stored(source, gather.shapes[source], gather.dtypes[source])
    return hf_names.to_files(model, state)


def _split(
    model: nn.Module, tensors: Mapping[str, Patchwork], limit: int | str
) -> tuple[dict, dict | None]:
    """Return ({file: [names]}, index or None for a single file), like transformers."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=limit,
    )
    if not split.is_sharded:
        return split.filename_to_tensors, None
    parameters = sum(parameter.numel() for parameter in model.parameters())
    metadata = {"total_parameters": parameters, **split.metadata}
    return split.filename_to_tensors, {"metadata": metadata, "weight_map": split.tensor_to_filename}


def _prepare(directory: Path, needed: int) -> Path:
    """Return the directory for the new files. Raises `CheckpointError` if they will not fit."""
    fresh = in_place.begin(directory)
    check_free(directory, needed, "output directory", "Free some space, or save elsewhere")
    return fresh


def write_config(
    fresh: Path, model: nn.Module, dtypes: Mapping[str, torch.dtype], processing_class: Any
) -> None:
    """Write what a directory has beside weights: configuration, code, tokenizer. Local to one rank.

    dtypes: of the parameters that are saved.
    """
    if hf_names.is_hf(model):
        hf: Any = model
        config = copy.deepcopy(hf.config)
        kinds = [
            dtypes[name]
            for name, p in model.named_parameters()
            if name in dtypes and p.is_floating_point()
        ]
        if kinds:
            config.dtype = str(kinds[0]).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        if hf.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, fresh, config=config)
        config.save_pretrained(fresh)
        if hf.can_generate():
            hf.generation_config.save_pretrained(fresh)
    if processing_class is not None:
        processing_class.save_pretrained(fresh)


def _write_weights(
    path: Path,
    tensors: Mapping[str, Patchwork],
    gather: Tensors,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
) -> None:
    """Write a file that equals, byte for byte, the safetensors library's. Collective."""
    names = sorted(tensors, key=lambda name: (_ORDER.index(DTYPE_CODES[tensors[name].dtype]), name))
    file = _File(path) if gather.first else None
    if file is not None:
        file.write(header({name: tensors[name] for name in names}, {"format": "pt"}))
    for name in names:
        values = read(tensors[name], gather)
        if file is not None:
            file.write(as_bytes(values))
    if file is not None:
        file.close()
    raise_together(None if file is None else file.error, group, device)


class _File:
    """A file that stores its first error: other ranks continue to send until all tensors are
    through.
    """

    def __init__(self, path: Path):
        self.path = path
        self.error: CheckpointError | None = None
        self._file: BinaryIO | None = None
        self._do(self._open)

    def write(self, data: bytes | memoryview) -> None:
        if self._file is not None:
            self._do(partial(self._file.write, data))

    def close(self) -> None:
        if self._file is None:
            return
        self._do(partial(sync, self._file))  # a full disk says so now, not behind the last file
        with suppress(OSError):
            self._file.close()

    def _open(self) -> None:
        self._file = open(self.path, "wb")

    def _do(self, step: Callable[[], object]) -> None:
        if self.error is None:
            try:
                with disk_errors(self.path, _REMEDY):
                    step()
            except CheckpointError as error:
                self.error = error


def _replaced(directory: Path) -> list[str]:
    """Return the weight files of a model in a directory; those that the new model has too are
    replaced by its own.
    """
    shards = [path.name for path in directory.iterdir() if _SHARD.fullmatch(path.name)]
    return [WEIGHTS, WEIGHTS + INDEX, *shards]


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
