"""Colours and words of all pictures of a pipeline, for any colour vision (Okabe, Ito)."""

from collections.abc import Mapping
from types import MappingProxyType

from megatron_merak.pipeline_parallel.ops import Kind

# Shades of the stages of a rank in turn, so that virtual stages can be told apart.
FACES: Mapping[Kind, tuple[str, str, str, str]] = MappingProxyType(
    {
        Kind.F: ("#2F7FC1", "#86BBE3", "#174C78", "#C6DFF2"),
        Kind.B: ("#E69F00", "#F4CE7C", "#9C6B00", "#FAE8C0"),
        Kind.R: ("#B5659A", "#DDB0CC", "#733A60", "#F1DCE9"),
        Kind.W: ("#12936F", "#84CDB6", "#0A5540", "#C8E8DE"),
    }
)
SHADES = 4  # of each kind
MESSAGES: Mapping[Kind, str] = MappingProxyType({Kind.SEND_F: "#56B4E9", Kind.SEND_B: "#D55E00"})
NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.F: "forward",
        Kind.B: "backward",
        Kind.R: "recompute",
        Kind.W: "weight gradient",
        Kind.SEND_F: "activation sent",
        Kind.SEND_B: "gradient sent",
    }
)
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def ink(face: str) -> str:
    """Return black or white, whichever contrasts more with a face colour (relative luminance of
    WCAG 2).
    """
    channels = [int(face[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#FFFFFF" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.06 else "#14181D"


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit in which a time reads best."""
    return next((unit for unit in _UNITS if seconds >= unit[0]), _UNITS[-1])


def time_text(seconds: float) -> str:
    scale, unit = time_unit(seconds)
    return f"{seconds / scale:.4g} {unit}"
