"""Whether every rank was given the same model: names, shapes, config and code compared with those of the first rank."""

import hashlib
import inspect
import json
import re

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
from ..parallel.mesh import Mesh

_ASIDE = ("_name_or_path", "transformers_version", "architectures", "dtype")  # of a config: notes of where it has been
_SAMPLED = 8  # stored tensors of which a row is compared
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def check_same_model(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank the first one's buffers, once the ranks agree on what the model is.

    model: as the user built it on this rank; where a buffer's values differ from the first rank's it is overwritten.
    Collective over all ranks. Raises ConfigError on every rank, naming the first difference: class, config, code of a
    forward, or the shape, dtype or ``requires_grad`` of a tensor.
    """
    if mesh.control is None:
        return
    with together(mesh.control, "cpu"):
        facts = _facts(model)
    digests = gather_json(_digest(json.dumps(facts).encode()), mesh.control, "cpu")
    if len(dict.fromkeys(digests)) > 1:
        first = dict(broadcast_json(list(facts.items()), mesh.control, "cpu"))
        raise_together(_difference(facts, first), mesh.control, "cpu")
    _take_buffers(model, mesh)


def check_same_graph(captured: Captured, example: object, mesh: Mesh) -> None:
    """Raises ConfigError on every rank unless ranks whose example has the same shapes captured the same graph.

    example: what of the first batch a capture depends on. Attributes that no config tells of are constants of the
    graph. Collective over all ranks.
    """
    if mesh.control is None:
        return
    found = gather_json([_digest(repr(example).encode()), _graph_digest(captured.module)], mesh.control, "cpu")
    first: dict[str, tuple[int, str]] = {}
    error = None
    for rank, (shapes, graph) in enumerate(found):
        other, expected = first.setdefault(shapes, (rank, graph))
        if graph != expected:
            reason = f"its forward computes something else on rank {rank} than on rank {other}, from batches of the "
            reason += "same shapes: an attribute or a constant of a module differs"
            error = error or ConfigError("model", "(captured)", reason, "Build the same model on every rank")
    if error is not None:
        raise error


def _facts(model: nn.Module) -> dict[str, str]:
    """What must be the same on every rank: a name of each fact -> its value."""
    facts = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    config = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        facts |= {f"config.{k}": _told(v) for k, v in sorted(config.to_dict().items()) if k not in _ASIDE}
    source = source_of(model)
    facts["where the weights come from"] = "the model" if source is None else "a directory that every rank reads"
    for name in () if source is None else source.names():
        facts[f"stored tensor {name}"] = f"{source.shape(name)}, {source.dtype(name)}"
    if source is not None:
        facts |= _stored_samples(source)
    for name, held in model.named_parameters():
        facts[f"parameter {name}"] = f"{tuple(held.shape)}, {held.dtype}, requires_grad={held.requires_grad}"
    facts |= {f"tied parameter {name}": f"tied to {canonical}" for name, canonical in aliases(model).items()}
    for name, held in model.named_buffers():
        facts[f"buffer {name}"] = f"{tuple(held.shape)}, {held.dtype}"
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        facts[f"forward of {kind.__module__}.{kind.__qualname__}"] = _code(kind)
    return facts


def _told(value: object) -> str:
    """What is the same in every process that holds the same value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_told(each)}" for key, each in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_told, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_told, value)) + "]"
    return _ADDRESS.sub("", repr(value))


def _stored_samples(source: Source) -> dict[str, str]:
    """Digests of the first row of some tensors: other weights of one architecture differ in all of them."""
    names = sorted(name for name in source.names() if source.shape(name))
    chosen = names[:: max(1, len(names) // _SAMPLED)][:_SAMPLED]
    rows = {name: source.read(name, 0, ((0, min(1, source.shape(name)[0])),)) for name in chosen}
    source.close()
    return {f"values of stored tensor {name}": "sha256 " + _digest(_bytes(row))[:16] for name, row in rows.items()}


def _code(kind: type) -> str:
    try:
        return "source " + _digest(inspect.getsource(kind.forward).encode())[:16]
    except (OSError, TypeError):
        return "without source"


def _difference(mine: dict[str, str], first: dict[str, str]) -> ConfigError | None:
    for name in (*first, *mine):
        here, there = mine.get(name), first.get(name)
        if here != there:
            reason = "the first rank's model does not have it" if there is None else f"it is {there} on the first rank"
            value = "(absent)" if here is None else here
            return ConfigError(f"model, {name}", value, reason, "Build the same model on every rank")
    return None


def _graph_digest(module: GraphModule) -> str:
    digest = hashlib.sha256(_ADDRESS.sub("", str(module.graph)).encode())
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target, None) if "." not in node.target else None
        if isinstance(value, torch.Tensor) and not is_fake(value):
            digest.update(_bytes(value))
    return digest.hexdigest()


@torch.no_grad()
def _take_buffers(model: nn.Module, mesh: Mesh) -> None:
    buffers = {name: held for name, held in model.named_buffers() if not is_fake(held)}
    found = gather_json([_digest(_bytes(held)) for held in buffers.values()], mesh.control, "cpu")
    for held, *digests in zip(buffers.values(), *found, strict=True):
        if len(dict.fromkeys(digests)) == 1:
            continue
        values = held.detach().cpu().contiguous().clone()
        dist.broadcast(values.reshape(-1).view(torch.uint8), group=mesh.control, group_src=0)
        if torch._debug_has_internal_overlap(held) == 1:  # an expanded one
            held.data = values.to(held.device)
        else:
            held.copy_(values)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
