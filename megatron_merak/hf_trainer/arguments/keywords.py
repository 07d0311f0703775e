"""Unknown keywords of dataclasses."""

import dataclasses
import difflib
import functools
from collections.abc import Callable

from ...errors import ConfigError

# Flags that are no arguments: why, and what to do.
OF_COMMANDS = {
    "fp32_residual_connection": (
        "the model's own code decides in which dtype it adds",
        "Leave it out",
    ),
}


def checked(init: Callable) -> Callable:
    """Return ``init`` so that an unknown keyword raises a ConfigError that names the
    nearest field.
    """

    @functools.wraps(init)
    def checked(self, *values, **named):
        known = [each.name for each in dataclasses.fields(self) if each.init]
        for name in named:
            if name in OF_COMMANDS:
                raise ConfigError(name, repr(named[name]), *OF_COMMANDS[name])
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"Did you mean {near[0]}" if near else "See transformers.TrainingArguments"
                raise ConfigError(
                    name, repr(named[name]), "there is no such training argument", remedy
                )
        init(self, *values, **named)

    return checked
