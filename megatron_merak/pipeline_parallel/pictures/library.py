"""The optional library that draws pictures; text, pages and traces need none."""

from megatron_merak.errors import ConfigError
from megatron_merak.extras import installed_by, is_installed


def check_drawing(what: str, value: object) -> None:
    """Raise ConfigError, naming ``what`` and its ``value``, if a picture is requested without
    matplotlib.
    """
    if not is_installed("matplotlib"):
        reason = "pictures are drawn by matplotlib, which is not installed"
        raise ConfigError(what, value, reason, f"Install it: {installed_by('pictures')}")
