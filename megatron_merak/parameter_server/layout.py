"""What a server must know of the parameters of its piece."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from ..errors import PlanError
from ..parallel.buffers import ALIGNMENT, ParameterBuffer
from ..plan.stored import build
from ..strict_json import parse

Span = tuple[int, int]


@dataclass(frozen=True)
class PieceLayout:
    """Elements of a flat buffer, numbered from the start of the piece, and how they are updated.

    elements:      of the piece.
    dtype:         of the weights that workers compute with.
    groups:        (start, stop, group); elements of a group have the same learning rate and weight
                   decay.
    counted:       spans whose gradient counts in the norm.
    copies:        spans that count at another place.
    betas, eps:    of AdamW.
    workers:       how many there are.
    sync:          whether they take steps together.
    max_staleness: of a gradient that is still applied, in updates of the piece since its weights
                   were read.
    """

    elements: int
    dtype: str
    groups: tuple[tuple[int, int, int], ...]
    counted: tuple[Span, ...]
    copies: tuple[Span, ...]
    betas: tuple[float, float]
    eps: float
    workers: int
    sync: bool
    max_staleness: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PieceLayout":
        """Parse what ``to_json`` returns. Raises PlanError for any other text."""
        remedy = "Start workers and servers of one version, and let nobody else reach their ports"
        try:
            values = parse(text)
        except ValueError as error:
            raise PlanError(
                "layout", f"{text[:60]!r}", f"it is no JSON ({error})", remedy
            ) from error
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
            raise PlanError("layout", f"{text[:60]!r}", "it has other fields than a layout", remedy)
        try:
            return build(cls, values)
        except PlanError as error:
            raise PlanError("layout", f"{text[:60]!r}", error.reason, remedy) from error


def pieces_of(size: int, servers: int) -> list[Span]:
    """Return the elements [start, stop) of a buffer for each of its servers: equal parts, up to
    alignment.
    """
    step = -(-size // (servers * ALIGNMENT)) * ALIGNMENT
    return [(min(number * step, size), min((number + 1) * step, size)) for number in range(servers)]


def layout_of(
    buffer: ParameterBuffer,
    piece: Span,
    *,
    dtype: str,
    betas: tuple[float, float],
    eps: float,
    workers: int,
    sync: bool,
    max_staleness: int,
) -> PieceLayout:
    """Return the layout of elements ``piece`` of a buffer that is not sharded."""
    groups = tuple(
        (*span, group) for low, high, group in buffer.ranges for span in _within((low, high), piece)
    )
    counted, copies = (
        tuple(span for low_high in _spans(buffer, which) for span in _within(low_high, piece))
        for which in (True, False)
    )
    return PieceLayout(
        elements=piece[1] - piece[0],
        dtype=dtype,
        groups=groups,
        counted=counted,
        copies=copies,
        betas=betas,
        eps=eps,
        workers=workers,
        sync=sync,
        max_staleness=max_staleness,
    )


def _spans(buffer: ParameterBuffer, counted: bool) -> Iterable[Span]:
    return ((slot.start, slot.stop) for slot in buffer.slots.values() if slot.counted == counted)


def _within(span: Span, piece: Span) -> list[Span]:
    start = max(span[0], piece[0])
    stop = min(span[1], piece[1])
    return [(start - piece[0], stop - piece[0])] if start < stop else []
