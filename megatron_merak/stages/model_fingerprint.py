"""A fingerprint of all that a captured graph depends on in a model but weight values, to detect
later changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..graph.capture.empty import is_fake
from ..graph.capture.python_state import snapshot_modules
from .guard import GUARDED, Guard

# Attributes that a forward does not depend on, or that a trainer sets itself.
_FREE = frozenset(
    """generation_config merak_source warnings_issued gradient_checkpointing _gradient_checkpointing_func name_or_path
    model_tags training""".split()
)
_FREE_IN_CONFIG = frozenset(
    """use_cache id2label label2id architectures _name_or_path name_or_path transformers_version
    _output_attentions""".split()
)
# elements of a buffer that is compared by value; larger ones by address and version
_SMALL = 1 << 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ABSENT = "(absent)"


@dataclass(frozen=True)
class ModelChange:
    """A difference between two fingerprints.

    what:     the name of the parameter, buffer, module or attribute that differs.
    was, now: its value, or a description of it.
    """

    what: str
    was: Any
    now: Any


@dataclass(frozen=True)
class Fingerprint:
    """The state of a model at one time, for comparison with a later one.

    weights: per parameter, its shape, dtype and the name that it is tied to.
    rest:    by name: classes of modules, ``requires_grad``, hooks, Python attributes.
    buffers: per buffer, a copy if it is small, else its address and version.
    """

    weights: Mapping[str, Any]
    rest: Mapping[str, Any]
    buffers: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> "Fingerprint":
        first: dict[int, str] = {}
        weights: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            weights[name] = (tuple(p.shape), str(p.dtype), first.setdefault(id(p), name))
            rest[f"{name}.requires_grad"] = p.requires_grad
        for name, module in model.named_modules():
            rest[name] = type(module).__qualname__
            hooks = tuple(id(hook) for kind in _HOOKS for hook in vars(module)[kind].values())
            rest[f"{name} hooks"] = hooks
            rest[f"{name}.forward"] = _method(vars(module).get("forward"))
        for (name, key), value in snapshot_modules(model):
            if key not in _FREE and key not in GUARDED:
                rest[f"{name}.{key}".strip(".")] = _of_config(value) if key == "config" else value
        return cls(weights, rest, dict(_buffers(model)))

    def first_weight_change(self, now: "Fingerprint") -> ModelChange | None:
        """The first parameter that was removed or added, or has another shape, dtype or tie."""
        return _first(self.weights, now.weights)

    def first_change(self, now: "Fingerprint") -> ModelChange | None:
        """The first difference of all kinds."""
        change = _first(self.weights, now.weights) or _first(self.rest, now.rest)
        if change is not None:
            return change
        for name in [*self.buffers, *now.buffers]:
            one = self.buffers.get(name)
            other = now.buffers.get(name)
            if type(one) is not type(other) or not _same(one, other):
                return ModelChange(name, "(its values)", "(other values)")
        return None


def _first(before: Mapping[str, Any], now: Mapping[str, Any]) -> ModelChange | None:
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name, _ABSENT)
        new = now.get(name, _ABSENT)
        if old != new:
            return _inside(name, old, new)
    return None


def _inside(name: str, was: Any, now: Any) -> ModelChange:
    """The change of ``name``, or of its first field that differs if it is a config."""
    if isinstance(was, dict) and isinstance(now, dict):
        return _first(
            {f"{name}.{k}": v for k, v in was.items()}, {f"{name}.{k}": v for k, v in now.items()}
        )  # type: ignore[return-value]
    return ModelChange(name, was, now)


def _of_config(description: Any) -> Any:
    """The fields of a config that a forward may depend on.

    description: of a config by ``tell_modules``, or any other value, which is returned as it is.
    """
    if not isinstance(description, tuple):
        return description
    return {key: value for key, value in description[-1] if key not in _FREE_IN_CONFIG}


def _method(forward: Any) -> Any:
    """The id of the function that the user has set as a module's forward, None if there is none."""
    own = forward.own if isinstance(forward, Guard) else forward
    return None if own is None else id(own)


def _buffers(model: nn.Module) -> Any:
    """Name and fingerprint of each buffer, without running statistics, which training itself
    updates.
    """
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and not is_fake(buffer):
                small = buffer.numel() <= _SMALL
                yield (
                    f"{path}.{key}",
                    buffer.detach().clone() if small else (buffer.data_ptr(), buffer._version),
                )


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return one == other
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and torch.equal(one.nan_to_num(), other.nan_to_num())
