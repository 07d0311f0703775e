"""Settings that a script passes as a mapping, as JSON or as the name of a JSON file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError


def settings_of(name: str, settings: Any) -> Mapping[str, Any]:
    """Return keys and values of the argument ``name``; empty if it is not set. Raises
    ConfigError.
    """
    if isinstance(settings, str) and settings:
        try:
            is_json = settings.lstrip().startswith("{")
            settings = json.loads(
                settings if is_json else Path(settings).read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                name, settings, f"it cannot be read ({error})", "Give a dict, or name a JSON file"
            ) from error
    if settings and not isinstance(settings, Mapping):
        raise ConfigError(
            name, repr(settings), "it is not a mapping", "Give a dict, or name a JSON file"
        )
    return settings or {}


def asks_nothing(value: Any) -> bool:
    """Whether a section of settings is empty or disabled: ``{"enabled": false}``, or no value is
    true.
    """
    if isinstance(value, Mapping):
        return (
            not value["enabled"]
            if "enabled" in value
            else all(asks_nothing(each) for each in value.values())
        )
    return not value
