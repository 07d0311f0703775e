"""Unknown keywords of dataclasses."""

import dataclasses
import difflib
import functools
from collections.abc import Callable

from ...errors import ConfigError

# Settings of the native model alone, and why a captured one has none of them.
OF_THE_MODEL = {"fp32_residual_connection": "the model's own code decides in which dtype it adds"}


def checked(init: Callable) -> Callable:
    """Return ``init`` so that an unknown keyword raises a ConfigError that names the nearest field."""

    @functools.wraps(init)
    def checked(self, *values, **named):
        known = [each.name for each in dataclasses.fields(self) if each.init]
        for name in named:
            if name in OF_THE_MODEL:
                raise ConfigError(name, repr(named[name]), OF_THE_MODEL[name], "Leave it out")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"Did you mean {near[0]}" if near else "See transformers.TrainingArguments"
                raise ConfigError(name, repr(named[name]), "there is no such training argument", remedy)
        init(self, *values, **named)

    return checked
