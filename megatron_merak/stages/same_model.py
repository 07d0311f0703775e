"""Check that every rank was given the same model: names, shapes, config and code are compared with
the first rank's.
"""

import hashlib
import inspect
import json
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from ..checkpoint.hf import Source, source_of
from ..checkpoint.hf_names import aliases
from ..errors import ConfigError
from ..graph.capture.captured import Captured
from ..graph.capture.empty import is_fake
from ..parallel.agree import broadcast_json, gather_json, raise_together, together
from ..parallel.ranks import Members
from .model_config import ORIGIN

_SAMPLED = 8  # tensors of a checkpoint of which one row is compared
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def check_same_model(model: nn.Module, ranks: Members) -> None:
    """Check that the ranks have the same model, and copy the first rank's buffers to all.

    model: as the user built it on this rank; buffers whose values differ from the first rank's are
           overwritten.

    Collective over all ranks. Raises ConfigError on every rank, naming the first difference: class,
    config, code of a forward, or the shape, dtype or ``requires_grad`` of a tensor.
    """
    if ranks.control is None:
        return
    with together(ranks.control, "cpu"):
        facts = _facts(model)
    digests = gather_json(_digest(json.dumps(facts).encode()), ranks.control, "cpu")
    if len(dict.fromkeys(digests)) > 1:
        first = dict(broadcast_json(list(facts.items()), ranks.control, "cpu"))
        raise_together(_difference(facts, first), ranks.control, "cpu")
    _take_buffers(model, ranks)


def check_same_graph(captured: Captured, example: object, ranks: Members) -> None:
    """Raise ConfigError on every rank unless ranks whose first batch has the same shapes captured
    the same graph.

    example: what a capture depends on in the first batch, see ``shapes_of``.

    This detects attributes that differ and are not in the config: they are constants of the graph.
    Collective over all ranks.
    """
    if ranks.control is None:
        return
    digests = gather_json(
        [_digest(repr(example).encode()), _graph_digest(captured.module)], ranks.control, "cpu"
    )
    first: dict[str, tuple[int, str]] = {}
    error = None
    for rank, (shapes, graph) in enumerate(digests):
        other, expected = first.setdefault(shapes, (rank, graph))
        if graph != expected:
            reason = (
                f"its forward computes something else on rank {rank} than on rank {other}, "
                "from batches of the "
            )
            reason += "same shapes: an attribute or a constant of a module differs"
            error = error or ConfigError(
                "model", "(captured)", reason, "Build the same model on every rank"
            )
    if error is not None:
        raise error


def _facts(model: nn.Module) -> dict[str, str]:
    """What must be the same on every rank, as name -> value."""
    facts = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        facts |= {
            f"config.{k}": _stable_repr(v)
            for k, v in sorted(config.to_dict().items())
            if k not in ORIGIN
        }
    source = source_of(model)
    facts["where the weights come from"] = (
        "the model" if source is None else "a directory that every rank reads"
    )
    if source is not None:
        for name in source.names():
            facts[f"stored tensor {name}"] = f"{source.shape(name)}, {source.dtype(name)}"
        facts |= _stored_samples(source)
    for name, p in model.named_parameters():
        facts[f"parameter {name}"] = f"{tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
    facts |= {
        f"tied parameter {name}": f"tied to {canonical}"
        for name, canonical in aliases(model).items()
    }
    for name, buffer in model.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(buffer.shape)}, {buffer.dtype}"
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        facts[f"forward of {kind.__module__}.{kind.__qualname__}"] = _code(kind)
    return facts


def _stable_repr(value: object) -> str:
    """A ``repr`` that is the same in every process: sets are sorted, and addresses left out."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key!r}: {_stable_repr(each)}" for key, each in value.items()) + "}"
        )
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_stable_repr, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_stable_repr, value)) + "]"
    return _ADDRESS.sub("", repr(value))


def _stored_samples(source: Source) -> dict[str, str]:
    """Digests of the first row of some tensors: these differ between models with other weights."""
    names = sorted(name for name in source.names() if source.shape(name))
    chosen = names[:: max(1, len(names) // _SAMPLED)][:_SAMPLED]
    rows = {name: source.read(name, 0, ((0, min(1, source.shape(name)[0])),)) for name in chosen}
    source.close()
    return {
        f"values of stored tensor {name}": "sha256 " + _digest(_bytes(row))[:16]
        for name, row in rows.items()
    }


def _code(kind: Any) -> str:
    try:
        return "source " + _digest(inspect.getsource(kind.forward).encode())[:16]
    except (OSError, TypeError):
        return "without source"


def _difference(own_digests: dict[str, str], first: dict[str, str]) -> ConfigError | None:
    for name in (*first, *own_digests):
        own = own_digests.get(name)
        expected = first.get(name)
        if own != expected:
            reason = f"it is {expected} on the first rank"
            if expected is None:
                reason = "the first rank's model does not have it"
            value = "(absent)" if own is None else own
            return ConfigError(
                f"model, {name}", value, reason, "Build the same model on every rank"
            )
    return None


def _graph_digest(module: GraphModule) -> str:
    digest = hashlib.sha256(_ADDRESS.sub("", str(module.graph)).encode())
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target, None) if "." not in node.target else None
        if isinstance(value, torch.Tensor) and not is_fake(value):
            digest.update(_bytes(value))
    return digest.hexdigest()


@torch.no_grad()
def _take_buffers(model: nn.Module, ranks: Members) -> None:
    buffers = [buffer for _, buffer in model.named_buffers() if not is_fake(buffer)]
    every = gather_json([_digest(_bytes(buffer)) for buffer in buffers], ranks.control, "cpu")
    for buffer, *digests in zip(buffers, *every, strict=True):
        if len(dict.fromkeys(digests)) == 1:
            continue
        values = buffer.detach().cpu().contiguous().clone()
        dist.broadcast(values.reshape(-1).view(torch.uint8), group=ranks.control, group_src=0)
        if torch._debug_has_internal_overlap(buffer) == 1:  # an expanded tensor
            buffer.data = values.to(buffer.device)
        else:
            buffer.copy_(values)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
