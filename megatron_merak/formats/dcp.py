"""Training states in stores of torch.distributed.checkpoint: FSDP2, accelerate, torchtitan.

    read_dcp(directory, config, allow_pickle)     -> PortableState, read tensor by tensor later
    write_dcp_state(state, directory, flavour)    DIR/.metadata, __0_N.distcp, config.json

    plain          {"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}, whose
                   parameter groups are there both nested and flattened
    accelerate     DIR/pytorch_model_fsdp_0 and DIR/optimizer_0, as Accelerator.save_state does
    torchtitan     step-N of torchtitan, for the models that it shares with transformers

Whatever dtype moments are stored in, they are read as fp32. Functions are local to one process, which
needs memory for one tensor, or one chunk, at a time.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import hf_names, in_place
from ..checkpoint.files import disk_errors
from ..checkpoint.hf import Source
from ..checkpoint.hf_build import CONFIG, build_empty
from ..checkpoint.hf_files import read_json
from ..checkpoint.hf_patchwork import Patchwork, Range, part, read, sources, stored
from ..checkpoint.shard import Intervals
from ..errors import CheckpointError, ConfigError
from .dcp_files import METADATA, SUFFIX, DcpFiles, DcpTensor, StoredChunk, write_dcp
from .dcp_names import (
    BUFFERS,
    HUGGINGFACE,
    TORCHTITAN,
    Heading,
    bare,
    halves_first,
    headings,
    optimizer_heads,
    pairs_first,
    rotated_heads,
    some,
    state_names,
    tails,
    titan_names,
)
from .state import MASTER, MOMENTS, WEIGHTS, PortableState

PLAIN = "plain"
ACCELERATE = "accelerate"
FLAVOURS = (PLAIN, ACCELERATE, TORCHTITAN)

MODEL_DIRECTORY = "pytorch_model_fsdp_0"
OPTIMIZER_DIRECTORY = "optimizer_0"

_STEP = "step"
_STEPS = ("train_state.step", "iteration")  # of a run; an optimizer's are another thing
_SAMPLES = "consumed_samples"
# of a store whose weights have nothing before their names: what else is in it
_SECTIONS = ("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng")
_HYPER = ("lr", "betas", "eps", "weight_decay", "initial_lr")
_CHUNK = 1 << 30  # bytes of a chunk that is written, if rows of it are not more
_COMPARED = 1 << 24  # elements of two tied tensors compared at once
_REMEDY = "Check the output directory, its permissions and its free space"
_OURS = re.compile(r"__\d+_\d+" + re.escape(SUFFIX))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class DcpSource(Source):
    """Tensors of a store under the names of a model.

    files:      where their parts are read.
    tensors:    by name, what they consist of; as `hf_patchwork` describes it.
    as_float32: read floating-point numbers of any dtype as fp32.
    """

    def __init__(
        self, files: "_Stores", tensors: Mapping[str, Patchwork], as_float32: bool = False
    ):
        self._files = files
        self._tensors: Mapping[str, Patchwork] = tensors
        self._as_float32 = as_float32

    def dtype(self, name: str) -> torch.dtype:
        kept = self._tensors[name].dtype
        return torch.float32 if self._as_float32 and kept.is_floating_point else kept

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        values = read(part(self._tensors[name], dim, intervals), self._files.rectangle)
        return values.to(self.dtype(name))

    def place(self, name: str) -> tuple:
        places = (self._files.place(each) for each in sources(self._tensors[name]))
        return min(places, default=("", 0, name))

    def close(self) -> None:
        self._files.close()


def read_dcp(
    directory: Path,
    config: Path | None = None,
    allow_pickle: bool = False,
    say: Callable[[str], object] | None = None,
    optimizer: bool = True,
) -> PortableState:
    """Return the state in a store, or in the two directories that accelerate writes.

    directory:    with `.metadata`, or with ``pytorch_model_fsdp_0`` and perhaps ``optimizer_0``, or
                  that of these which has the weights.
    config:       the model's config.json, or the directory that has it; by default that of
                  ``directory``.
    allow_pickle: whether pickles may be read, restricted to what stores need.
    say:          called with a line on what was recognised.
    optimizer:    whether to read the optimizer's state, if there is any.

    Tensors are checked by name, shape and dtype, and are read later. Raises CheckpointError, also
    for a store without a config, and for tensors that the model does not have, has in another
    shape, or would lack.
    """
    files = _Stores(directory, allow_pickle)
    text = _config_file(directory, config)
    floating = (tensor.dtype for tensor in files.tensors.values())
    stored_as = next((dtype for dtype in floating if dtype.is_floating_point), None)
    model = build_empty(text, None, False, {}, stored_as=stored_as)
    tell = say or (lambda line: None)
    return _Reading(files, model).state(read_json(text), tell, optimizer)


def write_dcp_state(
    state: PortableState, directory: Path, flavour: str = PLAIN, chunk_bytes: int = _CHUNK
) -> None:
    """Write a state as a store of one of the `FLAVOURS`, with the model's config.json beside it.

    directory:   another store in it is replaced once the new one is complete; other files stay.
    chunk_bytes: the most of a tensor that is in memory at once, if its rows are divisible.

    fp32 master weights are written in place of the weights that were rounded from them, as FSDP2
    trains them. Where the state does not say the parameter groups, they are one with the defaults
    of torch's AdamW. Raises CheckpointError, and ConfigError for a model that torchtitan does not
    have.
    """
    if flavour not in FLAVOURS:
        raise ConfigError("flavour", flavour, "it is not known", f"Use {', '.join(FLAVOURS)}")
    with tempfile.TemporaryDirectory() as place:
        text = json.dumps(dict(state.config), indent=2, sort_keys=True) + "\n"
        (Path(place) / CONFIG).write_text(text, encoding="utf-8")
        model = build_empty(Path(place), None, False, {}, stored_as=torch.float32)
    contents = _Writing(state, model, flavour, chunk_bytes).contents()
    was_missing = not directory.exists()
    with disk_errors(directory, _REMEDY):
        try:
            fresh = in_place.begin(directory)
            for folder, each in contents.items():
                write_dcp(
                    fresh / folder,
                    each.tensors,
                    each.values,
                    each.objects,
                    aliases=each.aliases,
                    paths=each.paths,
                )
            (fresh / CONFIG).write_text(text, encoding="utf-8")
            in_place.publish(directory, _replaced(directory))
        except BaseException:
            in_place.abandon(directory)
            with suppress(OSError):
                if was_missing:
                    directory.rmdir()
            raise


class _Stores:
    """The tensors and objects of a store, or of those of a model and of its optimizer."""

    def __init__(self, directory: Path, allow_pickle: bool):
        self.directory = directory
        self._files: dict[str, DcpFiles] = {}
        for path in _stores_in(directory):
            files = DcpFiles(path, allow_pickle)
            for name in chain(files.tensors, sorted(files.objects)):
                if name in self._files and name in files.tensors:
                    reason = f"{name} is in two of its stores"
                    raise self.bad(reason, "Give the directory of one of them")
                self._files.setdefault(name, files)
        self.tensors = {
            name: files.tensors[name]
            for name, files in self._files.items()
            if name in files.tensors
        }
        self.objects = [name for name, files in self._files.items() if name in files.objects]

    def bad(self, reason: str, remedy: str) -> CheckpointError:
        return CheckpointError("store", os.fspath(self.directory), reason, remedy)

    def rectangle(self, name: str, take: tuple[Range, ...]) -> torch.Tensor:
        """Return [start, stop) per dimension of a tensor."""
        bounds = zip(take, self.tensors[name].shape, strict=True)
        partial = [dim for dim, (each, extent) in enumerate(bounds) if each != (0, extent)]
        if not partial:
            return self._files[name].read(name)
        dim = partial[0]
        values = self._files[name].read(name, dim, (take[dim],))
        rest = (slice(None) if at == dim else slice(*each) for at, each in enumerate(take))
        return values[tuple(rest)]

    def value(self, name: str) -> Any:
        """Return an object, or the one number of a tensor."""
        files = self._files[name]
        value = files.object(name) if name in files.objects else files.read(name)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value.item()
        return value

    def place(self, name: str) -> tuple:
        return self._files[name].place(name)

    def stored(self, name: str) -> Patchwork:
        """Return a tensor that is not in memory."""
        return stored(name, self.tensors[name].shape, self.tensors[name].dtype)

    def close(self) -> None:
        for files in self._files.values():
            files.close()


def is_dcp(directory: Path) -> bool:
    """Whether a directory is a store, or has those of accelerate."""
    return any((each / METADATA).is_file() for each in _stores_in(directory))


def _stores_in(directory: Path) -> list[Path]:
    """Return the directories of the stores that make up a state."""
    if directory.name == MODEL_DIRECTORY:
        directory = directory.parent  # with the optimizer's beside it
    names = (MODEL_DIRECTORY, OPTIMIZER_DIRECTORY)
    inside = [directory / name for name in names if (directory / name / METADATA).exists()]
    if (directory / METADATA).exists() or not inside:
        steps = sorted(each.parent.name for each in directory.glob(f"step-*/{METADATA}"))
        if steps and not (directory / METADATA).exists():
            reason = f"it has no .metadata, but {some(steps)}"
            raise CheckpointError("store", os.fspath(directory), reason, "Give one of these")
        return [directory]
    return inside


def _config_file(directory: Path, config: Path | None) -> Path:
    path = directory if config is None else config
    path = path if path.is_file() else path / CONFIG
    if not path.is_file():
        where = "the store" if config is None else os.fspath(config)
        remedy = "Give the directory of the model's config.json with --config DIR"
        raise CheckpointError("store", os.fspath(directory), f"{where} has no {CONFIG}", remedy)
    return path


class _Reading:
    """Finds the tensors of a model in stores.

    model: on fake parameters.
    """

    def __init__(self, files: _Stores, model: Any):
        self.files = files
        self.model = model
        self.expected = hf_names.expected(model)
        self.aliases = hf_names.aliases(model)
        self.parameters = [
            name
            for name, tensor in self.expected.items()
            if isinstance(tensor, nn.Parameter) and name not in self.aliases
        ]
        titan = titan_names(model.config, self.expected)
        self.tables: Mapping[str, Mapping[str, str]] = {
            HUGGINGFACE: {name: name for name in self.expected},
            TORCHTITAN: {each: name for name, names in titan.items() for each in names},
        }

    def state(
        self, config: Mapping[str, Any], say: Callable[[str], object], optimizer: bool
    ) -> PortableState:
        known = {name for table in self.tables.values() for name in table}
        heads = optimizer_heads(chain(self.files.tensors, self.files.objects), known)
        if len(heads) > 1:
            reason = f"it has the state of {len(heads)} optimizers: {some(heads)}"
            raise self.files.bad(reason, "Save that of one")
        regions = tuple(f"{head}{each}." for head in heads for each in ("state", "param_groups"))
        keys = [name for name in self.files.tensors if not name.startswith(regions)]
        heading = self._heading(keys, "tensors")
        kinds = {WEIGHTS: DcpSource(self.files, self._weights(keys, heading))}
        line = f"{heading.program}'s names of {type(self.model).__name__}"
        line += f" after {heading.prefix!r}" if heading.prefix else ""
        steps = 0
        groups: list[dict[str, Any]] = []
        if heads and optimizer:
            moments, steps = self._moments(heads[0])
            kinds |= moments
            groups = self._groups(heads[0])
            line += f", state of AdamW after {steps} steps under {heads[0]}state"
        else:
            line += "" if heads else ", no optimizer state"
        say(f"{self.files.directory}: {line}")
        iteration = next((n for name in _STEPS if (n := self._count(name)) is not None), steps)
        samples = self._count(_SAMPLES) or 0
        return PortableState(
            kinds,
            config,
            iteration=iteration,
            optimizer_steps=steps,
            consumed_samples=samples,
            groups=groups,
        )

    def _heading(self, keys: Iterable[str], what: str) -> Heading:
        """Return what stands before the names that most keys end with."""
        found = headings(keys, self.tables)
        if not found:
            reason = f"none of its {what} is named as one of {type(self.model).__name__}"
            remedy = "Give the config.json of this model with --config DIR"
            raise self.files.bad(reason, remedy)
        if len(found) > 1 and found[0][1] == found[1][1] and found[0][1] > 1:
            both = " and ".join(repr(each.prefix) for each, _ in found[:2])
            reason = f"it has {what} of the model more than once: after {both}"
            raise self.files.bad(reason, "Save one of them")
        return found[0][0]

    def _weights(self, keys: Iterable[str], heading: Heading) -> dict[str, Patchwork]:
        start = len(heading.prefix)
        table = self.tables[heading.program]
        named = {}
        for key in keys:
            name = bare(key)
            other = not heading.prefix and key.split(".")[0] in _SECTIONS and name not in table
            if name.startswith(heading.prefix) and not other:
                named[key] = name[start:]
        tensors, extra = self._renamed(named, heading.program)
        silent = hf_names.ignored(self.model, "unexpected")
        extra = [name for name in extra if not silent.search(name) and not BUFFERS.fullmatch(name)]
        self._refuse_extra(extra, "tensors")
        tensors = self._untied(tensors, compare=True)
        silent = hf_names.ignored(self.model, "missing")
        wanted = [name for name in self.expected if name not in self.aliases]
        missing = [name for name in wanted if name not in tensors and not silent.search(name)]
        self._refuse_missing(missing, len(wanted), "tensors")
        self._check(tensors, "tensor", (*_FLOATS, torch.float64))
        return {name: tensors[name] for name in wanted if name in tensors}

    def _moments(self, head: str) -> tuple[dict[str, DcpSource], int]:
        tensors = state_names(self.files.tensors, head)
        objects = state_names(self.files.objects, head)
        others = sorted({*tensors, *objects} - {*MOMENTS, _STEP})
        if others or not {*MOMENTS} <= tensors.keys():
            kinds = ", ".join(others or sorted({*tensors, *objects}))
            reason = f"the state of its optimizer is {kinds}"
            raise self.files.bad(reason, f"Only AdamW's is read: {', '.join(MOMENTS)} and {_STEP}")
        if all(name.isdecimal() for name in tensors[MOMENTS[0]]):
            reason = f"its optimizer state has numbers in place of names ({head}state.0)"
            raise self.files.bad(reason, "Save what get_optimizer_state_dict returns")
        heading = self._heading(tensors[MOMENTS[0]], "moments")
        sources = {}
        for kind in MOMENTS:
            found = self._of_parameters(tensors[kind], heading, kind)
            self._check(found, kind, _FLOATS)
            sources[kind] = DcpSource(self.files, found, as_float32=True)
        steps = {**objects.get(_STEP, {}), **tensors.get(_STEP, {})}
        return sources, self._steps(steps, list(tensors[MOMENTS[0]]))

    def _of_parameters(
        self, keys: Mapping[str, str], heading: Heading, kind: str
    ) -> dict[str, Patchwork]:
        """Return the tensors of one kind, of every parameter."""
        start = len(heading.prefix)
        inside = {key: bare(name) for name, key in keys.items()}
        foreign = [name for name in inside.values() if not name.startswith(heading.prefix)]
        self._refuse_extra(foreign, kind)
        renamed = {key: name[start:] for key, name in inside.items()}
        tensors, extra = self._renamed(renamed, heading.program)
        self._refuse_extra(extra, kind)
        tensors = self._untied(tensors, compare=False)
        missing = [name for name in self.parameters if name not in tensors]
        self._refuse_missing(missing, len(self.parameters), kind)
        return {name: tensors[name] for name in self.parameters}

    def _steps(self, keys: Mapping[str, str], names: Sequence[str]) -> int:
        """Return the one number of updates that all parameters have had.

        keys:  by the names that parameters have in the store.
        names: those that have moments.
        """
        missing = [name for name in names if name not in keys]
        self._refuse_missing(missing, len(names), _STEP)
        counts: dict[float, str] = {}
        places: dict[tuple, float] = {}
        for name in names:
            key = keys[name]
            place = self.files.place(key)[:2] if key in self.files.tensors else (key,)
            if place not in places:
                value = self.files.value(key)
                if not isinstance(value, int | float) or not 0 <= value < 1 << 62:
                    reason = f"{key} is {value!r:.60}, not a number of steps"
                    raise self.files.bad(reason, "Save the state again")
                places[place] = value
            counts.setdefault(places[place], name)
        if len(counts) > 1:
            said = some([f"{count:g} of {name}" for count, name in counts.items()], 3)
            reason = f"its parameters have had different numbers of steps: {said}"
            raise self.files.bad(reason, "Save the state of an optimizer that updates all of them")
        steps = next(iter(counts), 0)
        if steps != int(steps):
            raise self.files.bad(f"its {_STEP} is {steps}", "Save the state again")
        return int(steps)

    def _groups(self, head: str) -> list[dict[str, Any]]:
        """Return the parameter groups; none if they are not there for every parameter."""
        start = f"{head}param_groups."
        entries: dict[str, dict[str, str]] = {}
        for name in chain(self.files.tensors, self.files.objects):
            if name.startswith(start):
                inner, _, field = name[len(start) :].rpartition(".")
                entries.setdefault(inner, {})[field] = name
        numbered = [fields for inner, fields in entries.items() if inner.isdecimal()]
        groups = []
        if numbered and all("params" in fields for fields in numbered):
            for fields in numbered:
                names = self.files.value(fields["params"])
                groups.append(({str(name): None for name in names}, fields))
        else:
            groups = [({inner: None}, fields) for inner, fields in entries.items()]
        merged: dict[str, dict[str, Any]] = {}
        known = {name for table in self.tables.values() for name in table}
        for names, fields in groups:
            values = {k: self.files.value(fields[k]) for k in _HYPER if k in fields}
            group = merged.setdefault(repr(values), {"params": [], **values})
            for name in names:
                tail = next((each for each in tails(bare(name)) if each in known), None)
                if tail is None:
                    continue
                first = next(t[tail] for t in self.tables.values() if tail in t)
                first = self.aliases.get(first, first)
                if first not in group["params"]:
                    group["params"].append(first)
        covered = sorted(name for group in merged.values() for name in group["params"])
        return list(merged.values()) if covered == sorted(self.parameters) else []

    def _count(self, name: str) -> int | None:
        if name not in self.files.tensors and name not in self.files.objects:
            return None
        value = self.files.value(name)
        return value if type(value) is int and value >= 0 else None

    def _renamed(
        self, names: Mapping[str, str], program: str
    ) -> tuple[dict[str, Patchwork], list[str]]:
        """Return tensors under the model's names, and the names that it does not have.

        names: by key of the store, without what stands before them.
        """
        table = self.tables[program]
        keys: dict[str, str] = {}
        extra = []
        for key, name in names.items():
            own = table.get(name)
            if own is None:
                extra.append(name)
            elif own in keys and self.files.place(keys[own])[:2] != self.files.place(key)[:2]:
                raise self.files.bad(f"{own} is there as {keys[own]} and {key}", "Save one of them")
            else:
                keys.setdefault(own, key)
        if program == HUGGINGFACE and extra and len(keys) < len(self.expected):
            files = {name: self.files.stored(key) for key, name in names.items()}
            return hf_names.to_model(self.model, files)
        tensors = {}
        for mine, key in keys.items():
            tensor = self.files.stored(key)
            heads = rotated_heads(self.model.config, mine) if program == TORCHTITAN else 0
            if heads and tensor.dim() == 2 and tensor.shape[0] % (2 * heads) == 0:
                turned: Any = halves_first(tensor, heads)
                tensor = turned
            tensors[mine] = tensor
        return tensors, extra

    def _untied(self, tensors: Mapping[str, Patchwork], compare: bool) -> dict[str, Patchwork]:
        """Return tensors under the first of their names.

        compare: raise CheckpointError if the other names have other values.
        """
        untied = {name: tensor for name, tensor in tensors.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            if alias in tensors and name not in untied:
                untied[name] = tensors[alias]
            elif alias in tensors and compare:
                self._check_tied(name, untied[name], alias, tensors[alias])
        return untied

    def _check_tied(self, name: str, one: Patchwork, alias: str, other: Patchwork) -> None:
        places = [{self.files.place(key)[:2] for key in sources(each)} for each in (one, other)]
        if places[0] == places[1]:
            return
        equal = one.shape == other.shape and one.dtype == other.dtype
        rows = one.shape[0] if one.dim() else 0
        step = max(1, _COMPARED * rows // max(1, one.numel()))
        for start in range(0, rows, step) if equal else ():
            bounds = ((start, min(start + step, rows)),)
            equal = equal and torch.equal(
                *(read(part(each, 0, bounds), self.files.rectangle) for each in (one, other))
            )
        if not equal:
            reason = f"{name} and {alias} are tied in the model, but have different values here"
            remedy = "Give a config.json with tie_word_embeddings false with --config DIR"
            raise self.files.bad(reason, remedy)

    def _check(
        self, tensors: Mapping[str, Patchwork], what: str, dtypes: Sequence[torch.dtype]
    ) -> None:
        """Raise CheckpointError for a tensor of another shape, or a parameter's of other dtypes."""
        for name, tensor in tensors.items():
            wanted = tuple(self.expected[name].shape)
            if tuple(tensor.shape) != wanted:
                reason = f"{what} {name} has shape {tuple(tensor.shape)}, and the model {wanted}"
                remedy = "Give the config.json of this model with --config DIR"
                raise self.files.bad(reason, remedy)
            if isinstance(self.expected[name], nn.Parameter) and tensor.dtype not in dtypes:
                reason = f"{what} {name} has dtype {str(tensor.dtype).removeprefix('torch.')}"
                raise self.files.bad(reason, "Save it in bfloat16, float16 or float32")

    def _refuse_missing(self, names: Sequence[str], of: int, what: str) -> None:
        if names:
            kind = type(self.model).__name__
            reason = f"{len(names)} of {of} {what} of {kind} are missing: {some(names)}"
            remedy = "Give the config.json of this model with --config DIR, or a complete store"
            raise self.files.bad(reason, remedy)

    def _refuse_extra(self, names: Sequence[str], what: str) -> None:
        if names:
            kind = type(self.model).__name__
            reason = f"{len(names)} {what} have no place in {kind}: {some(names)}"
            remedy = "Give the config.json of this model with --config DIR"
            raise self.files.bad(reason, remedy)


@dataclass
class _Contents:
    """What goes into one store: see `write_dcp`."""

    tensors: dict[str, DcpTensor]
    values: Callable[[str, StoredChunk], torch.Tensor]
    objects: dict[str, Any]
    aliases: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]


class _Writing:
    """What a state is in a store of a flavour."""

    def __init__(self, state: PortableState, model: Any, flavour: str, chunk_bytes: int):
        self.state = state
        self.model = model
        self.flavour = flavour
        self.chunk_bytes = chunk_bytes
        self.expected = hf_names.expected(model)
        self.aliases = hf_names.aliases(model)
        self._known = {kind: {*source.names()} for kind, source in state.kinds.items()}
        # by key in the store: the kind and the name of what is written
        self._written: dict[str, tuple[str, str]] = {}
        self._names: dict[str, tuple[str, ...]] = {name: (name,) for name in self.expected}
        if flavour == TORCHTITAN:
            self._names = self._of_titan()

    def contents(self) -> dict[str, _Contents]:
        """Return the contents of each store, by its directory."""
        if self.flavour == ACCELERATE:
            weights = self._empty()
            self._add_weights(weights, "model.")
            self._add_counts(weights)
            if not self.state.has_optimizer:
                return {MODEL_DIRECTORY: weights}
            optimizer = self._empty()
            self._add_optimizer(optimizer, "optimizer")
            return {MODEL_DIRECTORY: weights, OPTIMIZER_DIRECTORY: optimizer}
        contents = self._empty()
        titan = self.flavour == TORCHTITAN
        self._add_weights(contents, "" if titan else "model.")
        if self.state.has_optimizer:
            self._add_optimizer(contents, "optimizer" if titan else "optim")
        self._add_counts(contents)
        return {"": contents}

    def _empty(self) -> _Contents:
        return _Contents({}, self._values, {}, {}, {})

    def _of_titan(self) -> dict[str, tuple[str, ...]]:
        names = titan_names(self.model.config, self.expected)
        lacking = [name for name in self.expected if name not in names]
        if lacking or not names:
            kind = self.model.config.model_type
            reason = f"torchtitan has no {kind} with {some(lacking)}"
            raise ConfigError("flavour", self.flavour, reason, f"Write it as {PLAIN}")
        return names

    def _source(self, kind: str, name: str) -> tuple[Source, str] | None:
        """Return what has the values of a tensor, and under which name."""
        first = self.aliases.get(name, name)
        every = [first, *(alias for alias, each in self.aliases.items() if each == first)]
        for each in [kind] if kind != WEIGHTS else [MASTER, WEIGHTS]:
            found = next((own for own in every if own in self._known.get(each, ())), None)
            if found is not None:
                return self.state.kinds[each], found
        return None

    def _add_weights(self, contents: _Contents, prefix: str) -> None:
        for name in self._in_order(WEIGHTS, [n for n in self.expected if n not in self.aliases]):
            key = self._add(contents, WEIGHTS, name, [prefix + each for each in self._names[name]])
            for alias in (alias for alias, first in self.aliases.items() if first == name):
                for each in self._names[alias]:
                    contents.aliases[prefix + each] = key
        for each in chain(contents.tensors, contents.aliases):
            contents.paths[each] = ("model", each.removeprefix(prefix)) if prefix else (each,)

    def _add_optimizer(self, contents: _Contents, head: str) -> None:
        parameters = [
            name
            for name, tensor in self.expected.items()
            if isinstance(tensor, nn.Parameter) and name not in self.aliases
        ]
        for kind in MOMENTS:
            for name in self._in_order(kind, parameters):
                keys = [f"{head}.state.{each}.{kind}" for each in self._names[name]]
                self._add(contents, kind, name, keys)
        steps = [f"{head}.state.{each}.{_STEP}" for n in parameters for each in self._names[n]]
        contents.tensors[steps[0]] = DcpTensor((), torch.float32, (StoredChunk((), ()),))
        contents.aliases |= dict.fromkeys(steps[1:], steps[0])
        for name in parameters:
            for each in self._names[name]:
                for kind in (*MOMENTS, _STEP):
                    path = (head, "state", each, kind)
                    contents.paths[f"{head}.state.{each}.{kind}"] = path
        self._add_groups(contents, head, parameters)

    def _add_groups(self, contents: _Contents, head: str, parameters: Sequence[str]) -> None:
        """Add the parameter groups: nested, but for torchtitan, and a copy for each parameter, but
        for accelerate.
        """
        defaults = torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
        groups = self.state.groups or [{"params": parameters}]
        members = [[self.aliases.get(n, n) for n in group["params"]] for group in groups]
        if sorted(chain.from_iterable(members)) != sorted(parameters):
            reason = "they are not the parameters of the model, each once"
            remedy = "Give the state of this whole model"
            raise CheckpointError("parameter groups", len(groups), reason, remedy)
        for number, (group, inside) in enumerate(zip(groups, members, strict=True)):
            names = [each for name in inside for each in self._names[name]]
            fields = {**defaults, **group}
            fields.setdefault("initial_lr", fields["lr"])
            fields["betas"] = tuple(fields["betas"])
            fields["params"] = [self._names[name][0] for name in inside]
            for field, value in fields.items():
                keys = []
                if self.flavour != TORCHTITAN:
                    keys.append((f"{head}.param_groups.{number}.{field}", number, field))
                    contents.paths[keys[0][0]] = (head, "param_groups", number, field)
                if self.flavour != ACCELERATE and field != "params":
                    for name in names:
                        inner = f"param_groups.{name}.{field}"
                        keys.append((f"{head}.{inner}", number, field))
                        contents.paths[f"{head}.{inner}"] = (head, inner)
                if keys:
                    contents.objects[keys[0][0]] = value
                    contents.aliases |= {key[0]: keys[0][0] for key in keys[1:]}

    def _add_counts(self, contents: _Contents) -> None:
        """Add how far the run was."""
        counts = {"iteration": self.state.iteration, _SAMPLES: self.state.consumed_samples}
        if self.flavour == TORCHTITAN:
            counts = {"train_state.step": self.state.iteration, "train_state.ntokens_seen": 0}
        for name, count in counts.items():
            contents.objects[name] = count
            contents.paths[name] = tuple(name.split("."))

    def _add(self, contents: _Contents, kind: str, name: str, keys: Sequence[str]) -> str:
        """Add one tensor under the first of its keys, which is returned; the others are aliases."""
        found = self._source(kind, name)
        tensor = self.expected[name]
        if found is not None:
            source, own = found
            shape = source.shape(own)
            dtype = source.dtype(own)
        elif not isinstance(tensor, nn.Parameter) and kind == WEIGHTS:
            shape = tuple(tensor.shape)
            dtype = tensor.dtype
        else:
            reason = f"the state has no {kind} of it"
            raise CheckpointError("tensor", name, reason, "Give the state of this whole model")
        if shape != tuple(tensor.shape):
            reason = f"its {kind} has shape {shape}, and the model {tuple(tensor.shape)}"
            raise CheckpointError("tensor", name, reason, "Give the state of this model")
        rows = shape[0] if shape else 1
        if not self._heads(name) and rows:
            nbytes = math.prod(shape) * dtype.itemsize
            rows = max(1, min(rows, rows * self.chunk_bytes // max(1, nbytes)))
        chunks = [StoredChunk((0,) * len(shape), shape)]
        if shape and 0 not in shape:
            chunks = [
                StoredChunk(
                    (start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:])
                )
                for start in range(0, shape[0], rows)
            ]
        contents.tensors[keys[0]] = DcpTensor(shape, dtype, tuple(chunks))
        contents.aliases |= dict.fromkeys(keys[1:], keys[0])
        self._written[keys[0]] = (kind, name)
        return keys[0]

    def _heads(self, name: str) -> int:
        return rotated_heads(self.model.config, name) if self.flavour == TORCHTITAN else 0

    def _values(self, key: str, chunk: StoredChunk) -> torch.Tensor:
        if key not in self._written:
            return torch.tensor(float(self.state.optimizer_steps))
        kind, name = self._written[key]
        found = self._source(kind, name)
        if found is None:
            return self.expected[name].detach()[
                tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.shape, strict=True))
            ]
        source, own = found
        if heads := self._heads(name):
            return pairs_first(source.read(own), heads)
        if chunk.shape == source.shape(own):
            return source.read(own)
        return source.read(own, 0, ((chunk.offsets[0], chunk.offsets[0] + chunk.shape[0]),))

    def _in_order(self, kind: str, names: Iterable[str]) -> list[str]:
        """Return names in the order in which their values are stored."""
        numbers = {id(source): n for n, source in enumerate(self.state.kinds.values())}

        def place(name: str) -> tuple:
            found = self._source(kind, name)
            return () if found is None else (numbers[id(found[0])], *found[0].place(found[1]))

        return sorted(names, key=place)


def _replaced(directory: Path) -> list[str]:
    """Return the files of an earlier store in a directory."""
    found = []
    for folder in ("", MODEL_DIRECTORY, OPTIMIZER_DIRECTORY):
        if (directory / folder).is_dir():
            names = os.listdir(directory / folder)
            kept = (name for name in names if name == METADATA or _OURS.fullmatch(name))
            found += [(Path(folder) / name).as_posix() for name in kept]
    return found
