"""The result of a capture, which all later passes read: one graph of the unsharded model, and its
parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from megatron_merak.graph.capture.guards import Guards
from megatron_merak.ops.four_bit import FourBit


@dataclass(frozen=True)
class Origin:
    """How a capture was traced (``attempt``), and a hash of the traced program (``digest``)."""

    attempt: Any
    digest: str


@dataclass(frozen=True, eq=False)
class Captured:
    """A model's forward for batches of one shape, as one graph; its parameters have no memory.

    ``module.graph`` consists of the following nodes. All but the output have their value in
    ``meta["val"]``, which is real for constants and fake for all else.

    - placeholders: one per tensor of the batch, named by its key.
    - get_attr nodes: a parameter under its HuggingFace name (for tied ones, the first in
      ``named_parameters``), or a
      constant (buffer, table) that ``module`` has as a real tensor.
    - call_function nodes: aten overloads, ``operator.getitem``, higher-order ops and
      ``opaque.CustomFunction``. There
      is no dead code and no assertion; an op works in place only where another view shows what it
      writes.
    - one output whose argument is a tuple of nodes, named by ``outputs``.

    shapes, dtypes: shape and dtype of every parameter that the graph reads, by name.
    trainable:      names of the parameters that require a gradient.
    untouched:      those of them that get none: what reads them is detached, or in
                    ``torch.no_grad``.
    four_bit:       how those are stored that are in 4 bits; ``shapes`` and ``dtypes`` are of the
                    values that they stand for.
    aliases:        other names of tied parameters -> the name in use.
    buffers:        names of the constants that are buffers in the model's state dict.
    how:            the attempt that succeeded.
    notes:          what a user should know, in sentences.
    guards:         conditions on the values of a batch for which this graph is right; None if there
                    are none.
    origin:         to compare a trace at another length with; None if that is impossible.
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
    untouched: frozenset[str] = frozenset()
    four_bit: Mapping[str, FourBit] = field(default_factory=dict)
