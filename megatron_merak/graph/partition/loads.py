"""The parameters, FLOPs and output bytes of each unit of a chain, without tensor parallelism."""

from dataclasses import dataclass

from torch.fx import Node

from ..ir.nodes import nbytes
from ..ir.operators import flops
from .cut import Chain


@dataclass(frozen=True)
class Load:
    """The load of one unit.

    flops:        FLOPs of its forward.
    output_bytes: bytes of the values that it passes on; for the last unit, of the model's outputs.
    parameters:   names of the parameters that it is the first to use.
    shared:       names of those that an earlier unit uses too.
    """

    flops: int
    output_bytes: int
    parameters: tuple[str, ...]
    shared: tuple[str, ...]


def unit_loads(chain: Chain) -> tuple[Load, ...]:
    """Return the load of every unit, for batches of the captured shape."""
    outputs: list[Node] = [
        x for node, kind in chain.kinds.items() if kind == "output" for x in node.all_input_nodes
    ]
    seen: dict[str, bool] = {}
    loads = []
    for unit, crossing, names in zip(
        chain.units, (*chain.crossing, outputs), chain.parameters, strict=True
    ):
        own = tuple(name for name in names if name not in seen)
        shared = tuple(name for name in names if name in seen)
        loads.append(Load(sum(map(flops, unit)), sum(map(nbytes, crossing)), own, shared))
        seen |= dict.fromkeys(names, True)
    return tuple(loads)
