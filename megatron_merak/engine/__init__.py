"""A model under a plan for programs with a loop of their own: forwards, backwards, steps, weights,
generation.
"""

from .engine import Engine, Passed
from .losses import token_logprobs

__all__ = ["Engine", "Passed", "token_logprobs"]
