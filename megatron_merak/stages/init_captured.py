"""Initial weights by a model's own distributions, each tensor from its own random stream, for any
parallel layout.

A HuggingFace model initialises itself module by module from one random stream: the bits of a tensor
depend on all draws before it, and the whole model must be in memory. Here one parameter at a time
gets memory. Its module and the models around it initialise themselves with the generator seeded by
(seed, name); all other tensors are fake, and marked as initialised.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from ..errors import ConfigError
from ..graph.capture.empty import fake_mode, fake_parameter, init_empty_weights, is_fake
from ..graph.capture.overriding import overriding
from ..models.gpt_module import GPTModule
from ..tensor_parallel import derive_seed

_SMALL = 1 << 16  # elements of a parameter that gets memory when the model is constructed
_DONE = "_is_hf_initialized"  # transformers' mark on tensors that its initialisers leave alone


def draw_parameter(model: nn.Module, name: str, seed: int) -> torch.Tensor:
    """Draw one parameter by an `Initialiser`. For several parameters of a model, make an
    `Initialiser` once.
    """
    return Initialiser(model).draw(name, seed)


def workers_for(model: nn.Module, device: torch.device) -> int:
    """Return how many threads draw parameters of a model for a rank on ``device``.

    Those that draw with a generator of their own, see ``Initialiser.draw``, are drawn by as many as
    the rank has of the host's cores: one on a CPU, an equal share on a GPU.
    """
    if device.type != "cuda" or not isinstance(model, GPTModule):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))


class Initialiser:
    """Draws initial values of the parameters of a model, whose own tensors are neither read nor
    changed.
    """

    def __init__(self, model: nn.Module):
        mode = fake_mode()
        memo = {id(parameter): fake_parameter(parameter, mode) for parameter in model.parameters()}
        self._model = copy.deepcopy(model, memo)
        self._names: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
            setattr(parameter, _DONE, True)
        for buffer in self._model.buffers():
            setattr(buffer, _DONE, True)
        self._order = {
            id(module): index for index, module in enumerate(_children_first(self._model))
        }
        self._sources = {*(getattr(self._model, "all_tied_weights_keys", None) or {}).values()}
        self._small: tuple[int, dict[str, torch.Tensor], dict[str, int]] | None = None

    @torch.no_grad()
    def draw(self, name: str, seed: int) -> torch.Tensor:
        """Return the initial value of parameter ``name``: a function of (model, seed, name) only.

        The result has the full shape and the parameter's dtype, and is on the CPU.

        The GPT of flags draws it itself. Of other models, first the module's ``reset_parameters``
        draws it, then ``_init_weights`` of the transformers models that contain the module. If
        neither sets it, and it is a HuggingFace model, the model is constructed again, with memory
        for this parameter. Raises `ConfigError` if nothing sets it.
        """
        parameter = self._model.get_parameter(name)
        if isinstance(self._model, GPTModule):
            generator = torch.Generator().manual_seed(derive_seed(seed, name))
            return self._model.draw(name, generator).to(parameter.dtype)
        names = self._names[id(parameter)]
        # transformers initialises the source of tied parameters, and ties the others to it
        # afterwards.
        owners = [each for each in names if each in self._sources] or names
        fresh = nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad)
        slots = [self._slot(each) for each in owners]
        enclosing = self._enclosing(owners)
        try:
            for module, key in slots:
                module._parameters[key] = fresh
            with (
                _stream(derive_seed(seed, _stream_name(names[0]))),
                _default_dtype(parameter.dtype),
            ):
                for module in dict.fromkeys(module for module, _ in slots):
                    if isinstance(module, ParametrizationList):
                        fresh.copy_(self._original(owners[0]))
                    elif callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
                for module, model in enclosing:
                    initialise: Any = model._init_weights
                    initialise(module)
        finally:
            for module, key in slots:
                module._parameters[key] = parameter
        values: torch.Tensor | None = fresh
        if not _is_set(fresh):
            values = self._constructed(names[0], seed)
            values = values if values is not None and _is_set(values) else None
        if values is None or values.shape != parameter.shape:
            reason = (
                f"neither {type(slots[0][0]).__name__} nor an enclosing model defines how "
                "to initialize it"
            )
            remedy = (
                "Build the model outside init_empty_weights, so that its parameters have values"
            )
            raise ConfigError("parameter", name, reason, remedy)
        return values.detach().to(parameter.dtype)

    def _slot(self, name: str) -> tuple[nn.Module, str]:
        """The module of a parameter, and its name in that module."""
        path, _, key = name.rpartition(".")
        return self._model.get_submodule(path), key

    def _enclosing(self, names: list[str]) -> list[tuple[nn.Module, nn.Module]]:
        """(module, model that initialises it) of all modules that contain the parameter, in
        transformers' order.
        """
        pairs: dict[int, tuple[nn.Module, nn.Module]] = {}
        for name in names:
            module = self._model
            model = None
            for step in ["", *name.split(".")[:-1]]:
                module = module.get_submodule(step) if step else module
                model = module if hasattr(module, "_initialize_weights") else model
                if model is not None:
                    pairs[id(module)] = (module, model)
        return [pairs[key] for key in sorted(pairs, key=self._order.__getitem__)]

    def _constructed(self, name: str, seed: int) -> torch.Tensor | None:
        """The value that the constructor of a HuggingFace model gives the parameter, before any
        ``_init_weights``.
        """
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

    def _construct(
        self, number: int | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Construct the model again; return its small parameters and that with ``number``, and the
        number of each.
        """
        with _almost_empty(number) as registered, _uninitialised_is_nan():
            kind: Any = type(self._model)
            model = kind._from_config(copy.deepcopy(self._model.config))
        named = dict(model.named_parameters())
        real = {
            name: parameter.detach() for name, parameter in named.items() if not is_fake(parameter)
        }
        return real, {
            name: registered[id(each)][0] for name, each in named.items() if id(each) in registered
        }

    def _original(self, name: str) -> torch.Tensor:
        """The tensor that a parametrisation (weight norm) stores, computed from the one that its
        module draws.
        """
        path, _, key = name.rpartition(".")
        owner, _, tensor = path.rpartition(".parametrizations.")
        module = self._model.get_submodule(owner)
        steps: Any = self._model.get_submodule(path)
        bare: Any = object.__new__(type_before_parametrizations(module))
        drawn = torch.empty(getattr(module, tensor).shape, dtype=getattr(module, tensor).dtype)
        bare.__dict__.update(
            module.__dict__, _parameters={**module._parameters, tensor: nn.Parameter(drawn)}
        )
        bare.reset_parameters()
        values = drawn
        for step in reversed(list(steps)):
            values = step.right_inverse(values)
        return (
            values
            if isinstance(values, torch.Tensor)
            else values[int(key.removeprefix("original"))]
        )


def _stream_name(name: str) -> str:
    """The name that seeds the stream of a parameter: one for all the originals of a parametrised
    tensor.
    """
    return name.rpartition(".")[0] if ".parametrizations." in name else name


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like ``tensor``, filled with NaN if its dtype has it, else with 0."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return (
        result.fill_(float("nan"))
        if result.is_floating_point() or result.is_complex()
        else result.zero_()
    )


def _is_set(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN. The sum decides quickly: it is NaN if a value is, or if infinities
    cancel.
    """
    total = tensor.sum()
    return bool(total == total) or bool((tensor == tensor).all())


@contextmanager
def _almost_empty(kept: int | None) -> Iterator[dict[int, tuple[int, nn.Parameter]]]:
    """`init_empty_weights` except for parameters of up to `_SMALL` elements and that registered as
    number ``kept``.

    Yields id of a registered parameter -> (its number, the parameter itself, so that its id is not
    reused).
    """
    registered: dict[int, tuple[int, nn.Parameter]] = {}
    register_real = nn.Module.register_parameter
    with init_empty_weights():
        register_fake = nn.Module.register_parameter

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is None:
                return register_real(module, name, None)
            number, _ = registered.get(id(parameter), (len(registered), None))
            keep = number == kept or parameter.numel() <= _SMALL
            (register_real if keep else register_fake)(module, name, parameter)
            result = module._parameters[name]
            assert result is not None
            registered.setdefault(id(result), (number, result))

        with overriding(nn.Module, "register_parameter", register):
            yield registered


@contextmanager
def _uninitialised_is_nan() -> Iterator[None]:
    """Let ``torch.empty`` return NaN, so that memory that nothing writes is not mistaken for a
    value.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


@contextmanager
def _stream(seed: int) -> Iterator[None]:
    """Seed the default generator inside; restore its state afterwards."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype inside, as transformers does while it constructs a model of
    that dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.is_floating_point else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
