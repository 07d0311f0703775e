"""The command of a launch script that starts Megatron-LM's pretrain_gpt.py, found without running the script."""

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .shell_words import SEPARATORS, Variables, Word, commands, plain_words

PROGRAM = "pretrain_gpt.py"
_TESTS: Mapping[str, Callable[[str, str], bool]] = MappingProxyType(
    {"==": operator.eq, "=": operator.eq, "!=": operator.ne}
)
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
)
_DECLARES = ("export", "readonly", "declare", "typeset", "local")
_OPENS = ("then", "do", "{", "!", "time")


@dataclass(frozen=True)
class Launch:
    """A command that starts the program.

    line: where it stands in the script, from 1.
    before: the words before the program: variables, launcher and its flags.
    flags: the words behind it.
    shell: the words in front of a shell's -c, where the command is its argument; else empty.
    notes: what could not be decided without running the script, as sentences.
    """

    line: int
    before: tuple[str, ...]
    flags: tuple[str, ...]
    shell: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_program(word: str) -> bool:
    """Whether a word names pretrain_gpt.py."""
    return word.rsplit("/", 1)[-1] == PROGRAM


def find(text: str) -> Launch | None:
    """Return the last command of a script that starts pretrain_gpt.py; None if there is none.

    text: the script.
    """
    return Script().read(text)


class Script:
    """What is known at a place of a script: its variables, and in which branches it is."""

    def __init__(self) -> None:
        self.variables = Variables()
        self.notes: dict[str, None] = {}
        self.branches: list[bool | None] = []  # of each if: whether this part is read; None: one has been read
        self.condition: list[Word] | None = None  # of an if that is being read, up to its then

    @property
    def active(self) -> bool:
        return all(branch is True for branch in self.branches)

    def read(self, text: str) -> Launch | None:
        """Read a script to its end; return the last launch that it has."""
        found: Launch | None = None
        before = ""  # what ended the command before
        for command in commands(text):
            words = self._controlled(command)
            if words and self.active and self.condition is None:
                if before in ("&&", "||") and _assigns(words[0]):
                    self._tells(f"line {words[0].line}: {words[0].plain} is read whatever the command before it does")
                found = self._simple(words) or found
            before = command[-1].separator
        if found is None:
            return None
        defaults = self.variables.assumed.items()
        assumed = ", ".join(f"{'$' * name.isdigit()}{name}={value or repr('')}" for name, value in defaults)
        self.notes |= {f"defaults of the script are used: {assumed}": None} if assumed else {}
        return Launch(found.line, found.before, found.flags, found.shell, tuple(self.notes))

    def _controlled(self, command: Sequence[Word]) -> list[Word]:
        """Take what steers the script off a command; return the words that are left."""
        words = list(command[:-1])
        while words:
            first = words[0].plain
            if self.condition is not None and first != "then":
                self.condition += [*words, command[-1]]
                return []
            if first in ("if", "elif"):
                self._opens(first)
                self.condition = [*words[1:], command[-1]]
                return []
            if first == "then":
                self._decides(words[0].line)
            elif first == "else":
                self._otherwise()
            elif first == "fi":
                del self.branches[-1:]
            elif first in ("for", "while", "until", "case", "select", "function"):
                self._tells(f"line {words[0].line}: {first} is not followed, its commands are read once")
                return []
            elif first not in (*_OPENS, "done", "esac", "}"):
                return words
            del words[0]
        return words

    def _tells(self, note: str) -> None:
        self.notes[note] = None

    def _opens(self, word: str) -> None:
        if word == "if":
            self.branches.append(True)
        elif self.branches:
            self.branches[-1] = None if self.branches[-1] is not False else False

    def _decides(self, line: int) -> None:
        """The condition is complete: read what follows, or not."""
        condition, self.condition = self.condition or [], None
        if not self.branches or self.branches[-1] is None or not all(each is True for each in self.branches[:-1]):
            return
        holds = self._holds(condition)
        if holds is None:
            holds = not any(re.fullmatch(r"-[defrswx]", word.plain) for word in condition)  # asks for files: ends early
            part = "first part is read" if holds else "first part is not read, since it asks for files"
            self._tells(f"line {line}: the condition is not known here; its {part}")
        self.branches[-1] = holds

    def _otherwise(self) -> None:
        if self.branches:
            self.branches[-1] = True if self.branches[-1] is False else None

    def _holds(self, condition: Sequence[Word]) -> bool | None:
        """Whether a condition of tests in brackets holds; None if that is not known."""
        result: bool | None = None
        joined, test = "", []
        for word in condition:
            if not word.separator:
                test += self.variables.fields(word) or [""]
                continue
            if test:
                value = _held(test)
                if joined == "||":
                    result = True if True in (result, value) else None if None in (result, value) else False
                elif joined == "&&":
                    result = False if False in (result, value) else None if None in (result, value) else True
                else:
                    result = value
            joined, test = word.separator, []
        return result

    def _simple(self, words: list[Word]) -> Launch | None:
        """Run a command in mind: assignments are taken; a command that starts the program is returned."""
        if words[0].plain in _DECLARES or all(_assigns(word) for word in words):
            for word in words:
                self.variables.assign(word)
            return None
        line, fields = words[0].line, [each for word in words for each in self.variables.fields(word)]
        if fields[:1] == ["eval"]:
            fields = plain_words(" ".join(fields[1:]))
        if not fields or fields[0] in ("echo", "printf"):
            return None
        for place, each in enumerate(fields):
            if is_program(each):
                return _launch(line, fields, ())
            if PROGRAM in each and place and re.fullmatch(r"-\w*c", fields[place - 1]):
                inner = plain_words(each)
                return _launch(line, inner, tuple(fields[:place])) if any(map(is_program, inner)) else None
        return None


def _launch(line: int, words: Sequence[str], shell: tuple[str, ...]) -> Launch:
    """The launch in a command that has the program; what follows after a separator is left out."""
    place = next(place for place, word in enumerate(words) if is_program(word))
    flags = itertools.takewhile(lambda word: word not in SEPARATORS, words[place + 1 :])
    return Launch(line, tuple(words[:place]), tuple(flags), shell)


def _assigns(word: Word) -> bool:
    return bool(word.pieces) and not word.pieces[0].quote and bool(re.match(r"\w+\+?=", word.pieces[0].text))


def _held(test: Sequence[str]) -> bool | None:
    """Whether one test holds, such as [[ a == b ]]; None if a value is not known or it is of another kind."""
    parts, negated = [each for each in test if each not in ("[", "]", "[[", "]]", "test")], False
    while parts[:1] == ["!"]:
        parts, negated = parts[1:], not negated
    if any("$" in part or "`" in part for part in parts):
        return None
    result: bool | None = None
    if len(parts) == 2 and parts[0] in ("-z", "-n"):
        result = (parts[1] == "") == (parts[0] == "-z")
    elif len(parts) == 3 and parts[1] in _TESTS:
        result = _TESTS[parts[1]](parts[0], parts[2])
    elif len(parts) == 3 and parts[1] in _NUMBERS and all(re.fullmatch(r"-?\d+", each) for each in parts[::2]):
        result = _NUMBERS[parts[1]](int(parts[0]), int(parts[2]))
    return None if result is None else result != negated
