"""What goes into a store of torch.distributed.checkpoint for each program that shall open it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..checkpoint import hf_names
from ..checkpoint.foreign import MODEL_DIRECTORY
from ..checkpoint.hf import Source
from ..errors import CheckpointError, ConfigError
from .dcp_files import DcpTensor, StoredChunk
from .dcp_names import (
    OPTIMIZER_DIRECTORY,
    SAMPLES,
    STEP,
    TORCHTITAN,
    pairs_first,
    rotated_heads,
    some,
    titan_names,
)
from .state import MASTER, MOMENTS, WEIGHTS, PortableState

PLAIN = "plain"
ACCELERATE = "accelerate"
FLAVOURS = (PLAIN, ACCELERATE, TORCHTITAN)


@dataclass
class DcpContents:
    """What goes into one store: see `write_dcp`."""

    tensors: dict[str, DcpTensor]
    values: Callable[[str, StoredChunk], torch.Tensor]
    objects: dict[str, Any]
    aliases: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]


class DcpWriting:
    """What a state is in a store of a flavour.

    model:       of the state, on fake parameters; its persistent buffers are real.
    flavour:     one of the `FLAVOURS`.
    chunk_bytes: the most of a tensor in a chunk, if its rows are divisible.

    Raises CheckpointError for a state that is not that of the whole model, and ConfigError for a
    model that torchtitan does not have.
    """

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

    def contents(self) -> dict[str, DcpContents]:
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

    def _empty(self) -> DcpContents:
        return DcpContents({}, self._values, {}, {}, {})

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

    def _add_weights(self, contents: DcpContents, prefix: str) -> None:
        for name in self._in_order(WEIGHTS, [n for n in self.expected if n not in self.aliases]):
            key = self._add(contents, WEIGHTS, name, [prefix + each for each in self._names[name]])
            for alias in (alias for alias, first in self.aliases.items() if first == name):
                for each in self._names[alias]:
                    contents.aliases[prefix + each] = key
        for each in chain(contents.tensors, contents.aliases):
            contents.paths[each] = ("model", each.removeprefix(prefix)) if prefix else (each,)

    def _add_optimizer(self, contents: DcpContents, head: str) -> None:
        parameters = [
            name
            for name, tensor in self.expected.items()
            if isinstance(tensor, nn.Parameter) and name not in self.aliases
        ]
        for kind in MOMENTS:
            for name in self._in_order(kind, parameters):
                keys = [f"{head}.state.{each}.{kind}" for each in self._names[name]]
                self._add(contents, kind, name, keys)
        steps = [f"{head}.state.{each}.{STEP}" for n in parameters for each in self._names[n]]
        contents.tensors[steps[0]] = DcpTensor((), torch.float32, (StoredChunk((), ()),))
        contents.aliases |= dict.fromkeys(steps[1:], steps[0])
        for name in parameters:
            for each in self._names[name]:
                for kind in (*MOMENTS, STEP):
                    path = (head, "state", each, kind)
                    contents.paths[f"{head}.state.{each}.{kind}"] = path
        self._add_groups(contents, head, parameters)

    def _add_groups(self, contents: DcpContents, head: str, parameters: Sequence[str]) -> None:
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
                    keys.append(f"{head}.param_groups.{number}.{field}")
                    contents.paths[keys[0]] = (head, "param_groups", number, field)
                if self.flavour != ACCELERATE and field != "params":
                    flat = [f"param_groups.{name}.{field}" for name in names]
                    keys += [f"{head}.{each}" for each in flat]
                    contents.paths |= {f"{head}.{each}": (head, each) for each in flat}
                if keys:
                    contents.objects[keys[0]] = value
                    contents.aliases |= dict.fromkeys(keys[1:], keys[0])

    def _add_counts(self, contents: DcpContents) -> None:
        """Add how far the run was."""
        counts = {"iteration": self.state.iteration, SAMPLES: self.state.consumed_samples}
        if self.flavour == TORCHTITAN:
            counts = {"train_state.step": self.state.iteration, "train_state.ntokens_seen": 0}
        for name, count in counts.items():
            contents.objects[name] = count
            contents.paths[name] = tuple(name.split("."))

    def _add(self, contents: DcpContents, kind: str, name: str, keys: Sequence[str]) -> str:
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
        zeros = (0,) * len(shape)
        chunks = [StoredChunk(zeros, shape)]
        if shape and 0 not in shape:
            chunks = []
            for start in range(0, shape[0], rows):
                size = min(rows, shape[0] - start)
                chunks.append(StoredChunk((start, *zeros[1:]), (size, *shape[1:])))
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
            bounds = zip(chunk.offsets, chunk.shape, strict=True)
            inside = tuple(slice(start, start + size) for start, size in bounds)
            return self.expected[name].detach()[inside]
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
