"""Megatron-LM flags that are no settings here: they change nothing, have another name, or are
refused.
"""

from .preprocessing import PREPROCESSING_REFUSED, PREPROCESSING_TAKEN
from .refused import FAMILIES, NOT_YET, REFUSED, RENAMED, changes_numbers, remedy
from .taken import FORMER, TAKEN, Taken, without_effect

__all__ = [
    "FAMILIES",
    "FORMER",
    "NOT_YET",
    "PREPROCESSING_REFUSED",
    "PREPROCESSING_TAKEN",
    "REFUSED",
    "RENAMED",
    "TAKEN",
    "Taken",
    "changes_numbers",
    "remedy",
    "without_effect",
]
