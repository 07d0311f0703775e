"""What a captured graph depends on of the user's model besides its weights, so that a later change is noticed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..graph.capture.empty import is_fake
from ..graph.capture.python_state import snapshot_modules
from .guard import GUARDED, Guard

# Attributes that change nothing of a forward, or that a trainer sets itself.
_FREE = frozenset(
    """generation_config merak_source warnings_issued gradient_checkpointing _gradient_checkpointing_func name_or_path
    model_tags training""".split()
)
_FREE_IN_CONFIG = frozenset(
    """use_cache id2label label2id architectures _name_or_path name_or_path transformers_version
    _output_attentions""".split()
)
_SMALL = 1 << 16  # elements of a buffer that is compared by value; larger ones by their writes
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ABSENT = "(absent)"


@dataclass(frozen=True)
class Change:
    """what: the place that changed. was, now: how it is told."""

    what: str
    was: Any
    now: Any


@dataclass(frozen=True)
class Picture:
    """weights: per parameter its shape, dtype and the name it is tied to. rest: per place what is there: classes of
    modules, ``requires_grad``, hooks, Python attributes. buffers: per name a copy, or what tells a write of it.
    """

    weights: Mapping[str, Any]
    rest: Mapping[str, Any]
    buffers: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> "Picture":
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
        for (name, key), told in snapshot_modules(model):
            if key not in _FREE and key not in GUARDED:
                rest[f"{name}.{key}".strip(".")] = _of_config(told) if key == "config" else told
        return cls(weights, rest, dict(_buffers(model)))

    def weights_change(self, now: "Picture") -> Change | None:
        """The first parameter that is there no more, is new, or has another shape or dtype."""
        return _first(self.weights, now.weights)

    def change(self, now: "Picture") -> Change | None:
        """The first difference of all."""
        found = _first(self.weights, now.weights) or _first(self.rest, now.rest)
        if found is not None:
            return found
        for name in [*self.buffers, *now.buffers]:
            one, other = self.buffers.get(name), now.buffers.get(name)
            if type(one) is not type(other) or not _same(one, other):
                return Change(name, "(its values)", "(other values)")
        return None


def _first(before: Mapping[str, Any], now: Mapping[str, Any]) -> Change | None:
    for name in dict.fromkeys([*before, *now]):
        was, told = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if was != told:
            return _inside(name, was, told)
    return None


def _inside(name: str, was: Any, now: Any) -> Change:
    """The field of a config that differs, where ``name`` is one."""
    if isinstance(was, dict) and isinstance(now, dict):
        return _first({f"{name}.{k}": v for k, v in was.items()}, {f"{name}.{k}": v for k, v in now.items()})  # type: ignore[return-value]
    return Change(name, was, now)


def _of_config(told: Any) -> Any:
    """A config as a dictionary, without what is of no consequence."""
    if not isinstance(told, tuple):
        return told
    return {key: value for key, value in told[-1] if key not in _FREE_IN_CONFIG}


def _method(held: Any) -> Any:
    """What stands in the place of a module's forward, guards aside."""
    own = held.own if isinstance(held, Guard) else held
    return None if own is None else id(own)


def _buffers(model: nn.Module) -> Any:
    """Without running statistics, which training changes and which it reads where they are."""
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for key, buffer in module._buffers.items():
            if buffer is not None and not is_fake(buffer):
                small = buffer.numel() <= _SMALL
                yield f"{path}.{key}", buffer.detach().clone() if small else (buffer.data_ptr(), buffer._version)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return one == other
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and torch.equal(one.nan_to_num(), other.nan_to_num())
