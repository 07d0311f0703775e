"""What every command does first and last: its words are text, what it prints arrives, and a mistake
is one line.
"""

import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..errors import ConfigError, MerakError
from ..strict_json import not_text
from .words import error_text, program

Main = Callable[[Sequence[str] | None], int | None]
CUT_OFF = 128 + signal.SIGPIPE  # what a shell says of a program whose reader has left
_STREAMS = {0: "stdin", 1: "stdout", 2: "stderr"}


def command(main: Main) -> Main:
    """Return the ``main`` of a command with the handling of its words and standard streams that all
    commands share.

    A word that is not text, a standard output that is closed or full, a file that cannot be read
    and input nested too deep end with one line and status 1 or 2; a reader that leaves (``| head
    -1``) ends the command silently.
    """

    @functools.wraps(main)
    def guarded(arguments: Sequence[str] | None = None) -> int | None:
        words = list(sys.argv[1:] if arguments is None else arguments)
        if 1 in occupy_closed_streams():
            raise SystemExit(
                f"{program()}: standard output is closed. Redirect it to a file or to /dev/null."
            )
        try:
            try:
                check_words(words)
                status = main(words)
            except SystemExit:
                sys.stdout.flush()
                raise
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            _leave_output()
            raise SystemExit(CUT_OFF) from None
        except MerakError as error:
            _end(error_text(error))
        except OSError as error:
            _leave_output()
            where = (
                "standard output"
                if error.filename is None
                else f"file {printable(os.fspath(error.filename))}"
            )
            _end(f"{where}: {error.strerror or error}. Correct it and start the command again.")
        except RecursionError:
            _end("input: it is nested too deep. Correct it.")
        except MemoryError:
            _end("memory: there is too little for this input. Give smaller numbers or files.")

    return guarded


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError for a word of a command line that is not text."""
    for word in words:
        if (reason := not_text(word)) is not None:
            raise ConfigError(
                "argument", printable(word), reason, "Use other names of files and directories"
            )


def printable(text: str | bytes) -> str:
    """Return a text with escapes for what is not text in it."""
    plain = os.fsdecode(text)
    return plain.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def occupy_closed_streams() -> list[int]:
    """Return the standard streams that the caller closed, which /dev/null takes the place of.

    Else the next file that is opened would be one of them, and what any library prints would be
    written into it. Characters that the terminal's encoding lacks are printed as escapes.
    """
    closed = []
    for number, name in _STREAMS.items():
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            closed.append(number)
        stream = getattr(sys, name)
        if stream is None:
            setattr(
                sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False)
            )
        elif number == 1 and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    return closed


def _leave_output() -> None:
    """Let nothing that is still buffered fail again when the interpreter ends."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


def _end(text: str) -> NoReturn:
    raise SystemExit(f"{program()}: {text}")
