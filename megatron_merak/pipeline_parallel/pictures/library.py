"""The library that draws pictures comes with an extra; what writes text, pages and traces does without."""

import importlib.util

from megatron_merak.errors import ConfigError


def check_drawing(what: str, value: object) -> None:
    """Raises ConfigError, of ``what`` asked for a picture with ``value``, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        reason = "pictures are drawn by matplotlib, which is not installed"
        raise ConfigError(what, value, reason, "Install it: pip install 'megatron-merak[pictures]'")
