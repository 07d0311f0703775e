"""The command of a launch script that starts Megatron-LM's pretrain_gpt.py, found without running
the script.
"""

import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from .shell_values import arithmetic
from .shell_words import LITERAL, SEPARATORS, Variables, Word, commands, plain_words, references

PROGRAM = "pretrain_gpt.py"
_TESTS = ("==", "=", "!=")
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
)
_DECLARES = ("export", "readonly", "declare", "typeset", "local")
_OPENS = ("then", "do", "{", "!", "time")
_LOOPS = ("for", "while", "until", "case", "select", "function")
_TESTING = ("[", "[[", "test")
_SUCCEEDS = (
    *_DECLARES,
    "cd",
    "mkdir",
    "echo",
    "printf",
    "set",
    "ulimit",
    "module",
    "conda",
    ":",
    "true",
    "unset",
    "let",
)
# change variables by what is not here
_UNREAD = ("source", ".", "read", "shift", "getopts", "mapfile", "readarray")
_LAUNCHERS = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|srun|mpirun|mpiexec|deepspeed|accelerate|nsys|ncu|\S*\.(sh|sif)|\S*torch\S*)|.*[$`].*"
)


class _Pattern(str):
    """A word of a test that stands for all texts of a form."""


@dataclass(frozen=True)
class Launch:
    """A command that starts the program.

    line: where it stands in the script, from 1.
    before: the words before the program: variables, launcher and its flags.
    flags: the words behind it.
    shell: the words in front of a shell's -c, where the command is its argument; else empty. Dollar
           signs that this
        shell replaces are then LITERAL in ``before`` and ``flags``.
    exports: NAME=VALUE of what the script exports before it.
    doubts: what could not be followed without running the script and may change the command, as
            sentences.
    notes: what else there is to know.
    """

    line: int
    before: tuple[str, ...]
    flags: tuple[str, ...]
    shell: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
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
        self.exports: dict[str, None] = {}
        self.functions: set[str] = set()
        self.fixed: set[str] = set()  # by readonly: they stay
        self.notes: dict[str, None] = {}
        self.doubts: dict[str, None] = {}
        self.evals = 1  # each takes its words apart once more
        # of each if: whether this part is read; None: one has been read
        self.branches: list[bool | None] = []
        # of each if: what is told if its condition decides anything; empty: it is known
        self.unknown: list[str] = []
        self.condition: list[Word] | None = None  # of an if that is being read, up to its then

    @property
    def active(self) -> bool:
        return all(branch is True for branch in self.branches)

    def read(self, text: str) -> Launch | None:
        """Read a script to its end; return the last launch that it has."""
        last: Launch | None = None
        # what ended the command before, and whether it succeeded
        before = ""
        status = None
        for command, following in itertools.pairwise([*commands(text), []]):
            self._defines(command, following)
            words = self._controlled(command)
            if words and self.condition is None:
                sets = _assigns(words[0]) or words[0].plain in (
                    *_DECLARES,
                    "unset",
                    "let",
                    *_UNREAD,
                )
                if sets or any(is_program(word.plain) for word in words):
                    self.doubts |= dict.fromkeys(filter(None, self.unknown))
                if self.active and self._runs(words, before, status, sets):
                    launch = self._simple(words)
                    status = self._succeeds(words)
                    if launch is not None and last is not None:
                        self._doubts(
                            f"line {last.line}: this command starts {PROGRAM} too, and is not "
                            "converted"
                        )
                    last = launch or last
            before = command[-1].separator
        return None if last is None else self._complete(last)

    def _complete(self, launch: Launch) -> Launch:
        """The launch, with what is to be told of it."""
        defaults = self.variables.assumed.items()
        assumed = ", ".join(
            f"{'$' * name.isdigit()}{name}={value or repr('')}" for name, value in defaults
        )
        self.notes |= {f"defaults of the script are used: {assumed}": None} if assumed else {}
        exports = tuple(
            f"{name}={value}"
            for name in self.exports
            if (value := self.variables.value(name)) is not None
        )
        words = [*exports, *launch.before, *launch.flags, *launch.shell]
        words = [word.replace(LITERAL, "$") for word in words] if launch.shell else words
        for name in dict.fromkeys(each for word in words for each in self._left(word)):
            self._doubts(
                f"{name} is left as it is written, but the script sets it to what is not known here"
            )
        return Launch(
            line=launch.line,
            before=launch.before,
            flags=launch.flags,
            shell=launch.shell,
            exports=exports,
            doubts=tuple(self.doubts),
            notes=tuple(note for note in self.notes if note not in self.doubts),
        )

    def _left(self, word: str) -> list[str]:
        """The variables in what a word leaves to a shell that the script sets."""
        names = []
        for reference in references(word)[1::2]:
            inner = re.findall(r"\$\{?[#!]?(\w+|@|\*)|(?<=[\s(*+/%-])([A-Za-z_]\w*)", reference)
            names += [f"${name}" for pair in inner for name in pair if self._sets(name)]
        return names

    def _sets(self, name: str) -> bool:
        return bool(name) and (name in self.variables.values or name in self.variables.lost)

    def _defines(self, command: Sequence[Word], following: Sequence[Word]) -> None:
        """Note a function, NAME ( )."""
        named = len(command) == 2 and command[-1].separator == "(" and not command[0].separator
        if named and [word.separator for word in following[:1]] == [")"]:
            self.functions.add(command[0].plain)
            self._doubts(
                f"line {command[0].line}: function {command[0].plain} is not followed, its "
                "commands are read once"
            )

    def _runs(self, words: Sequence[Word], before: str, status: bool | None, sets: bool) -> bool:
        """Whether a command is reached behind && or ||."""
        if before not in ("&&", "||"):
            return True
        if status is None and (sets or before == "||"):
            self._doubts(
                f"line {words[0].line}: {words[0].plain} is read whatever the command before it "
                "does"
            )
        return status is None or status == (before == "&&")

    def _succeeds(self, words: Sequence[Word]) -> bool | None:
        """Whether a command ends with status 0; None if that is not known."""
        first = words[0].plain
        if first in _TESTING or first.startswith("(("):
            return self._holds([*words, Word(words[0].line, separator=";")])
        return (
            False
            if first == "false"
            else True
            if _assigns(words[0]) or first in _SUCCEEDS
            else None
        )

    def _controlled(self, command: Sequence[Word]) -> list[Word]:
        """Take what steers the script off a command; return the words that are left."""
        words = list(command[:-1])
        while words:
            first = words[0].plain
            if self.condition is not None and first != "then":
                self.condition += [*words, command[-1]]
                return []
            if first in ("if", "elif", "while", "until") and any(
                is_program(word.plain) for word in words
            ):
                if first == "if":
                    self.branches.append(True)
                    self.unknown.append("")
                del words[0]
                continue
            if first in ("if", "elif"):
                self._opens(first)
                self.condition = [*words[1:], command[-1]]
                return []
            if first == "then":
                self._decides(words[0].line)
            elif first == "else":
                self._otherwise()
            elif first == "fi":
                del self.branches[-1:], self.unknown[-1:]
            elif first in _LOOPS:
                self._doubts(
                    f"line {words[0].line}: {first} is not followed, its commands are read once"
                )
                if first in ("for", "select") and len(words) > 1:
                    self.variables.forget(words[1].plain)
                return []
            elif first not in (*_OPENS, "done", "esac", "}"):
                return words
            del words[0]
        return words

    def _doubts(self, text: str) -> None:
        self.doubts[text] = None

    def _opens(self, word: str) -> None:
        if word == "if":
            self.branches.append(True)
            self.unknown.append("")
        elif self.branches:
            self.branches[-1] = None if self.branches[-1] is not False else False

    def _decides(self, line: int) -> None:
        """The condition is complete: read what follows, or not."""
        condition = self.condition or []
        self.condition = None
        if (
            not self.branches
            or self.branches[-1] is None
            or not all(each is True for each in self.branches[:-1])
        ):
            return
        holds = self._holds(condition)
        if holds is None:
            # asks for files: ends early
            holds = not any(re.fullmatch(r"-[defrswx]", word.plain) for word in condition)
            part = (
                "first part is read" if holds else "first part is not read, since it asks for files"
            )
            self.unknown[-1] = f"line {line}: the condition is not known here; its {part}"
            self.notes[self.unknown[-1]] = None
        self.branches[-1] = holds

    def _otherwise(self) -> None:
        if self.branches:
            self.branches[-1] = True if self.branches[-1] is False else None

    def _holds(self, condition: Sequence[Word]) -> bool | None:
        """Whether a condition of tests in brackets holds; None if that is not known."""
        result: bool | None = None
        joined = ""
        test: list[str] = []
        for word in condition:
            if not word.separator:
                values = self.variables.fields(word) or [""]
                open_ = test[:1] == ["[["] and any(
                    set(piece.text) & set("*?[") for piece in word.pieces if not piece.quote
                )
                test += [_Pattern(values[0])] if open_ and test[1:] and len(values) == 1 else values
                continue
            if test:
                value = _held(test, self.variables)
                if joined == "||":
                    result = (
                        True
                        if True in (result, value)
                        else None
                        if None in (result, value)
                        else False
                    )
                elif joined == "&&":
                    result = (
                        False
                        if False in (result, value)
                        else None
                        if None in (result, value)
                        else True
                    )
                else:
                    result = value
            joined = word.separator
            test = []
        return result

    def _simple(self, words: list[Word]) -> Launch | None:
        """Run a command in mind: assignments are taken; a command that starts the program is
        returned.
        """
        first = words[0].plain
        line = words[0].line
        if first in _DECLARES or all(_assigns(word) for word in words):
            for word in words:
                name = word.plain.partition("=")[0]
                taken = name not in self.fixed and self.variables.assign(word)
                self.fixed |= {name} if first == "readonly" else set()
                if first == "export" and (taken or name in self.variables.values):
                    self.exports[name] = None
            return None
        if first == "set":
            self._positional(words)
        elif first == "unset":
            self.variables.values |= {
                word.plain: [] for word in words[1:] if word.plain not in self.fixed
            }
        elif first == "let" or first.startswith("(("):
            self._counts(words)
        elif first in _UNREAD or first in self.functions:
            kind = (
                "is not followed"
                if first in self.functions
                else "is not read, and may set variables"
            )
            self._doubts(f"line {line}: {' '.join(word.plain for word in words)} {kind}")
        fields = [each for word in words for each in self.variables.fields(word)]
        if fields[:1] == ["eval"]:
            self.variables.count(fields * self.evals)
            self.evals += 1
            inner = [
                command[:-1] for command in commands(" ".join(fields[1:]).replace(LITERAL, "$"))
            ]
            launches = [self._simple(each) for each in inner if each]
            return next((each for each in reversed(launches) if each is not None), None)
        if not fields or fields[0] in ("echo", "printf"):
            return None
        for place, each in enumerate(fields):
            if is_program(each) and (
                place == 0 or any(_LAUNCHERS.fullmatch(word) for word in fields[:place])
            ):
                return _launch(line, fields, ())
            if PROGRAM in each and place and re.fullmatch(r"-\w*c", fields[place - 1]):
                return self._of_shell(line, each, fields[:place])
        return None

    def _of_shell(self, line: int, text: str, shell: Sequence[str]) -> Launch | None:
        """A command in the argument of a shell: what the script's shell leaves in it is a
        reference, what that shell replaces is LITERAL."""
        parts = references(text)
        marks = [chr(0xE100 + place) for place in range(len(parts) // 2)]
        outer = dict(zip(marks, parts[1::2], strict=True))
        inside = "".join(
            each for pair in itertools.zip_longest(parts[::2], marks, fillvalue="") for each in pair
        )
        known = {
            name: self.variables.values[name]
            for name in self.exports
            if name in self.variables.values
        }
        words = plain_words(inside.replace(LITERAL, "$"), known)
        if not any(map(is_program, words)):
            return None
        if any(LITERAL in word for word in words):
            self._doubts(
                f"line {line}: a dollar sign in quotes inside of quotes is replaced by the inner "
                "shell"
            )
        words = [word.replace("$", LITERAL) for word in words]
        words = [re.sub("[\ue100-\uf8ff]", lambda match: outer[match[0]], word) for word in words]
        return _launch(line, words, tuple(shell))

    def _positional(self, words: Sequence[Word]) -> None:
        """set -- WORD ...: the script's arguments; other options of set change none."""
        plain = [word.plain for word in words]
        if "--" not in plain:
            return
        arguments = [
            each for word in words[plain.index("--") + 1 :] for each in self.variables.fields(word)
        ]
        self.variables.values |= {"@": arguments, "*": arguments, "#": [str(len(arguments))]}
        self.variables.values |= {str(place): [each] for place, each in enumerate(arguments, 1)}

    def _counts(self, words: Sequence[Word]) -> None:
        """let NAME=EXPRESSION, (( NAME = EXPRESSION )): the variable has a value, or one that is
        not known.
        """
        texts = (
            [word.plain for word in words[1:]]
            if words[0].plain == "let"
            else [words[0].plain[2:-2]]
        )
        for text in texts:
            match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", text)
            if match is None:
                for name in re.findall(
                    r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]=)|(?:\+\+|--)\s*([A-Za-z_]\w*)", text
                ):
                    self.variables.forget(name[0] or name[1])
                continue
            number = arithmetic(match[2], self.variables.value)
            if number is None:
                self.variables.forget(match[1])
            else:
                self.variables.values[match[1]] = [str(number)]


def _launch(line: int, words: Sequence[str], shell: tuple[str, ...]) -> Launch:
    """The launch in a command that has the program; what follows after a separator is left out."""
    place = next(place for place, word in enumerate(words) if is_program(word))
    flags = itertools.takewhile(lambda word: word not in SEPARATORS, words[place + 1 :])
    return Launch(line, tuple(words[:place]), tuple(flags), shell)


def _assigns(word: Word) -> bool:
    return (
        bool(word.pieces)
        and not word.pieces[0].quote
        and bool(re.match(r"\w+(\[[^]]*\])?\+?=", word.pieces[0].text))
    )


def _held(test: Sequence[str], variables: Variables) -> bool | None:
    """Whether one test holds, such as [[ a == b ]]; None if a value is not known or it is of
    another kind.
    """
    parts = [each for each in test if each not in ("[", "]", "[[", "]]", "test")]
    negated = False
    while parts[:1] == ["!"]:
        parts = parts[1:]
        negated = not negated
    if len(parts) == 1 and parts[0].startswith("(("):
        number = arithmetic(parts[0][2:-2], variables.value)
        return None if number is None else (number != 0) != negated
    if any("$" in part or "`" in part for part in parts):
        return None
    result: bool | None = None
    if len(parts) == 2 and parts[0] in ("-z", "-n"):
        result = (parts[1] == "") == (parts[0] == "-z")
    elif len(parts) == 3 and parts[1] in _TESTS:
        alike = (
            fnmatchcase(parts[0], parts[2])
            if isinstance(parts[2], _Pattern)
            else parts[0] == parts[2]
        )
        result = alike == (parts[1] != "!=")
    elif (
        len(parts) == 3
        and parts[1] in _NUMBERS
        and all(re.fullmatch(r"-?[0-9]{1,18}", each) for each in parts[::2])
    ):
        result = _NUMBERS[parts[1]](int(parts[0]), int(parts[2]))
    return None if result is None else result != negated
