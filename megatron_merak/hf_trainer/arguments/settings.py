"""Settings that a script gives as a mapping, as JSON or as the name of a JSON file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError


def settings_of(name: str, given: Any) -> Mapping[str, Any]:
    """The keys and values of the argument ``name``; none where it is not given. Raises ConfigError."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                name, given, f"it cannot be read ({error})", "Give a dict, or name a JSON file"
            ) from error
    if given and not isinstance(given, Mapping):
        raise ConfigError(name, repr(given), "it is not a mapping", "Give a dict, or name a JSON file")
    return given or {}


def asks_nothing(value: Any) -> bool:
    """Whether a section of settings is empty or switched off: ``{"enabled": false}``, or nothing in it says yes."""
    if isinstance(value, Mapping):
        return not value["enabled"] if "enabled" in value else all(asks_nothing(each) for each in value.values())
    return not value
