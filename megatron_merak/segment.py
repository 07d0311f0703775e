"""The segment: the compute between two tensor-parallel collectives, and the only thing that the
runtime runs.

A unit of the model is a list of segments. Replicated segments (residual add, norm) alternate with
sharded ones (matmuls, attention). The collectives between them are not part of any segment: they
are the edges ``In.collective`` and ``Out.collective``, so that whoever runs the list decides when
to launch and when to wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch


class Common(dict[str, torch.Tensor]):
    """Values that all segments of one micro-batch share: from the batch, without gradient.

    seed: sets the random stream of a segment; called before each one that draws random numbers.
    """

    def __init__(
        self, values: Mapping[str, torch.Tensor], seed: "Callable[[Segment], None] | None" = None
    ):
        super().__init__(values)
        self.seed = seed or (lambda segment: None)


@dataclass(frozen=True)
class Crossing:
    """A value that enters or leaves a stage. grad: whether it gets a gradient."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = True


class LayerAxis(StrEnum):
    """The ranks of a layer that share its work: tensor-parallel ones divide its weights, context-
    parallel ones sequences; those of its copies that divide experts exchange rows of tokens. Of
    context-parallel ones neighbours may exchange heads (inner), and those at the same place of each
    such group pass keys and values on (outer).
    """

    TP = "tp"
    CP = "cp"
    INNER = "inner cp"
    OUTER = "outer cp"
    EP = "ep"


class Collective(StrEnum):
    """What the ranks of an axis do with a value, or with its gradient. NONE is false.

    ALL_REDUCE       each rank has a partial sum and gets the sum
    REDUCE_SCATTER   each rank has a partial sum and gets its part of the sum along the sequence (dimension 1)
    ALL_GATHER       each rank has its part along the sequence and gets the full tensor
    STACK            an all-gather in a new first dimension
    EXCHANGE         each rank has a piece for every rank, [n, ...], and gets its piece of all
    ROWS             each rank has some rows for every rank, and gets those that are for it
    ROTATE           each rank gets what the one before it has
    ROTATE_BACK      each rank gets what the one behind it has
    """

    NONE = ""
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    STACK = "stack"
    EXCHANGE = "exchange"
    ROWS = "exchange of rows"
    ROTATE = "rotation"
    ROTATE_BACK = "rotation back"


@dataclass(frozen=True)
class In:
    """A value that a segment reads.

    collective: of its gradient, after the backward.
    grad:       whether it takes part in differentiation.
    regather:   whether it was all-gathered; linear layers that read it keep this rank's shard for
                the backward, which gathers it again.
    axis:       of the ranks of the collective.
    """

    value: str
    collective: Collective = Collective.NONE
    grad: bool = True
    regather: bool = False
    axis: LayerAxis = LayerAxis.TP


@dataclass(frozen=True)
class Out:
    """A value that a segment computes.

    collective: of the value, before it is read.
    inplace:    no backward reads the value that the segment returned, so an all-reduce may
                overwrite it.
    counts:     of ROWS, the name of a value that the segment reads or computes: how many rows are
                sent to each rank and got of each, int64 [2, n].
    axis:       of the ranks of the collective.
    """

    value: str
    collective: Collective = Collective.NONE
    inplace: bool = False
    counts: str = ""
    axis: LayerAxis = LayerAxis.TP


@dataclass(frozen=True, eq=False)
class Segment:
    """``fn(common, *ins) -> tuple of outs``.

    unit:           global index of its unit.
    index:          number inside that unit, by which its random numbers are drawn: two neighbours
                    may have the same if only one of them draws any.
    sharded:        whether it computes on tensor-parallel shards: its randomness differs per rank,
                    and the gradient of a replicated parameter in it is partial.
    random:         whether it draws random numbers in training.
    parameters:     every parameter that ``fn`` reads.
    common:         names of values from the batch, without gradient.
    along_sequence: whether it is sharded in that it computes on parts of sequences: all ranks then
                    draw the same random numbers, and each uses its part.
    own_context:    whether its randomness differs between context-parallel ranks.
    """

    unit: int
    index: int
    fn: Callable[..., tuple[torch.Tensor, ...]]
    ins: tuple[In, ...]
    outs: tuple[Out, ...]
    parameters: tuple[torch.nn.Parameter, ...] = ()
    sharded: bool = False
    random: bool = False
    along_sequence: bool = False
    own_context: bool = False

    def random_shard(self, tp_rank: int, cp_rank: int, tp: int) -> int:
        """Return the number of a rank's random numbers among those of the ranks of a layer."""
        own_weights = self.sharded and not self.along_sequence
        return (tp_rank if own_weights else 0) + (cp_rank * tp if self.own_context else 0)
