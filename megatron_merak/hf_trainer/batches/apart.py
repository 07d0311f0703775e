"""Copies of datasets and collators to examine samples with, so that training finds the originals
untouched.
"""

import copy
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CONTAINERS = (list, dict, set)
_DEPTH = 3
_LONGEST = 64


def apart(value: Any) -> Any:
    """Return a shallow copy of a dataset or collator with its own generators, counters and nested
    datasets or collators.

    value: any object. Functions, objects that cannot be copied and those that close something at
           their end are returned themselves.
    """
    return _apart(value, _DEPTH)


def copied(samples: list) -> list:
    """Return samples that a collator may change."""
    try:
        return copy.deepcopy(samples)
    except Exception:  # whatever an open file or a decoder among them raises
        return [copy.copy(sample) for sample in samples]


def _apart(value: Any, depth: int) -> Any:
    owner = getattr(value, "__self__", None)
    if depth == 0 or isinstance(value, type | torch.nn.Module):
        return value
    if owner is not None and hasattr(value, "__func__"):
        copied = _apart(owner, depth)
        return value if copied is owner else value.__func__.__get__(copied)
    if (
        not hasattr(value, "__dict__")
        or hasattr(type(value), "__del__")
        or type(value).__name__ == "function"
    ):
        return value
    try:
        copied = copy.copy(value)
        for name, each in list(vars(copied).items()):
            if isinstance(each, _GENERATORS):
                vars(copied)[name] = copy.deepcopy(each)
            elif isinstance(each, Dataset) or _collates(each):
                vars(copied)[name] = _apart(each, depth - 1)
            elif isinstance(each, _CONTAINERS) and len(each) <= _LONGEST:
                vars(copied)[name] = copy.copy(each)
    except Exception:  # whatever the class's own way of being copied raises
        return value
    return copied


def _collates(value: Any) -> bool:
    return callable(value) and not isinstance(value, PreTrainedTokenizerBase)
