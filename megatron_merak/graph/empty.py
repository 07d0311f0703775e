"""Models without memory: parameters become fake the moment they are registered, nothing is initialised."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Inside, every parameter of a module that is built holds a shape and a dtype, but no values and no memory.

    Buffers and Python numbers stay real: they are part of the model's definition, parameters are not. A HuggingFace
    model does not draw initial weights, and still ties those that it ties. May be nested.
    """
    mode = fake_mode()
    register = nn.Module.register_parameter

    def register_fake(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        held = module._parameters[name]
        if held is not None and not isinstance(held, FakeTensor):
            module._parameters[name] = fake_parameter(held, mode)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(nn.Module, "register_parameter", register_fake))
        patches.enter_context(_uninitialised())
        yield


@contextmanager
def _uninitialised() -> Iterator[None]:
    try:
        from transformers.modeling_utils import PreTrainedModel
    except ImportError:
        yield
        return
    with mock.patch.object(PreTrainedModel, "initialize_weights", lambda self: None):
        yield


def fake_mode() -> FakeTensorMode:
    """A fresh world of fake tensors, in which real tensors (buffers, tables) may take part."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter like this one (floating ones: of ``dtype``) without memory, on the fake device "cpu"."""
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    with mode:
        fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=wanted, device="cpu")
    return nn.Parameter(fake, requires_grad=parameter.requires_grad)
