"""Models without memory: parameters become fake the moment they are registered, nothing is initialised."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
_LARGE = 1 << 28  # elements that no buffer has, and that a host may not even promise for a moment
_DRAWN = "_is_hf_initialized"  # transformers' own mark of a tensor that its initialisation shall leave alone


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Inside, every parameter of a module that is built holds a shape and a dtype, but no values and no memory.

    Buffers and Python numbers stay real: they are part of the model's definition, parameters are not. A HuggingFace
    model draws no initial weights, fills its buffers, and ties what it always ties. Modules may be moved and converted,
    which torch refuses for fake parameters. May be nested.
    """
    from transformers.modeling_utils import PreTrainedModel  # here, since it takes a second

    mode = fake_mode()
    register, apply = nn.Module.register_parameter, nn.Module._apply
    converted: dict[tuple[int, int], tuple] = {}  # by parameter and function, which are kept so that no other is these
    initialise = PreTrainedModel.initialize_weights

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        held = module._parameters[name]
        if held is not None and not is_fake(held):
            module._parameters[name] = fake_parameter(held, mode)

    def apply_to_fake(module: nn.Module, function: Callable, recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        fakes = {name: p for name, p in module._parameters.items() if isinstance(p, FakeTensor)}
        module._parameters.update(dict.fromkeys(fakes))
        apply(module, function, False)
        for name, held in fakes.items():
            if (id(held), id(function)) not in converted:
                with torch.no_grad():
                    made = nn.Parameter(function(held), held.requires_grad)
                vars(made).update(vars(held))
                converted[id(held), id(function)] = made, held, function
            module._parameters[name] = converted[id(held), id(function)][0]
        return module

    def initialise_buffers(model: PreTrainedModel) -> None:
        marked = [p for p in model.parameters() if is_fake(p) and not hasattr(p, _DRAWN)]
        for parameter in marked:
            setattr(parameter, _DRAWN, True)
        initialise(model)
        for parameter in marked:
            delattr(parameter, _DRAWN)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(nn.Module, "register_parameter", register_fake))
        patches.enter_context(mock.patch.object(nn.Module, "_apply", apply_to_fake))
        patches.enter_context(mock.patch.object(PreTrainedModel, "initialize_weights", initialise_buffers))
        patches.enter_context(_LargeAreFake(mode))
        yield


class _LargeAreFake(TorchFunctionMode):
    """A large tensor, about to become a parameter (all experts of a layer in one), is fake before it is registered."""

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _FACTORIES:
            size = (kwargs or {}).get("size", args[0] if args and isinstance(args[0], list | tuple) else args)
            if prod(size) > _LARGE:
                with self.mode:
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape, but no values."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def fake_mode() -> FakeTensorMode:
    """A fresh world of fake tensors, in which real tensors (buffers, tables) may take part."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter like this one, of ``dtype`` if given, without memory, on the fake device "cpu"."""
    with mode:
        fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype or parameter.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=parameter.requires_grad)
