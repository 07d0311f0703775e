"""Initial weights by a model's own distributions, each tensor from a random stream of its own: whatever the layout.

A HuggingFace model initialises itself module by module, in one stream: the bits of a tensor then depend on all that was
drawn before it, and on holding the whole model. Here one parameter at a time gets memory, and the modules around it are
asked to initialise themselves with the generator seeded by (seed, name). They see a model in which all other tensors
have no memory and are marked as done.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from ..errors import ConfigError
from ..graph.capture.empty import fake_mode, fake_parameter, init_empty_weights, is_fake
from ..tensor_parallel import derive_seed

_SMALL = 1 << 16  # elements of a parameter whose constructed value may be looked at
_DONE = "_is_hf_initialized"  # transformers' mark on tensors that its initialisers leave alone


def draw_parameter(model: nn.Module, name: str, seed: int) -> torch.Tensor:
    """One parameter as `Initialiser` draws it; for many of one model, make that once."""
    return Initialiser(model).draw(name, seed)


class Initialiser:
    """Draws the parameters of a model, whose own tensors, with memory or without, are neither read nor changed."""

    def __init__(self, model: nn.Module):
        mode = fake_mode()
        memo = {id(held): fake_parameter(held, mode) for held in model.parameters()}
        self._model = copy.deepcopy(model, memo)
        self._names: dict[int, list[str]] = {}
        for name, held in self._model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(held), []).append(name)
            setattr(held, _DONE, True)
        for buffer in self._model.buffers():
            setattr(buffer, _DONE, True)
        self._order = {id(module): place for place, module in enumerate(_children_first(self._model))}
        self._sources = {*(getattr(self._model, "all_tied_weights_keys", None) or {}).values()}
        self._small: tuple[int, dict[str, torch.Tensor], dict[str, int]] | None = None

    @torch.no_grad()
    def draw(self, name: str, seed: int) -> torch.Tensor:
        """The initial value of parameter ``name``: a function of (model, seed, name) only.

        Full shape, the parameter's dtype, on the CPU; needs the memory of this tensor. The distribution is what the
        module draws when it is built (``reset_parameters``), then what the models around it draw (``_init_weights`` of
        transformers). Where neither sets it, the constructor of a HuggingFace model is run again for it. Raises
        `ConfigError` when that does not help, or the model is another one.
        """
        held = self._model.get_parameter(name)
        names = self._names[id(held)]
        # Of tied names only the source counts: transformers ties once all are initialised.
        owners = [each for each in names if each in self._sources] or names
        fresh = nn.Parameter(_unset(held), requires_grad=held.requires_grad)
        places, around = [self._place(each) for each in owners], self._around(owners)
        try:
            for module, key in places:
                module._parameters[key] = fresh
            with _stream(derive_seed(seed, _as_one(names[0]))), _default_dtype(held.dtype):
                for module in dict.fromkeys(module for module, _ in places):
                    if isinstance(module, ParametrizationList):
                        fresh.copy_(self._original(owners[0]))
                    elif callable(getattr(module, "reset_parameters", None)):
                        module.reset_parameters()
                for module, model in around:
                    model._init_weights(module)
        finally:
            for module, key in places:
                module._parameters[key] = held
        values: torch.Tensor | None = fresh
        if not _is_set(fresh):
            values = self._constructed(names[0], seed)
            values = values if values is not None and _is_set(values) else None
        if values is None or values.shape != held.shape:
            reason = f"neither {type(places[0][0]).__name__} nor an enclosing model defines how to initialize it"
            remedy = "Build the model outside init_empty_weights, so that its parameters have values"
            raise ConfigError("parameter", name, reason, remedy)
        return values.detach().to(held.dtype)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self._model.get_submodule(path), key

    def _around(self, names: list[str]) -> list[tuple[nn.Module, nn.Module]]:
        """(module, model that initialises it) of all that hold the parameter, in the order of transformers."""
        found: dict[int, tuple[nn.Module, nn.Module]] = {}
        for name in names:
            module, model = self._model, None
            for step in ["", *name.split(".")[:-1]]:
                module = module.get_submodule(step) if step else module
                model = module if hasattr(module, "_initialize_weights") else model
                if model is not None:
                    found[id(module)] = (module, model)
        return [found[key] for key in sorted(found, key=self._order.__getitem__)]

    def _constructed(self, name: str, seed: int) -> torch.Tensor | None:
        """The parameter as the constructors of a HuggingFace model leave it, before any ``_init_weights``."""
        if not hasattr(type(self._model), "_from_config"):
            return None
        if self._small is None or self._small[0] != seed:
            with _stream(derive_seed(seed)):
                self._small = (seed, *self._construct())
        _, values, numbers = self._small
        if name in values or name not in numbers:
            return values.get(name)
        with _stream(derive_seed(seed, name)):
            return self._construct(numbers[name])[0].get(name)

    def _construct(self, wanted: int | None = None) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Build the model again. Returns its small parameters, with number ``wanted``; and the number of every one."""
        with _almost_empty(wanted) as registered, _uninitialised_is_nan():
            model = type(self._model)._from_config(copy.deepcopy(self._model.config))
        named = dict(model.named_parameters())
        real = {name: held.detach() for name, held in named.items() if not is_fake(held)}
        return real, {name: registered[id(held)][0] for name, held in named.items() if id(held) in registered}

    def _original(self, name: str) -> torch.Tensor:
        """What a parametrisation (weight norm) keeps of the tensor that its module draws: a function of that tensor."""
        path, _, key = name.rpartition(".")
        holder, _, tensor = path.rpartition(".parametrizations.")
        module, steps = self._model.get_submodule(holder), self._model.get_submodule(path)
        bare = object.__new__(type_before_parametrizations(module))
        whole = torch.empty(getattr(module, tensor).shape, dtype=getattr(module, tensor).dtype)
        bare.__dict__.update(module.__dict__, _parameters={**module._parameters, tensor: nn.Parameter(whole)})
        bare.reset_parameters()
        values = whole
        for step in reversed(list(steps)):
            values = step.right_inverse(values)
        return values if isinstance(values, torch.Tensor) else values[int(key.removeprefix("original"))]


def _as_one(name: str) -> str:
    """The name that gives the stream: the originals of a parametrised tensor are drawn together."""
    return name.rpartition(".")[0] if ".parametrizations." in name else name


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _unset(held: torch.Tensor) -> torch.Tensor:
    """A tensor like ``held``, of values that no initialiser gives."""
    made = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype)
    return made.fill_(float("nan")) if made.is_floating_point() or made.is_complex() else made.zero_()


def _is_set(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN: quickly by the sum, which is NaN if one is, or where infinities cancel."""
    total = tensor.sum()
    return bool(total == total) or bool((tensor == tensor).all())


@contextmanager
def _almost_empty(wanted: int | None) -> Iterator[dict[int, tuple[int, nn.Parameter]]]:
    """`init_empty_weights`, but for parameters of up to `_SMALL` elements and the one registered as number ``wanted``.

    Yields what is registered: id of a parameter -> (its number, the parameter, so that the id stays its own).
    """
    registered: dict[int, tuple[int, nn.Parameter]] = {}
    register_real = nn.Module.register_parameter
    with init_empty_weights():
        register_fake = nn.Module.register_parameter

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is None:
                return register_real(module, name, None)
            number, _ = registered.get(id(parameter), (len(registered), None))
            keep = number == wanted or parameter.numel() <= _SMALL
            (register_real if keep else register_fake)(module, name, parameter)
            held = module._parameters[name]
            registered.setdefault(id(held), (number, held))

        with mock.patch.object(nn.Module, "register_parameter", register):
            yield registered


@contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN, so that memory which nobody sets is not taken for a value."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


@contextmanager
def _stream(seed: int) -> Iterator[None]:
    """Draw from a stream of its own until the block ends."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As while transformers builds a model of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.is_floating_point else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
