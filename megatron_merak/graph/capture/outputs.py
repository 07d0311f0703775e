"""Which of a model's outputs a graph hands out, and what they are called.

logits, hidden_states: (a, b, c), vision: {pooled: p}, c is logits      "*" of it:
logits|hidden_states.2, hidden_states.0, hidden_states.1, vision.pooled
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import Tensor, nn

from megatron_merak.errors import TraceError

EVERY, NOT, SAME = "*", "!", "|"

# (model, batch) -> (loss, outputs): computes them of a batch, in place of the model's forward; a loss of None: none.
LossFunction = Callable[[nn.Module, dict[str, Any]], tuple[Any, Any]]


def pick_outputs(twin: nn.Module, names: Sequence[str], compute: LossFunction | None = None) -> list[str]:
    """Let the twin's forward return a tuple of tensors, the outputs ``names``; returns what these are called, a list
    that is filled when it has run.

    "loss" is the tensor that is returned alone or first, or the one that ``compute`` returns, "*" all outputs but it,
    and those that "!name" names. Tensors in tuples and dictionaries are called after their place; one that is several
    outputs has all their names.
    """
    forward, told = twin.forward, []
    remedy = "Put what it computes the loss from (labels) into the batch"
    if "return_loss" in inspect.signature(forward).parameters:
        remedy = "Put return_loss=True into the batch"

    def outputs_of(*args: Any, **kwargs: Any) -> dict[str, Any]:
        model = type(twin).__name__
        if compute is None:
            return _named(model, forward(*args, **kwargs), names)
        with mock.patch.object(twin, "forward", forward):
            loss, outputs = compute(twin, kwargs)
        if loss is None:
            return _named(model, outputs, names)
        found = {} if outputs is None else _named(model, outputs, ("loss", EVERY))
        return {"loss": loss} | {name: value for name, value in found.items() if name != "loss"}

    @functools.wraps(forward)
    def picked(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        model = type(twin).__name__
        found = outputs_of(*args, **kwargs)
        _check(model, found, names, remedy)
        by_tensor: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in _chosen(model, found, names):
            by_tensor.setdefault(id(tensor), (tensor, []))[1].append(name)
        told[:] = [SAME.join(called) for _, called in by_tensor.values()]
        return tuple(
            tensor.reshape(()) if "loss" in called and tensor.dim() else tensor for tensor, called in by_tensor.values()
        )

    twin.forward = picked  # type: ignore[method-assign]
    return told


def take_entries(twin: nn.Module, entries: Sequence[str]) -> None:
    """Let the twin's forward take these entries of a batch, whatever the model's own takes."""
    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in entries]
    twin.forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]


def nested(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs by name, those of one tuple or dictionary together again."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in outputs.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = value
    return {name: each[""] if "" in each else _joined(nested(each)) for name, each in parts.items()}


def _joined(inner: dict[str, Any]) -> Any:
    return tuple(inner.values()) if all(name.isdigit() for name in inner) else inner


def _named(model: str, output: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(output, Tensor):
        return {"loss" if "loss" in names else "logits": output}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, Sequence):
        first = ("loss", "logits") if "loss" in names or EVERY not in names else ()
        return dict(zip((*first, *(f"output_{i}" for i in range(len(first), len(output)))), output, strict=False))
    reason = f"its forward returns a {type(output).__name__}"
    raise TraceError("model", model, reason, "Return a tensor (the loss), a tuple (loss first) or a dict")


def _check(model: str, found: Mapping[str, Any], names: Sequence[str], remedy: str) -> None:
    asked = [name for name in names if name != EVERY and not name.startswith(NOT)]
    missing = [name for name in asked if found.get(name) is None]
    if missing:
        reason = f"its forward returns no {', '.join(missing)}, only {', '.join(found)}"
        raise TraceError("model", model, reason, remedy if "loss" in missing else f"Ask for {' or '.join(found)}")
    if "loss" in names and not isinstance(found["loss"], Tensor):
        reason = f"its loss is a {type(found['loss']).__name__}"
        raise TraceError("model", model, reason, "Return a loss that is a tensor")
    if "loss" in names and found["loss"].numel() != 1:
        reason = f"its loss has the shape {tuple(found['loss'].shape)}"
        raise TraceError("model", model, reason, "Return a loss of one value, the mean or the sum")


def _chosen(model: str, found: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    every = [name for name in found if name != "loss" and NOT + name not in names]
    for name in names:
        for each in every if name == EVERY else [] if name.startswith(NOT) else [name]:
            yield from _leaves(model, each, found[each])


def _leaves(model: str, name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(model, f"{name}.{key}", each)
    elif value is not None:
        reason = f"{name} is a {type(value).__name__}, and a graph returns tensors"
        raise TraceError("output of", model, reason, "Leave it out: name the others in prediction_outputs")
