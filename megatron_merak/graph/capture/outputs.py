"""Selects the outputs of a model that a graph returns, and names them.

logits, hidden_states: (a, b, c), vision: {pooled: p}, c is logits      "*" of it:
logits|hidden_states.2, hidden_states.0, hidden_states.1, vision.pooled
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_unflatten

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.fake_model import forward_parameters
from megatron_merak.graph.capture.overriding import overriding

EVERY = "*"
NOT = "!"
SAME = "|"

# (model, batch) -> (loss, outputs): called in place of the model's forward; the loss may be None.
LossFunction = Callable[[nn.Module, dict[str, Any]], tuple[Any, Any]]


def pick_outputs(
    fake_model: nn.Module, names: Sequence[str], compute: LossFunction | None = None
) -> None:
    """Make the fake model's forward return the outputs ``names``, a dictionary of tensors.

    What a forward leaves elsewhere is lost where the exporter runs its bytecode (strict), so the
    result has the names.

    names:   "loss" is the tensor that is returned alone or first, or that ``compute`` returns; "*"
             is all outputs but the loss and those excluded by "!name". Tensors in tuples and
             dictionaries are named by their path ("hidden_states.0"); a tensor that is several
             outputs has all their names, joined by ``SAME``.
    compute: replaces the model's forward.
    """
    forward = fake_model.forward
    remedy = "Put what it computes the loss from (labels) into the batch"
    if "return_loss" in forward_parameters(fake_model)[0]:
        remedy = "Put return_loss=True into the batch"

    def run_model(*args: Any, **kwargs: Any) -> dict[str, Any]:
        model = type(fake_model).__name__
        if compute is None:
            return _named(model, forward(*args, **kwargs), names)
        with overriding(fake_model, "forward", forward):
            loss, outputs = compute(fake_model, kwargs)
        if loss is None:
            return _named(model, outputs, names)
        outputs_by_name = {} if outputs is None else _named(model, outputs, ("loss", EVERY))
        return {"loss": loss} | {
            name: value for name, value in outputs_by_name.items() if name != "loss"
        }

    @functools.wraps(forward)
    def forward_outputs(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        model = type(fake_model).__name__
        outputs_by_name = run_model(*args, **kwargs)
        _check(model, outputs_by_name, names, remedy)
        by_tensor: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in _selected(model, outputs_by_name, names):
            by_tensor.setdefault(id(tensor), (tensor, []))[1].append(name)
        return {
            SAME.join(group): tensor.reshape(()) if "loss" in group and tensor.dim() else tensor
            for tensor, group in by_tensor.values()
        }

    fake_model.forward = forward_outputs


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """Return the names of what the program of a model with picked outputs returns, in order."""
    spec = program.call_spec.out_spec
    positions = tree_unflatten(range(spec.num_leaves), spec)
    return tuple(sorted(positions, key=positions.__getitem__))


def take_entries(fake_model: nn.Module, entries: Sequence[str]) -> None:
    """Give the fake model's forward a signature of these batch entries, whatever the model's own
    takes.
    """
    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in entries]
    fake_model.forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]


def nested(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs by name, with those of one tuple or dictionary put together again."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in outputs.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = value
    return {
        name: each[""] if "" in each else _as_tuple_or_dict(nested(each))
        for name, each in parts.items()
    }


def _as_tuple_or_dict(inner: dict[str, Any]) -> Any:
    return tuple(inner.values()) if all(name.isdigit() for name in inner) else inner


def _named(model: str, output: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(output, Tensor):
        return {"loss" if "loss" in names else "logits": output}
    if isinstance(output, Mapping):
        return {str(name): value for name, value in output.items()}
    if isinstance(output, Sequence):
        first = ("loss", "logits") if "loss" in names or EVERY not in names else ()
        return dict(
            zip(
                (*first, *(f"output_{i}" for i in range(len(first), len(output)))),
                output,
                strict=False,
            )
        )
    reason = f"its forward returns a {type(output).__name__}"
    raise TraceError(
        "model", model, reason, "Return a tensor (the loss), a tuple (loss first) or a dict"
    )


def _check(model: str, outputs: Mapping[str, Any], names: Sequence[str], remedy: str) -> None:
    requested = [name for name in names if name != EVERY and not name.startswith(NOT)]
    missing = [name for name in requested if outputs.get(name) is None]
    if missing:
        reason = f"its forward returns no {', '.join(missing)}, only {', '.join(outputs)}"
        raise TraceError(
            "model",
            model,
            reason,
            remedy if "loss" in missing else f"Ask for {' or '.join(outputs)}",
        )
    if "loss" in names and not isinstance(outputs["loss"], Tensor):
        reason = f"its loss is a {type(outputs['loss']).__name__}"
        raise TraceError("model", model, reason, "Return a loss that is a tensor")
    if "loss" in names and outputs["loss"].numel() != 1:
        reason = f"its loss has the shape {tuple(outputs['loss'].shape)}"
        raise TraceError("model", model, reason, "Return a loss of one value, the mean or the sum")


def _selected(
    model: str, outputs: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    every = [name for name in outputs if name != "loss" and NOT + name not in names]
    for name in names:
        for each in every if name == EVERY else [] if name.startswith(NOT) else [name]:
            yield from _leaves(model, each, outputs[each])


def _leaves(model: str, name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(model, f"{name}.{key}", each)
    elif value is not None:
        reason = f"{name} is a {type(value).__name__}, and a graph returns tensors"
        raise TraceError(
            "output of", model, reason, "Leave it out: name the others in prediction_outputs"
        )
