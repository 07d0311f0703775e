"""Megatron-LM flags that are no settings here: they change nothing, have another name, or are
refused.
"""

from .refused import FAMILIES, NOT_YET, REFUSED, RENAMED, remedy
from .taken import TAKEN, Taken, without_effect

__all__ = [
    "FAMILIES",
    "NOT_YET",
    "REFUSED",
    "RENAMED",
    "TAKEN",
    "Taken",
    "remedy",
    "without_effect",
]
