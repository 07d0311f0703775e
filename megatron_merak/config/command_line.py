"""What argparse finds wrong with a command line, as a typed error: which word, its value, why, and
what to do.

argparse says it in sentences below a command's usage; they are read here and nowhere else.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import ConfigError
from .settings import nearest

_KINDS = (
    ("int", "a whole number", "Write it in digits, like 8"),
    ("float", "a number", "Write it like 0.1 or 1e-4"),
)
_MISSING = "the following arguments are required: (.*)|one of the arguments (.*) is required"


class CommandParser(argparse.ArgumentParser):
    """A parser whose `parse_args` ends a wrong command line with one line and status 2.

    `parse_known_args` raises argparse's own error or a ConfigError: see `mistake`.

    answer: returns the error of a flag that is known elsewhere, None of others.
    """

    def __init__(
        self, answer: Callable[[str], ConfigError | None] = lambda name: None, **settings: Any
    ):
        super().__init__(**{"exit_on_error": False, "allow_abbrev": False} | settings)
        self._answer = answer

    def error(self, message: str) -> NoReturn:
        raise mistake(None, message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            options, rest = self.parse_known_args(args, namespace)
        except argparse.ArgumentError as wrong:
            self.end(mistake(wrong.argument_name, wrong.message))
        except ConfigError as wrong:
            self.end(wrong)
        if rest:
            self.end(self._unknown(rest))
        return options

    def end(self, error: ConfigError) -> NoReturn:
        """End the command with an error of its command line."""
        self.exit(2, f"{self.prog}: {error}\n")

    def _unknown(self, words: Sequence[str]) -> ConfigError:
        flag = next((word for word in words if re.match(r"-[^0-9.]", word)), None)
        if flag is None:
            remedy = "Leave it out; --help shows what is taken"
            return ConfigError("argument", " ".join(words), "belongs to no flag", remedy)
        name = flag.partition("=")[0]
        if (known := self._answer(name)) is not None:
            return known
        close = nearest(name, self._option_string_actions)
        remedy = f"The nearest is {close}" if close else "See --help for all flags"
        return ConfigError("flag", name, "is not known", remedy)


def mistake(name: str | None, message: str) -> ConfigError:
    """Return what argparse says of a flag as an error.

    name: of the flag; None where the message names what is missing.
    """
    if found := re.fullmatch(_MISSING, message):
        names = found[1] or found[2]
        if found[1] and "," in names:
            remedy = "Give them; --help describes them"
            return ConfigError(names, "(missing)", "they are needed", remedy)
        return ConfigError(names, "(missing)", "it is needed", "Give it; --help describes it")
    what = name or "argument"
    if found := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", message):
        choices = [_bare(choice) for choice in found[2].split(",")]
        close = nearest(_bare(found[1]), choices)
        remedy = f"The nearest is {close}" if close else "Use one of these"
        reason = f"it is none of {', '.join(choices)}"
        return ConfigError(what, _bare(found[1]), reason, remedy)
    if found := re.fullmatch(r"invalid (\w+) value: (.*)", message, re.DOTALL):
        known = [(text, remedy) for kind, text, remedy in _KINDS if kind == found[1]]
        text, remedy = known[0] if known else (f"a {found[1]}", "See --help")
        return ConfigError(what, _bare(found[2]), f"it is not {text}", remedy)
    if found := re.fullmatch(r"ignored explicit argument (.*)", message):
        return ConfigError(what, _bare(found[1]), "it is a switch", "Give it alone")
    if found := re.fullmatch(r"not allowed with argument (.*)", message):
        reason = f"it does not go with {found[1]}"
        return ConfigError(what, "(given)", reason, "Give one of the two")
    if message.startswith("expected"):
        return ConfigError(what, "(no value)", message, "Give its value after it")
    return ConfigError(what, "(given)", message, "See --help")


def _bare(text: str) -> str:
    """Return a value without the quotes that argparse prints around it."""
    return text.strip().strip("'\"")
