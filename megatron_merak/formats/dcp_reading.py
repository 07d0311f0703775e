"""What a store of torch.distributed.checkpoint has of a model and its optimizer, found by its names."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import hf_names
from ..checkpoint.foreign import METADATA, MODEL_DIRECTORY
from ..checkpoint.hf import Source
from ..checkpoint.hf_patchwork import Patchwork, Range, part, read, sources, stored
from ..checkpoint.shard import Intervals
from ..errors import CheckpointError
from .dcp_files import DcpFiles
from .dcp_names import (
    BUFFERS,
    HUGGINGFACE,
    OPTIMIZER_DIRECTORY,
    SAMPLES,
    STEP,
    TORCHTITAN,
    Heading,
    bare,
    halves_first,
    headings,
    optimizer_heads,
    rotated_heads,
    some,
    state_names,
    tails,
    titan_names,
)
from .state import MOMENTS, WEIGHTS, PortableState

_STEPS = ("train_state.step", "iteration")  # of a run; an optimizer's are another thing
# of a store whose weights have nothing before their names: what else is in it
_SECTIONS = ("optimizer", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state", "rng")
_HYPER = ("lr", "betas", "eps", "weight_decay", "initial_lr")
_COMPARED = 1 << 24  # elements of two tied tensors compared at once
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class DcpStores:
    """The tensors and objects of a store, or of those of a model and of its optimizer.

    Raises CheckpointError as `DcpFiles` does.
    """

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
        """Return the error for a store that is whole but does not fit."""
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
        """Return the file and the offset at which a tensor begins, and its name."""
        return self._files[name].place(name)

    def stored(self, name: str) -> Patchwork:
        """Return a tensor that is not in memory."""
        return stored(name, self.tensors[name].shape, self.tensors[name].dtype)

    def close(self) -> None:
        for files in self._files.values():
            files.close()


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


class DcpSource(Source):
    """Tensors of a store under the names of a model.

    files:      where their parts are read.
    tensors:    by name, what they consist of; as `hf_patchwork` describes it.
    as_float32: read floating-point numbers of any dtype as fp32.
    """

    def __init__(
        self, files: DcpStores, tensors: Mapping[str, Patchwork], as_float32: bool = False
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


class DcpReading:
    """Finds the tensors of a model in stores.

    files: of the store, or stores.
    model: on fake parameters.
    """

    def __init__(self, files: DcpStores, model: Any):
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
        self, config: Mapping[str, Any], say: Callable[[str], object], optimizer: bool = True
    ) -> PortableState:
        """Return the state of the model.

        config:    its config.json.
        say:       called with a line on what was recognised.
        optimizer: whether to read the optimizer's state, if there is any.

        Raises CheckpointError.
        """
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
        samples = self._count(SAMPLES) or 0
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
        others = sorted({*tensors, *objects} - {*MOMENTS, STEP})
        if others or not {*MOMENTS} <= tensors.keys():
            kinds = ", ".join(others or sorted({*tensors, *objects}))
            reason = f"the state of its optimizer is {kinds}"
            raise self.files.bad(reason, f"Only AdamW's is read: {', '.join(MOMENTS)} and {STEP}")
        if all(name.isdecimal() for name in tensors[MOMENTS[0]]):
            reason = f"its optimizer state has numbers in place of names ({head}state.0)"
            raise self.files.bad(reason, "Save what get_optimizer_state_dict returns")
        heading = self._heading(tensors[MOMENTS[0]], "moments")
        sources = {}
        for kind in MOMENTS:
            found = self._of_parameters(tensors[kind], heading, kind)
            self._check(found, kind, _FLOATS)
            sources[kind] = DcpSource(self.files, found, as_float32=True)
        steps = {**objects.get(STEP, {}), **tensors.get(STEP, {})}
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
        self._refuse_missing(missing, len(names), STEP)
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
            raise self.files.bad(f"its {STEP} is {steps}", "Save the state again")
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
