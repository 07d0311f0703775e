"""The optional library that draws pictures; text, pages and traces need none."""

import importlib.util

from megatron_merak.errors import ConfigError


def check_drawing(what: str, value: object) -> None:
    """Raise ConfigError, naming ``what`` and its ``value``, if a picture is requested without
    matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        reason = "pictures are drawn by matplotlib, which is not installed"
        raise ConfigError(what, value, reason, "Install it: pip install 'megatron-merak[pictures]'")
