"""Load and save HuggingFace model directories in a stream: each rank reads only the shards that it needs.

model = from_pretrained(directory)            its parameters have no memory; model.merak_source reads their values
fill(shards, model.merak_source)              this rank's intervals of each tensor, and nothing else, are read
save_hf(directory, model, shards, group, device)      AutoModel.from_pretrained(directory) opens the result
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from megatron_merak.checkpoint import hf_names
from megatron_merak.checkpoint.hf_build import build_empty
from megatron_merak.checkpoint.hf_files import WeightFiles, has_weights
from megatron_merak.checkpoint.hf_patchwork import Patchwork, part, read, sources, stored
from megatron_merak.checkpoint.hf_save import save_hf
from megatron_merak.checkpoint.shard import Intervals, Shard
from megatron_merak.errors import CheckpointError, DamagedError
from megatron_merak.graph.capture.empty import is_fake
from megatron_merak.planner.tables import family

__all__ = [
    "HFSource",
    "ModuleSource",
    "Source",
    "fill",
    "from_pretrained",
    "give",
    "save_hf",
    "source_of",
]

_NAMED = 5  # tensors named in one message
_COMPARED = 1 << 24  # elements of two tied tensors compared at once


class Source:
    """Reads the values of a model's tensors. A name that is not in ``names()`` has to be
    initialized.
    """

    _tensors: Mapping[str, torch.Tensor]

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of all floating-point tensors, the most frequent one first."""
        kinds = Counter(self.dtype(name) for name in self.names())
        return [kind for kind, _ in kinds.most_common() if kind.is_floating_point]

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        """Return the index ranges ``intervals`` along ``dim`` of a tensor, concatenated; by default
        the full tensor.
        """
        raise NotImplementedError

    def place(self, name: str) -> tuple:
        """Return a key to sort names by, so that reading in that order opens each file once."""
        return ("", name)

    def close(self) -> None:
        """Close open files; reading opens them again."""

    def __deepcopy__(self, memo: dict) -> Self:
        return self  # a copy of the model reads the same values


class HFSource(Source):
    """The tensors of a HuggingFace directory under their stored names; after `bind`, under those of
    a model.

    Raises `CheckpointError` for headers, sizes or an index that are inconsistent, before a value is
    read.
    """

    def __init__(self, directory: Path | str, allow_pickle: bool = False):
        self.directory = Path(directory)
        self._files = WeightFiles(directory, allow_pickle)
        self._tensors: dict[str, Patchwork] = {
            name: stored(name, e.shape, e.dtype) for name, e in self._files.entries.items()
        }

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        return read(part(self._tensors[name], dim, intervals), self._files.read)

    def place(self, name: str) -> tuple:
        first = min(
            sources(self._tensors[name]),
            key=lambda key: self._files.entries[key].file,
            default=None,
        )
        return ("", name) if first is None else (str(self._files.entries[first].file), name)

    def close(self) -> None:
        self._files.close()

    def bind(
        self, model: nn.Module, allow_missing: Sequence[str] = (), allow_extra: Sequence[str] = ()
    ) -> "HFSource":
        """Use the names of ``model`` from now on; return the source itself.

        What transformers renames, merges or splits at load time is converted here too, tensor by
        tensor as it is read, and every name of a tied tensor is known.

        allow_missing: globs of tensors that may be missing, beside those that transformers lets be
                       missing; they are not in ``names()``.
        allow_extra:   globs of tensors that may have no place in the model.

        Raises `CheckpointError` for other missing or extra tensors, for different shapes, and if
        names that are tied in the model have different values.
        """
        stored, extra = hf_names.to_model(model, self._tensors)
        expected = hf_names.expected(model)
        aliases = hf_names.aliases(model)
        for alias, canonical in aliases.items():
            if alias in stored and canonical in stored:
                self._check_tied(canonical, stored[canonical], alias, stored[alias])
            elif alias in stored:
                stored[canonical] = stored[alias]
        for alias, canonical in aliases.items():
            if canonical in stored:
                stored[alias] = stored[canonical]
        self._refuse_missing(
            model, [name for name in expected if name not in stored], allow_missing
        )
        self._refuse_extra(model, extra, allow_extra)
        for name, tensor in stored.items():
            if tuple(tensor.shape) != tuple(expected[name].shape):
                reason = (
                    f"tensor {name} has shape {tuple(tensor.shape)}, and the model "
                    f"{tuple(expected[name].shape)}"
                )
                raise CheckpointError(
                    "model directory", self.directory, reason, "Give the config of these weights"
                )
        self._tensors = {name: stored[name] for name in expected if name in stored}
        return self

    def _refuse_missing(self, model: nn.Module, names: list[str], allowed: Sequence[str]) -> None:
        names = _unexcused(model, names, "missing", allowed)
        if names:
            reason = f"{len(names)} tensors of {type(model).__name__} are missing: {_some(names)}"
            remedy = (
                f"from_pretrained(..., allow_missing={_globs(names)!r}) initializes them randomly"
            )
            raise CheckpointError("model directory", self.directory, reason, remedy)

    def _refuse_extra(self, model: nn.Module, names: list[str], allowed: Sequence[str]) -> None:
        names = _unexcused(model, names, "unexpected", allowed)
        if names:
            reason = f"{len(names)} tensors have no place in {type(model).__name__}: {_some(names)}"
            remedy = (
                f"from_pretrained(..., allow_extra={_globs(names)!r}) leaves them out, or "
                "give another auto_class"
            )
            raise CheckpointError("model directory", self.directory, reason, remedy)

    def _check_tied(self, canonical: str, one: Patchwork, alias: str, other: Patchwork) -> None:
        rows = one.shape[0] if one.dim() else 0
        step = max(1, _COMPARED * rows // max(1, one.numel()))
        equal = one.shape == other.shape and one.dtype == other.dtype
        for start in range(0, rows, step) if equal else ():
            bounds = ((start, min(start + step, rows)),)
            equal = equal and torch.equal(
                *(read(part(x, 0, bounds), self._files.read) for x in (one, other))
            )
        if not equal:
            reason = (
                f"{canonical} and {alias} are tied in the model, but have different values here"
            )
            raise CheckpointError(
                "model directory", self.directory, reason, "Load it with tie_word_embeddings=False"
            )


class ModuleSource(Source):
    """The values of a module in memory, with the methods of a directory's source."""

    def __init__(self, model: nn.Module):
        self._tensors = {
            name: tensor for name, tensor in hf_names.expected(model).items() if not is_fake(tensor)
        }

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        """See `Source.read`; returns a view of the module's tensor where possible."""
        tensor = self._tensors[name].detach()
        if dim is None:
            return tensor
        return torch.cat(
            [tensor.narrow(dim, start, stop - start) for start, stop in intervals], dim
        )


class JoinedSource(Source):
    """The sources of a model and of parts of it, under the tensors' names in the model.

    sources: by the path of the part, "" for the model itself. A part's source has precedence over
             the model's.
    """

    def __init__(self, sources: Mapping[str, Source]):
        places = {
            f"{path}." * bool(path) + name: (s, name)
            for path, s in sources.items()
            for name in s.names()
        }
        self._places = places
        self._sources = list(sources.values())

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        source, inner = self._places[name]
        return source.shape(inner)

    def dtype(self, name: str) -> torch.dtype:
        source, inner = self._places[name]
        return source.dtype(inner)

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        source, inner = self._places[name]
        return source.read(inner, dim, intervals)

    def place(self, name: str) -> tuple:
        source, inner = self._places[name]
        return source.place(inner)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def source_of(model: nn.Module) -> Source | None:
    """Return the source of the weights of a model, and of parts of it, from `from_pretrained`; None
    without one.
    """
    by_path = {path: vars(part).get("merak_source") for path, part in model.named_modules()}
    sources = {path: source for path, source in by_path.items() if source is not None}
    return sources[""] if [*sources] == [""] else JoinedSource(sources) if sources else None


def fill(shards: Iterable[Shard], source: Source) -> None:
    """Copy what each shard describes from ``source`` into its tensor, with casts; nothing else is
    read.

    Raises `CheckpointError` if a tensor is absent or has another full shape, `DamagedError` for
    values of a directory that are not finite; a module in memory may have any.
    """
    shards = list(shards)
    known = {*source.names()}
    for shard in shards:
        if shard.name not in known:
            raise CheckpointError(
                "tensor", shard.name, "the weights do not have it", "Initialise it"
            )
        if source.shape(shard.name) != tuple(shard.shape):
            reason = f"it has shape {source.shape(shard.name)}, but {tuple(shard.shape)} is needed"
            raise CheckpointError("tensor", shard.name, reason, "Give the weights of this model")
    for shard in sorted(shards, key=lambda shard: source.place(shard.name)):
        tensor = shard.tensor.detach()
        offset = 0
        if shard.dim is None:
            tensor.copy_(source.read(shard.name))
            _check_finite(shard.name, tensor, source)
            continue
        for start, stop in shard.intervals:
            if start < stop:
                values = source.read(shard.name, shard.dim, ((start, stop),))
                if shard.slab is not None:
                    across, first, last = shard.slab
                    values = values.narrow(across, first, last - first)
                tensor.narrow(shard.dim, offset, stop - start).copy_(values)
            offset += stop - start
        _check_finite(shard.name, tensor, source)
    source.close()


def _check_finite(name: str, tensor: torch.Tensor, source: Source) -> None:
    """Raise DamagedError if values that were read from a directory are not finite.

    The least and the greatest take one pass, and are NaN if a value is; only then values are
    counted.
    """
    if isinstance(source, ModuleSource) or not tensor.is_floating_point() or not tensor.numel():
        return
    if all(math.isfinite(bound.item()) for bound in torch.aminmax(tensor)):
        return
    wrong = tensor.numel() - int(torch.isfinite(tensor).sum())
    if wrong:
        reason = f"{wrong:,} of {tensor.numel():,} values that were read are NaN or infinite"
        raise DamagedError(
            "tensor", name, reason, "Copy the model directory again, or save a model that trains"
        )


def give(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Set parameters and buffers to ``values``, by name; tied ones stay tied, and those with memory
    stay the same objects.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, value in values.items():
        if name in buffers:
            buffers[name].data = value
            continue
        parameter = model.get_parameter(name)
        if not is_fake(parameter):
            parameter.data = value
            continue
        real = nn.Parameter(value, parameter.requires_grad)
        for each in names[id(parameter)]:
            path, _, key = each.rpartition(".")
            model.get_submodule(path)._parameters[key] = real


def from_pretrained(
    directory: Path | str,
    *,
    auto_class: type | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    **config: object,
) -> nn.Module:
    """Return the model of a local directory or config file, with parameters that have no memory.

    auto_class: a transformers Auto class or a model class; by default the class that the
                directory's config names.
    config:     fields that override those of config.json, and ``attn_implementation`` and ``dtype``
                (by default that of config.json, else of the weights).

    Nothing is downloaded, and no code of the directory is run unless ``trust_remote_code``. Buffers
    are read at once. A trainer streams weights from ``model.merak_source``, an `HFSource`; None if
    the directory has no weights, which are then initialized. Raises `CheckpointError`: see
    `HFSource`; also for an unknown model type, a config that cannot be parsed, and a model with its
    own code.
    """
    directory = Path(directory)
    source = HFSource(directory, allow_pickle) if has_weights(directory) else None
    floating = (source.dtype(name) for name in source.names()) if source is not None else iter(())
    stored_as = next((dtype for dtype in floating if dtype.is_floating_point), None)
    model: Any = build_empty(
        directory, auto_class, trust_remote_code, dict(config), stored_as=stored_as
    )
    model.merak_source = source
    if source is not None:
        source.bind(model, allow_missing, allow_extra)
        known = {*source.names()}
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in known:
                    buffer.copy_(source.read(name))
        source.close()
    return model


def _unexcused(
    model: nn.Module, names: Iterable[str], kind: str, allowed: Sequence[str]
) -> list[str]:
    """Return the names that neither transformers nor the globs of a caller let be ``kind``."""
    silent = hf_names.ignored(model, kind)
    return [
        name
        for name in names
        if not silent.search(name) and not any(fnmatchcase(name, glob) for glob in allowed)
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )


def _globs(names: list[str]) -> tuple[str, ...]:
    """Return globs that match the names and few others, in a message's length: at worst the
    outermost modules.
    """
    families = tuple(dict.fromkeys(map(family, names)))
    if len(families) <= _NAMED:
        return families
    return tuple(
        dict.fromkeys(f"{name.split('.')[0]}.*" if "." in name else name for name in names)
    )
