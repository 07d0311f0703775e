"""The command of a launch script that starts Megatron-LM's pretrain_gpt.py, found without running
the script.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ..errors import ConfigError
from ..shell.left import Left, Marks, Unknown
from ..shell.run import Shell
from ..shell.state import TABLE, ShellState, Variable
from ..shell.values import Told, is_unknown
from ..shell.words import MARK

PROGRAM = "pretrain_gpt.py"
ARGUMENTS = "@"  # the script's own, among what needs a value
_LAUNCHERS = re.compile(
    r"(.*/)?(python[\d.]*|torchrun|srun|mpirun|mpiexec|deepspeed|accelerate|nsys|ncu|exec|\S*\.(sh|sif)|\S*torch\S*)"
)
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_CONTAINERS = ("docker", "podman")  # pass on no variables but those that are named
# Variables that programs find in their environment whether the script exports them or not.
_INHERITED = re.compile(
    r"(PATH|HOME|LANG)|(LD|LC|PYTHON|CUDA|NCCL|TORCH|OMP|GLOO|UCX|NVTE|HF)_?\w+"
)


@dataclass(frozen=True)
class Starter:
    """The words in front of what a shell reads, up to its -c.

    given: (NAME, value) of the variables in front of them.
    """

    given: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """A command that starts the program. Of its words, characters that stand for what is left to a
    shell (see shell/left.py) are in ``marks``.

    line:   where it stands in the script, from 1.
    before: the words before the program: launcher and its flags.
    flags:  the words behind it.
    marks:  what is left to shells.
    given:  (NAME, value) of the variables in front of the command.
    shells: those whose argument the command is, the outermost first.
    setup:  the lines in front of the command in the script and in each of ``shells``.
    doubts: what could not be followed without running the script and may change the command, as
            sentences.
    needs:  variables that decide something and are not set, and what they decide.
    notes:  what else there is to know.
    """

    line: int
    before: tuple[str, ...]
    flags: tuple[str, ...]
    marks: Marks
    given: tuple[tuple[str, str], ...] = ()
    shells: tuple[Starter, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ((),)
    doubts: tuple[str, ...] = ()
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def command(self, words: Sequence[str]) -> str:
        """A command as its shell reads it, with the variables in front of it."""
        return self._joined(self.given, words, len(self.shells))

    def script(self, text: str) -> str:
        """The lines that a shell reads, with a command in its shells."""
        for level in range(len(self.shells), 0, -1):
            text = self.marks.splitting("; ".join([*self.setup[level], text]), False)
            starter = self.shells[level - 1]
            text = self._joined(starter.given, [*starter.words, text], level - 1)
        return "\n".join([*self.setup[0], text])

    def _joined(self, given: Sequence[tuple[str, str]], words: Sequence[str], level: int) -> str:
        settings = [f"{name}={self.marks.quoted(value, level)}" for name, value in given]
        return " ".join([*settings, *(self.marks.quoted(word, level) for word in words)])


def is_program(word: str) -> bool:
    """Whether a word names pretrain_gpt.py."""
    return MARK.split(word.rsplit("/", 1)[-1])[-1] == PROGRAM


def find(
    text: str,
    given: Mapping[str, str | None] = MappingProxyType({}),
    arguments: Sequence[str] | None = None,
) -> Launch | None:
    """Return the last command of a script that starts pretrain_gpt.py; None if there is none.

    text:      the script.
    given:     variables of the environment; None for one that is not set.
    arguments: those that the script is started with; None: they are not known.
    """
    if MARK.search(text):
        raise ConfigError("script", "(text)", "it has private characters", "Remove them")
    variables = {
        name: Variable({} if value is None else {"0": value}, exported=value is not None)
        for name, value in given.items()
    }
    state = ShellState(variables, arguments=None if arguments is None else tuple(arguments))
    script = _Script(0, Marks(), Told(), state)
    script.follow(text)
    return script.told_of()


class _Script(Shell):
    """A script, or what one starts with bash -c."""

    def __init__(self, level: int, marks: Marks, told: Told, state: ShellState) -> None:
        super().__init__(level, marks, told, state)
        self.launches: list[Launch] = []
        self._first = dict(state.variables)

    def started(
        self, line: int, words: list[str], given: Sequence[tuple[str, str]], text: str | None
    ) -> None:
        for place, word in enumerate(words):
            before = words[:place]
            launched = any(_LAUNCHERS.fullmatch(each) or is_unknown([each]) for each in before)
            if is_program(word) and (place == 0 or launched):
                launch = Launch(
                    line=line,
                    before=tuple(before),
                    flags=tuple(words[place + 1 :]),
                    marks=self.marks,
                    given=tuple(given),
                )
                self._add(launch)
                return
            inner = word if before and re.fullmatch(r"-\w*c", before[-1]) else None
            if inner is not None and any(map(_is_shell, before[:-1])):
                self._inside(line, inner, tuple(before), given, words[place + 1 :])
                return
        if text is not None and _is_shell(words[-1]):
            self._inside(line, text, (*words, "-c"), given, [])

    def _inside(
        self,
        line: int,
        text: str,
        before: tuple[str, ...],
        given: Sequence[tuple[str, str]],
        arguments: Sequence[str],
    ) -> None:
        """Follow the argument of a shell."""
        state = ShellState(self._passed(before), arguments=tuple(arguments[1:]))
        state.functions = {**self.state.functions}
        inner = _Script(self.level + 1, self.marks, self.told, state)
        try:
            inner.follow(text)
        except ConfigError as error:
            if PROGRAM in text:
                self.told.doubts[f"line {line}: the shell is not followed: {error.reason}"] = None
            return
        for launch in inner.launches:
            starter = Starter(tuple(given), before)
            outer = replace(launch, line=line, shells=(starter, *launch.shells))
            if arguments:
                self.told.doubts[f"line {line}: what stands behind the shell's command"] = None
            self._add(outer)

    def _passed(self, before: Sequence[str]) -> dict[str, Variable]:
        """The variables that a shell finds which is started by these words."""
        container = any(word.rsplit("/", 1)[-1] in _CONTAINERS for word in before)
        named = {word.partition("=")[0] for word in before} if container else None
        passed: dict[str, Variable] = {}
        for name, variable in self.state.variables.items():
            if variable.exported and (named is None or name in named):
                blank = any(re.search(rf"\s|{PROGRAM}", value) for value in variable.values)
                if variable.kind or (is_unknown(variable.values) and not blank):
                    continue  # the shell has it in its environment
                passed[name] = replace(variable, fixed=False, integer=False)
            elif not variable.exported and container is False:
                why = Unknown(f"the script sets {name} and does not export it")
                known = not variable.items and variable.unknown is None
                passed[name] = Variable() if known else Variable(unknown=why)
        return passed

    def _add(self, launch: Launch) -> None:
        """Keep a launch, with what has to stand before it in this shell."""
        words = [*launch.before, *launch.flags, *(value for _, value in launch.given)]
        words += [word for shell in launch.shells for word in shell.words]
        words += [value for shell in launch.shells for _, value in shell.given]
        words += [line for setup in launch.setup for line in setup]
        texts = [text for text in words if self._own(text)]
        own = launch.shells[0].given if launch.shells else launch.given
        setup = _Setup(self, texts, [name for name, _ in own])
        needs = {name: [*reasons] for name, reasons in launch.needs.items()}
        doubts = dict.fromkeys([*launch.doubts, *setup.doubts])
        notes = dict.fromkeys([*launch.notes, *(f"it may end before: {e.text}" for e in self.ends)])
        unknown = [(f"whether {PROGRAM} is started", each) for each in self.conditions]
        for what, why in [*unknown, *setup.unknown]:
            if why.mild and what.startswith("whether"):
                notes[f"{what} depends on the command before it"] = None
            elif why.needs:
                for name in why.needs:
                    plain = name if re.match("[A-Za-z_]", name) else ARGUMENTS
                    reason = f"it decides {what} ({why.text})"
                    reasons = needs.setdefault(plain, [])
                    reasons += [] if reason in reasons else [reason]
            else:
                doubts[f"{what}: {why.text}"] = None
        above = launch.setup if launch.shells else ()
        self.launches.append(
            replace(
                launch,
                setup=(tuple(setup.lines), *above),
                doubts=tuple(doubts),
                needs={name: tuple(reasons) for name, reasons in needs.items()},
                notes=tuple(notes),
            )
        )

    def _own(self, text: str) -> list[Left]:
        """What a text leaves to this shell."""
        return [left for left in self.marks.all(text) if left.level == self.level]

    def told_of(self) -> Launch | None:
        """The last launch, with all that there is to know."""
        if not self.launches:
            return None
        last = self.launches[-1]
        doubts = {**self.told.doubts, **dict.fromkeys(last.doubts)}
        for other in self.launches[:-1]:
            doubts[
                f"line {other.line}: this command starts {PROGRAM} too, and is not converted"
            ] = None
        assumed = ", ".join(
            f"{f'${name}' if name.isdigit() else name}={value or repr('')}"
            for name, value in self.told.assumed.items()
        )
        notes = {**self.told.notes, **dict.fromkeys(last.notes)}
        notes |= {f"defaults of the script are used: {assumed}": None} if assumed else {}
        return replace(last, doubts=tuple(doubts), notes=tuple(notes))


class _Setup:
    """The lines that have to stand before texts in a shell.

    unknown: (what is not known, why) of them.
    doubts:  where a reference would find another value than in the script.
    """

    def __init__(self, shell: _Script, texts: Sequence[str], given: Sequence[str]) -> None:
        self.shell = shell
        self.given = given
        self.lines: list[str] = []
        self.doubts: dict[str, None] = {}
        self.unknown: list[tuple[str, Unknown]] = []
        self._now: dict[str, int] = {}  # of each variable that was written, the line that did so
        exports = self._exports()
        values = [value for _, variable, _ in exports for value in variable.values]
        moves = shell.state.moves
        needed = self._needed([*texts, *values, *(word for words in moves for word in words)])
        for move in range(len(moves) + 1):
            if move:
                self._move(moves[move - 1], move - 1)
            for place in needed:
                line = shell.lines[place]
                if line.moves == move:
                    self._check(line.variable.values, move)
                    self.lines.append(self._line(line.name, line.variable))
                    self._now[line.name] = place
        for name, variable, word in exports:
            self._export(name, variable, word)
        self._check(texts, len(moves))

    def _exports(self) -> list[tuple[str, Variable, str]]:
        """(name, variable, word in front) of what programs may find in their environment."""
        found = []
        for name, variable in self.shell.state.variables.items():
            inherited = _INHERITED.fullmatch(name) is not None
            same = self.shell._first.get(name) == variable or name in self.given
            if same or variable.kind or not (variable.exported or inherited):
                continue
            if variable.perhaps:
                self.unknown.append((f"whether {name} is exported", variable.perhaps))
            if variable.unknown:
                word = f"{name}, which programs may find in their environment"
                self.unknown.append((word, variable.unknown))
            else:
                found.append((name, variable, "export " if variable.exported else ""))
        return found

    def _needed(self, texts: Sequence[str]) -> list[int]:
        """The lines on which texts depend."""
        needed: set[int] = set()
        left = [*texts]
        while left:
            for each in self.shell._own(left.pop()):
                new = [place for place in each.lines if place not in needed]
                needed.update(new)
                left += [v for place in new for v in self.shell.lines[place].variable.values]
        return sorted(needed)

    def _move(self, words: Sequence[str], move: int) -> None:
        if words:
            level = self.shell.level
            self._check(words, move)
            self.lines.append(" ".join(self.shell.marks.quoted(word, level) for word in words))
        else:
            self.doubts["the directory is changed by what is not known here"] = None

    def _line(self, name: str, variable: Variable) -> str:
        level = self.shell.level
        if not variable.items and not variable.kind:
            return f"unset {name}"
        quoted = [self.shell.marks.quoted(value, level) for value in variable.values]
        if not variable.kind:
            return f"{name}={quoted[0]}"
        plain = [*variable.items] == [str(place) for place in range(len(quoted))]
        keys = [self.shell.marks.quoted(key, level) for key in variable.items]
        if variable.kind != TABLE and plain:
            return f"{name}=({' '.join(quoted)})"
        pairs = [f"[{key}]={value}" for key, value in zip(keys, quoted, strict=True)]
        word = "declare -A " if variable.kind == TABLE else ""
        return f"{word}{name}=({' '.join(pairs)})"

    def _export(self, name: str, variable: Variable, word: str) -> None:
        if not variable.items:
            self.lines.append(f"unset {name}")
            self._now[name] = -1
            return
        value = variable.values[0]
        own = self.shell._own(value)
        if len(value) == 1 and own and own[0].source == f"${name}" and name in self._now:
            self.lines += [f"{word}{name}"] if word else []
            return
        self._check([value], len(self.shell.state.moves))
        place = self._now.get(name, -1)
        same = place >= 0 and self.shell.lines[place].variable.values == [value]
        self.lines.append(f"{word}{name}={self.shell.marks.quoted(value, self.shell.level)}")
        if not same:
            self._now[name] = -1

    def _check(self, texts: Sequence[str], moves: int) -> None:
        """Note the references that find something else here than in the script."""
        for left in (left for text in texts for left in self.shell._own(text)):
            source = self.shell.marks.shown(left.source)
            if left.unknown:
                self.unknown.append((source, left.unknown))
                continue
            lines = self.shell.lines
            later = any(self._now.get(lines[place].name) != place for place in left.lines)
            if later or any(name in self._now for name in left.reads):
                self.doubts[f"{source} is read before the script sets a variable in it anew"] = None
            if left.moves is not None and left.moves != moves and len(self.shell.state.moves):
                self.doubts[f"{source} is read in another directory than in the script"] = None


def _is_shell(word: str) -> bool:
    return word.rsplit("/", 1)[-1] in _SHELLS
