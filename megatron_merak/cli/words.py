"""How a command calls itself, and how it ends with a mistake of its user."""

import sys
from collections.abc import Container
from pathlib import Path


def program() -> str:
    """The name under which this command was started."""
    return Path(sys.argv[0]).name


def command_of(word: str, known: Container[str]) -> str:
    """Return the command of ours that a word names, with or without "merak-" in front; else the
    word, which may be a file.
    """
    short = word.removeprefix("merak-")
    return short if short in known and not Path(word).exists() else word


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
