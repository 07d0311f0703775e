"""What a capture hands to every later pass: one graph of the serial model, and the names of its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from megatron_merak.graph.capture.guards import Guards


@dataclass(frozen=True)
class Origin:
    """How a capture was traced, and a digest of what came out."""

    attempt: Any
    digest: str


@dataclass(frozen=True, eq=False)
class Captured:
    """A model's forward for batches of one shape, as one graph in which no parameter has memory.

    ``module.graph`` holds, every node but the output with its fake (constants: real) value in ``meta["val"]``:

    - placeholders, one per tensor of the batch, named as its key;
    - get_attr nodes: a parameter under its HuggingFace name (of tied ones, the first in ``named_parameters``), or a
      constant (buffer, table) that ``module`` holds as a real tensor;
    - call_function nodes: aten overloads, ``operator.getitem``, opaque higher-order ops and ``opaque.CustomFunction``.
      No dead code, no assertions; an operation works in place only where a view makes that visible elsewhere;
    - one output whose argument is a tuple of nodes, named by ``outputs``.

    shapes, dtypes: of every parameter that the graph reads, by name. trainable: those that require a gradient.
    aliases: further names of tied parameters -> the name in use. buffers: names of the constants that are buffers in
    the model's state dict. how: the attempt that succeeded. notes: what a user should know, in sentences.
    guards: what must hold of a batch for this graph to be the model's, beside its shapes; None: nothing.
    origin: for a trace that is to give the same; None: none can be compared with it.
    """

    module: GraphModule
    outputs: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    trainable: frozenset[str]
    aliases: Mapping[str, str]
    buffers: tuple[str, ...]
    how: str
    notes: tuple[str, ...] = ()
    guards: Guards | None = None
    origin: Origin | None = None
