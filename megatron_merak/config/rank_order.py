"""The order of ranks over the axes of parallelism, as in Megatron-LM: "tp-cp-ep-dp-pp", the first
axis varying fastest.
"""

from ..errors import ConfigError

AXES = ("tp", "cp", "dp", "pp")
DEFAULT = "-".join(AXES)
PIPELINE_INSIDE = "tp-cp-pp-dp"  # what Megatron-LM's --use-tp-pp-dp-mapping means
REMEDY = "Join tp, dp and pp by dashes, the innermost first, like tp-dp-pp or tp-pp-dp"
_ALONE = ("cp", "ep")  # one rank stands along each of these, so they need no place


def mistake(order: str) -> str:
    """Return what is wrong with an order; "" if it is valid."""
    names = order.lower().split("-")
    if unknown := [name for name in names if name not in (*AXES, *_ALONE)]:
        return f"there is no axis {unknown[0] or '(empty)'}"
    if twice := [name for name in names if names.count(name) > 1]:
        return f"{twice[0]} is named twice"
    if missing := [name for name in AXES if name not in (*names, *_ALONE)]:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    return ""


def normal(order: str | None, context_ranks: int = 1) -> str:
    """Return an order of all axes in ``AXES``, the same text for equal placements; None is the
    default.

    cp follows tp if it is not named, and if it has one rank (``context_ranks``).
    """
    placed = [axis for axis in AXES if axis != "cp" or context_ranks > 1]
    named = [axis for axis in (order or DEFAULT).lower().split("-") if axis in placed]
    if "cp" not in named:
        named.insert(named.index("tp") + 1, "cp")
    return "-".join(named)


def check_order(order: str | None, pipeline_inside: bool, name: str) -> None:
    """Raise ConfigError for an invalid order, and one that contradicts --use-tp-pp-dp-mapping
    (``pipeline_inside``).

    order: None if unset.
    name:  its name for the user.
    """
    if order is None:
        return
    if not isinstance(order, str):
        raise ConfigError(name, repr(order), "it is not text", REMEDY)
    if reason := mistake(order):
        raise ConfigError(name, order, reason, REMEDY)
    if pipeline_inside and normal(order) != PIPELINE_INSIDE:
        reason = f"contradicts --use-tp-pp-dp-mapping, which is {PIPELINE_INSIDE}"
        raise ConfigError(name, order, reason, "Give only one of them")
