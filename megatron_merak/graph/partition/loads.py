"""What each unit of a chain holds, computes and hands on, without tensor parallelism."""

from dataclasses import dataclass

from torch.fx import Node

from ..ir.nodes import flops, nbytes
from .cut import Chain


@dataclass(frozen=True)
class Load:
    """Of one unit: ``flops`` of its forward, ``output_bytes`` that cross behind it (of the last: the outputs'), the
    names of the ``parameters`` that it is the first to use, and ``shared``, those that a unit before uses too."""

    flops: int
    output_bytes: int
    parameters: tuple[str, ...]
    shared: tuple[str, ...]


def unit_loads(chain: Chain) -> tuple[Load, ...]:
    """The load of every unit, for batches of the captured shape."""
    outputs: list[Node] = [x for node, kind in chain.kinds.items() if kind == "output" for x in node.all_input_nodes]
    seen: dict[str, bool] = {}
    loads = []
    for unit, crossing, names in zip(chain.units, (*chain.crossing, outputs), chain.parameters, strict=True):
        own = tuple(name for name in names if name not in seen)
        shared = tuple(name for name in names if name in seen)
        loads.append(Load(sum(map(flops, unit)), sum(map(nbytes, crossing)), own, shared))
        seen |= dict.fromkeys(names, True)
    return tuple(loads)
