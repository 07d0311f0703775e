"""Every model type that transformers can train, as a tiny specimen: discovered, never listed by
hand.
"""

from .heads import Head, heads
from .specimen import Specimen, tiny

__all__ = ["Head", "Specimen", "heads", "tiny"]
