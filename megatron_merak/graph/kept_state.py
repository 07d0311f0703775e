"""What an optimizer keeps of the parameters of a unit, where it is not the same of all of them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .capture.captured import Captured

# A parameter's name and shape -> bytes that the optimizer keeps of one of its values.
StateOf = Callable[[str, tuple[int, ...]], float]


def kept_state(
    own: Iterable[str], shared: Iterable[str], sizes: Mapping[str, int], captured: Captured, state_of: StateOf | None
) -> dict[str, Any]:
    """What the optimizer keeps of a unit's trained parameters, its own and those that it shares; see ``Unit``."""
    if state_of is None:
        return {}
    trained = [name for name in own if name in captured.trainable]
    kept = sum(sizes[name] * state_of(name, captured.shapes[name]) for name in trained)
    values = sum(sizes[name] for name in trained)
    tied = ((name, state_of(name, captured.shapes[name])) for name in shared if name in captured.trainable)
    return {"state_bytes": kept / values if values else None, "tied_state_bytes": tuple(tied)}
