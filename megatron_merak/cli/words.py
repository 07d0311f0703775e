"""How a command calls itself, and how it ends with a mistake of its user."""

import sys
from pathlib import Path


def program() -> str:
    """The name under which this command was started."""
    return Path(sys.argv[0]).name


def described(text: str, command: str) -> str:
    """A command's description whose examples are of ``command`` (merak-plan), with what started it
    in their place.
    """
    name = sys.argv[0]
    started = f"python {name}" if name.endswith(".py") else program()
    return text.replace(command, started)


def error_text(error: Exception) -> str:
    """An error and its notes, as one text."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
