"""The fake model that is traced in place of a model, so that the model itself never changes."""

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture import four_bit
from megatron_merak.graph.capture.empty import fake_mode, fake_parameter, is_fake
from megatron_merak.graph.capture.inspected import inspected_model
from megatron_merak.graph.capture.rebound import rebind_functions

Cast = torch.dtype | Mapping[str, torch.dtype] | None


def make_fake_model(
    model: nn.Module, training: bool, dtype: Cast, copy_buffers: bool = False
) -> nn.Module:
    """Return a copy of a model in which every parameter is fake; buffers are the model's own, or
    copies.

    dtype: dtype of floating-point parameters, except for those that a HuggingFace model keeps in
           fp32; of those alone that a mapping names; None for their own.

    Caches and activation checkpointing are off, since a training graph has neither. Raises
    TraceError for gradient hooks, which a graph cannot run.
    """
    _refuse_hooks(model)
    mode = fake_mode()
    casts = dtype if isinstance(dtype, Mapping) else _casts(model, dtype)
    memo: dict[int, Any] = dict.fromkeys(map(id, four_bit.states(model)))
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = fake_parameter(parameter, mode, casts.get(name))
    for parameter, shape, computed in four_bit.described(model, casts):
        with mode:
            values = torch.empty(shape, dtype=computed, device="cpu")
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in model.buffers():
        if is_fake(buffer):
            memo[id(buffer)] = _without_values(buffer, mode)
        else:
            memo[id(buffer)] = buffer.detach().cpu().clone() if copy_buffers else buffer.cpu()
    fake = copy.deepcopy(model, memo).train(training)
    four_bit.stand_in(fake)
    rebind_functions(fake, memo)
    for module in fake.modules():
        if isinstance(getattr(module, "gradient_checkpointing", None), bool):
            vars(module)["gradient_checkpointing"] = False
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False
    return fake


def fake_batch(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the tensors of a batch by fake tensors of the fake model's mode; other values stay as
    they are.
    """
    mode = next((p.fake_mode for p in model.parameters()), None) or fake_mode()  # type: ignore[attr-defined]
    tensors = {k: v.detach().cpu() for k, v in batch.items() if isinstance(v, Tensor)}
    return {**batch, **{k: mode.from_tensor(v, static_shapes=True) for k, v in tensors.items()}}


def forward_parameters(model: nn.Module) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters of the model's forward, and whether it takes any other keyword.

    For a model of peft, those of the base model, too: its forward hands on what it does not name.
    """
    inspected = inspected_model(model)
    parameters = dict(inspect.signature(inspected.forward).parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if inspected is not model:
        parameters = dict(inspect.signature(model.forward).parameters) | parameters
    return {
        k: p for k, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }, takes_any


def _casts(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtypes of floating-point parameters; nothing for None."""
    if dtype is None:
        return {}
    keeps_float32 = _float32_rule(model, dtype)
    casts = {
        name: torch.float32 if keeps_float32(name) else dtype
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }
    return casts | dict.fromkeys(four_bit.four_bit_layers(model), dtype)


def _float32_rule(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return which parameters stay in fp32 by the rule of transformers'
    ``from_pretrained(dtype=...)``.
    """
    fields: tuple[str, ...] = ()
    if dtype == torch.float16:
        fields = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    elif dtype == torch.bfloat16:
        fields = ("_keep_in_fp32_modules_strict",)
    patterns = [
        pattern.replace("*", ".*")
        for field in fields
        for pattern in getattr(model, field, None) or ()
    ]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _without_values(buffer: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _refuse_hooks(model: nn.Module) -> None:
    hooked = [
        name or "(the model)"
        for name, m in model.named_modules()
        if m._backward_hooks or m._backward_pre_hooks
    ]
    hooked += [
        k for k, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks
    ]
    if hooked:
        reason = "it has a gradient hook, which a captured graph would not run"
        raise TraceError("module or parameter", hooked[0], reason, "Remove the hook")
