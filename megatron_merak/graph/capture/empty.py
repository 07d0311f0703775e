"""Builds models without memory: parameters become fake when they are registered, and are not
initialised.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from megatron_merak.graph.capture.overriding import overriding

_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
# elements; more than any buffer has, and maybe more than the host can allocate even for a moment
_LARGE = 1 << 28
_INITIALIZED = "_is_hf_initialized"  # transformers' mark of a tensor that needs no initialisation


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Build modules whose parameters have a shape and a dtype, but no values and no memory, inside
    the context.

    A HuggingFace model draws no initial weights, but fills its buffers and ties its weights as
    usual. Otherwise as `empty_parameters`.
    """
    from transformers.modeling_utils import PreTrainedModel  # here, since it takes a second

    initialise = PreTrainedModel.initialize_weights

    def initialise_buffers(model: PreTrainedModel) -> None:
        marked = [p for p in model.parameters() if is_fake(p) and not hasattr(p, _INITIALIZED)]
        for parameter in marked:
            setattr(parameter, _INITIALIZED, True)
        initialise(model)
        for parameter in marked:
            delattr(parameter, _INITIALIZED)

    with (
        overriding(PreTrainedModel, "initialize_weights", initialise_buffers),
        empty_parameters(),
    ):
        yield


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build modules whose parameters have a shape and a dtype, but no values and no memory, inside
    the context; none of transformers, whose models draw initial weights.

    Buffers and Python numbers stay real, since they are part of the model's definition. Modules may
    be moved and converted, which torch refuses for fake parameters. May be nested.
    """
    mode = fake_mode()
    register = nn.Module.register_parameter
    apply = nn.Module._apply
    # Keyed by the ids of parameter and function, which are kept alive so that their ids stay
    # unique.
    converted: dict[tuple[int, int], tuple] = {}

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        registered = module._parameters[name]
        if registered is not None and not is_fake(registered):
            module._parameters[name] = fake_parameter(registered, mode)

    def apply_to_fake(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        own: dict[str, Any] = dict(module._parameters)
        fakes = {name: p for name, p in own.items() if isinstance(p, FakeTensor)}
        module._parameters.update(dict.fromkeys(fakes))
        apply(module, function, False)
        for name, fake in fakes.items():
            if (id(fake), id(function)) not in converted:
                with torch.no_grad():
                    result = nn.Parameter(function(fake), fake.requires_grad)
                vars(result).update(vars(fake))
                converted[id(fake), id(function)] = result, fake, function
            module._parameters[name] = converted[id(fake), id(function)][0]
        return module

    with ExitStack() as patches:
        patches.enter_context(overriding(nn.Module, "register_parameter", register_fake))
        patches.enter_context(overriding(nn.Module, "_apply", apply_to_fake))
        patches.enter_context(_LargeAreFake(mode))
        yield


class _LargeAreFake(TorchFunctionMode):
    """Creates large tensors fake; they are about to become parameters (all experts of a layer in
    one).
    """

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _FACTORIES:
            size = (kwargs or {}).get(
                "size", args[0] if args and isinstance(args[0], list | tuple) else args
            )
            if prod(size) > _LARGE:
                with self.mode:
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def fake_mode() -> FakeTensorMode:
    """Return a new fake mode, which accepts real tensors (buffers, tables) too."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def fake_parameter(
    parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Return a parameter like this one without memory, on the fake device "cpu", of ``dtype`` if
    given.
    """
    with mode:
        fake = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=dtype or parameter.dtype, device="cpu"
        )
    return nn.Parameter(fake, requires_grad=parameter.requires_grad)
