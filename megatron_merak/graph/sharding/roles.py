"""Which parameters play the same role in different layers. What propagation learns of one, it
assumes of all.
"""

import re
from collections.abc import Iterator

from torch.fx import Node

from ..capture.captured import Captured
from ..ir.nodes import op_name


def roles(captured: Captured) -> dict[str, str]:
    """Return the role of every parameter that the graph reads.

    That is its name without numbers, its shape, the lines of the model's source that read it, and
    the operators that follow. ``l0.weight`` and ``l1.weight`` of one module have different roles.
    """
    readers: dict[str, list[Node]] = {name: [] for name in captured.shapes}
    for node in captured.module.graph.find_nodes(op="get_attr"):
        if node.target in readers:
            readers[str(node.target)] += node.users
    return {
        name: f"{_without_numbers(name)} {tuple(captured.shapes[name])} "
        f"{' '.join(dict.fromkeys(_uses(nodes)))}"
        for name, nodes in readers.items()
    }


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _uses(readers: list[Node]) -> Iterator[str]:
    for node in readers:
        yield (node.meta.get("stack_trace") or "").strip()
        yield op_name(node)
        yield ",".join(sorted(dict.fromkeys(map(op_name, node.users))))
