"""A shell script followed without running it: what is known of its variables at each command."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .arithmetic import NotKnownError
from .commands import (
    AndOr,
    ArithmeticCommand,
    CaseCommand,
    Command,
    CommandList,
    Count,
    For,
    Function,
    If,
    Pipeline,
    Simple,
    Test,
    While,
    parsed,
)
from .conditions import Held, both, inverted, matched, tested
from .left import Marks, Unknown
from .patterns import compiled
from .state import ARRAY, TABLE, ShellState, Variable
from .values import Told, WordValues, braced, is_unknown
from .words import Assignment, Word, assignment

_ROUNDS = 1000  # of a loop that are followed
_STEPS = 300_000  # commands of a script that are followed
_DEPTH = 60  # of functions that call each other
_DECLARES = ("export", "readonly", "declare", "typeset", "local")
_SUCCEEDS = (
    *"echo printf mkdir ulimit module conda : true set shopt unset alias trap hash umask".split(),
    *"wait sleep date hostname pwd cat which type".split(),
)
_PREFIXES = ("command", "builtin", "exec")
_MOVES = ("cd", "pushd", "popd")


@dataclass(frozen=True)
class _Declared:
    """What declare and the like are given: NAME=value, or a list as it is assigned."""

    name: str
    value: str | None
    given: Assignment | None


class Shell(WordValues):
    """Runs the commands of a script in mind.

    A command whose status is not known is followed both ways; what is not the same afterwards is
    not known any more. Subclasses learn of commands that are programs.
    """

    def __init__(self, level: int, marks: Marks, told: Told, state: ShellState) -> None:
        super().__init__(level, marks, told, state)
        self.conditions: list[Unknown] = []  # on which the command depends
        self.ends: dict[Unknown, None] = {}  # what may have ended the script
        self._steps = 0
        self._checked = 0  # how many conditions around the command ask for its status
        self._depth = 0

    def started(
        self, line: int, words: list[str], given: Sequence[tuple[str, str]], text: str | None
    ) -> None:
        """Learn of a program that is started.

        line:  where its command stands.
        words: its words.
        given: the variables in front of it.
        text:  what its standard input is, where it is in the script.
        """

    def follow(self, text: str, line: int = 1) -> Held:
        """Run a script."""
        return self._group(parsed(text, line))

    # lists

    def _group(self, group: CommandList) -> Held:
        if group.shell:
            return self._apart(lambda: self._group(replace(group, shell=False)))
        status: Held = True
        for chain in group.chains:
            if self.state.flow:
                break
            status = self._background(chain) if chain.background else self._chain(chain)
        return status

    def _apart(self, run: Callable[[], Held]) -> Held:
        """Run something in a shell of its own."""
        before = self.state
        ends = len(self.ends)
        self.state = before.copy()
        status = run()
        self.state = before
        return status if len(self.ends) == ends else [*self.ends][-1]

    def _background(self, chain: AndOr) -> Held:
        self._apart(lambda: self._chain(replace(chain, background=False)))
        return True

    def _chain(self, chain: AndOr) -> Held:
        self._checked += bool(chain.rest)
        status = self._pipeline(chain.first)
        self._checked -= bool(chain.rest)
        last = chain.first
        for place, (sign, pipeline) in enumerate(chain.rest):
            if self.state.flow:
                return status
            wanted = sign == "&&"
            asked = place < len(chain.rest) - 1
            self._checked += asked
            if isinstance(status, Unknown):
                status = self._perhaps(status, wanted, pipeline)
                last = chain.first
            elif status is wanted:
                status = self._pipeline(pipeline)
                last = pipeline
            self._checked -= asked
        ran_last = not chain.rest or last is chain.rest[-1][1]
        self._ends_if(status, ran_last and not last.negated)
        return status

    def _perhaps(self, why: Unknown, wanted: bool, pipeline: Pipeline) -> Held:
        """Run what follows && or || whose condition is not known."""
        if not wanted:
            why = replace(why, mild=False)
        result: list[Held] = []

        def taken() -> Held:
            result.append(self._pipeline(pipeline))
            return result[0]

        status = self._either(why, taken, lambda: not wanted)
        # commands that are joined by && are taken to succeed
        return why if isinstance(status, Unknown) else status

    def _ends_if(self, status: Held, counts: bool) -> None:
        """set -e ends a script where a command fails whose status nothing asks for."""
        if not counts or self._checked or "e" not in self.state.options:
            return
        if status is False and "perhaps e" in self.state.options:
            self.ends[Unknown("set -e may be in force")] = None
        elif status is False:
            self.state.flow = "exit"
        elif isinstance(status, Unknown) and not status.mild:
            self.ends[status] = None

    def _pipeline(self, pipeline: Pipeline) -> Held:
        self._steps += 1
        if self._steps > _STEPS:
            reason = f"it runs more than {_STEPS:,} commands"
            raise ConfigError("script", "(loops)", reason, "Write the command by itself")
        self._checked += pipeline.negated
        if len(pipeline.commands) == 1:
            status = self._command(pipeline.commands[0])
        else:
            run = [
                self._apart(lambda command=command: self._command(command))  # type: ignore[misc]
                for command in pipeline.commands
            ]
            status = run[-1]
            if "pipefail" in self.state.options:
                for each in run:
                    status = both(each, status)
        self._checked -= pipeline.negated
        return inverted(status) if pipeline.negated else status

    def _command(self, command: Command) -> Held:
        if isinstance(command, Simple):
            return self._simple(command)
        if isinstance(command, CommandList):
            return self._group(command)
        if isinstance(command, If):
            return self._if(command)
        if isinstance(command, While | For | Count):
            return self._repeated(command)
        if isinstance(command, CaseCommand):
            return self._case(command)
        if isinstance(command, Test):
            return self._at(command.line, matched(self, command))
        if isinstance(command, ArithmeticCommand):
            return self._at(command.line, self._truth(command.text))
        assert isinstance(command, Function), "there are no other commands"
        self.state.functions[command.name] = command.body
        return True

    def _truth(self, text: str) -> Held:
        try:
            return self.run_arithmetic(text) != 0
        except NotKnownError as error:
            return Unknown(f"(({text}))", error.needs)

    def _at(self, line: int, held: Held) -> Held:
        """A status with the line where it is asked for."""
        if not isinstance(held, Unknown) or held.text.startswith("line "):
            return held
        return replace(held, text=f"line {line}: {held.text} is not known here")

    # ways

    def _either(self, why: Unknown, one: Callable[[], Held], other: Callable[[], Held]) -> Held:
        """Run one or the other, of which is not known which."""
        before = self.state
        self.conditions.append(why)
        states = []
        statuses = []
        for run in (one, other):
            self.state = before.copy()
            statuses.append(run())
            states.append(self.state)
        self.conditions.pop()
        self.state = states[0].joined(states[1], why)
        flows = [state.flow for state in states]
        if "exit" in flows and flows[0] != flows[1]:
            self.ends[why] = None
            return statuses[1 - flows.index("exit")]
        if isinstance(statuses[0], bool) and statuses[0] is statuses[1]:
            return statuses[0]
        return why

    def _condition(self, group: CommandList) -> Held:
        self._checked += 1
        status = self._group(group)
        self._checked -= 1
        return status

    def _if(self, command: If, place: int = 0) -> Held:
        if place == len(command.branches):
            return True if command.otherwise is None else self._group(command.otherwise)
        condition, body = command.branches[place]
        status = self._condition(condition)
        if self.state.flow:
            return status
        if isinstance(status, Unknown):
            why = replace(status, mild=False)
            return self._either(
                why, lambda: self._group(body), lambda: self._if(command, place + 1)
            )
        return self._group(body) if status else self._if(command, place + 1)

    def _case(self, command: CaseCommand, place: int = 0) -> Held:
        word = self.text(command.word)
        return self._arm(command, word, place)

    def _arm(self, command: CaseCommand, word: str, place: int, falls: bool = False) -> Held:
        if place == len(command.parts):
            return True
        patterns, body, ending = command.parts[place]
        fits: Held = falls
        for each in patterns:
            if fits is not True:
                one = self._fits(word, each)
                fits = one if fits is False or one is True else fits
        fits = self._at(command.line, fits)

        def taken() -> Held:
            status = self._group(body)
            if ending in (";&", ";;&") and not self.state.flow:
                return self._arm(command, word, place + 1, falls=ending == ";&")
            return status

        if isinstance(fits, Unknown):
            return self._either(fits, taken, lambda: self._arm(command, word, place + 1))
        return taken() if fits else self._arm(command, word, place + 1)

    def _fits(self, word: str, pattern: Word) -> Held:
        text = self.pattern(pattern)
        if text == "*":
            return True
        if why := self.marks.unknown([word, text]):
            return why
        fits = compiled(text)
        if fits is None:
            return Unknown(f"the pattern {pattern.plain}")
        return fits.fullmatch(word) is not None

    # loops

    def _repeated(self, command: While | For | Count) -> Held:
        outside = self.state.blurred
        self.state.blurred = ()
        if isinstance(command, While):
            status = self._while(command)
        elif isinstance(command, For):
            status = self._for(command)
        else:
            status = self._count_loop(command)
        self.state.blurred = (*outside, *self.state.blurred)
        return status

    def _while(self, command: While) -> Held:
        def goes_on() -> Held:
            status = self._condition(command.condition)
            return inverted(status) if command.until else status

        return self._loop(command.line, goes_on, lambda: None, command.body)

    def _count_loop(self, command: Count) -> Held:
        first, condition, step = command.texts

        def goes_on() -> Held:
            return self._at(command.line, self._truth(condition)) if condition.strip() else True

        self._truth(first)
        return self._loop(command.line, goes_on, lambda: self._truth(step), command.body)

    def _loop(
        self, line: int, goes_on: Callable[[], Held], step: Callable[[], object], body: CommandList
    ) -> Held:
        start = self.state.copy()
        changed: dict[str, None] = {}
        for _ in range(_ROUNDS):
            status = goes_on()
            changed |= dict.fromkeys(self.state.changed(start))
            if self.state.flow:
                return status
            if isinstance(status, Unknown):
                return self._any_rounds(status, goes_on, step, body)
            if not status:
                return True
            self._group(body)
            changed |= dict.fromkeys(self.state.changed(start))
            if self._leaves(changed, start):
                return True
            step()
        why = Unknown(f"line {line}: the loop has more than {_ROUNDS} rounds, and is not followed")
        return self._any_rounds(why, goes_on, step, body)

    def _leaves(self, changed: dict[str, None], start: ShellState) -> bool:
        """Whether a loop ends with this round. changed: since its start."""
        state = self.state
        inside = [each for each in state.blurred if each[0] != "return"]
        state.blurred = tuple(each for each in state.blurred if each[0] == "return")
        for _, why in inside:
            state = self.state = state.blur(start, [*changed], why)
        if any(kind == "break" for kind, _ in inside):
            return True
        if state.flow not in ("break", "continue"):
            return bool(state.flow)
        ends = state.flow == "break" or state.levels > 1
        if state.levels > 1:
            state.levels -= 1
        else:
            state.flow = ""
        return ends

    def _any_rounds(
        self,
        why: Unknown,
        goes_on: Callable[[], Held],
        step: Callable[[], object],
        body: CommandList,
    ) -> Held:
        """Run a loop of which is not known how often it runs, until a round loses nothing more."""
        why = replace(why, mild=False)
        for _ in range(_ROUNDS):
            before = self.state.copy()
            self._either(why, lambda: self._a_round(goes_on, step, body), lambda: True)
            if self.state.flow or not self.state.changed(before):
                break
            self.state.lose(self.state.changed(before), why, before)
        return why

    def _a_round(
        self, goes_on: Callable[[], Held], step: Callable[[], object], body: CommandList
    ) -> Held:
        """Run a loop once; where it is left is not known."""
        before = self.state.copy()
        self._group(body)
        self._leaves({}, before)
        if self.state.flow in ("break", "continue"):
            self.state.flow = ""
        if not self.state.flow:
            step()
            goes_on()
        return True

    def _for(self, command: For) -> Held:
        fields = ["$@"] if command.words is None else []
        known: Sequence[str] | Unknown | None = None
        if command.words is None:
            known = self.elements("@")
        else:
            fields = [each for word in command.words for each in self.fields(word)]
            known = fields
        shown = self.marks.shown(" ".join(fields))
        why = Unknown(f"line {command.line}: {command.name} is one of {shown}, not known here")
        if known is None:
            why = replace(why, needs=("@",))
        if command.asks:
            why = Unknown(f"line {command.line}: select asks")
        elif known is not None and not isinstance(known, Unknown):
            if not any(map(self.marks.split, known)):
                return self._rounds(command, known)
            why = replace(why, needs=(self.marks.unknown(known) or why).needs)

        def once() -> None:
            self.forget(command.name, why)

        def goes_on() -> Held:
            once()
            return why

        goes_on()
        return self._any_rounds(why, goes_on, once, command.body)

    def _rounds(self, command: For, values: Sequence[str]) -> Held:
        start = self.state.copy()
        changed: dict[str, None] = {}
        status: Held = True
        for value in values:
            self.put(command.name, value)
            status = self._group(command.body)
            changed |= dict.fromkeys(self.state.changed(start))
            if self._leaves(changed, start):
                break
        return status

    # simple commands

    def _simple(self, command: Simple) -> Held:
        line = command.line
        rest = [*command.words]
        given = []
        while rest and (each := assignment(rest[0])) is not None:
            given.append(each)
            del rest[0]
        if not rest:
            for each in given:
                self.assign(each)
            runs = any(part.kind == "command" for word in command.words for part in word.parts)
            return self._status(line, command.words) if runs else True
        fields: list[str] = []
        while rest and rest[0].bare in _PREFIXES and len(rest) > 1:
            if rest[0].bare == "exec":
                fields.append("exec")
            del rest[0]
        if rest[0].bare in _DECLARES:
            return self._declare(line, rest[0].bare, rest[1:])
        for word in rest:
            fields += self.fields(word)
        for redirect in command.redirects:
            self.text(redirect.target)
        before = self.state.variables
        if not fields:
            for each in given:
                self.assign(each)
            return True
        name = fields[0]
        if given:
            # they are gone behind the command
            self.state.variables = dict(before)
            for each in given:
                self.assign(each)
                value = self.state.variables.get(each.name, Variable())
                self.state.variables[each.name] = replace(value, exported=True)
        body = next((each.body for each in reversed(command.redirects) if each.body), None)
        last = command.redirects[-1].operator if command.redirects else ""
        text = None
        if body is not None and last.startswith("<<"):
            text = self.text(body) + ("\n" if last == "<<<" else "")
        inside = self.state.variables
        prefix = tuple((each.name, self.value(each.name) or "") for each in given)
        status = self._runs(line, fields, command.words, prefix, text)
        if given:
            names = {each.name for each in given}
            after = {
                key: value
                for key, value in self.state.variables.items()
                if key not in names or value != inside.get(key)
            }
            self.state.variables = {**{k: v for k, v in before.items() if k in names}, **after}
        if fields[0] == "exec" and len(fields) > 1 and name == "exec":
            self.state.flow = self.state.flow or "exit"
        return status

    def _status(self, line: int, words: Sequence[Word]) -> Unknown:
        shown = " ".join(word.plain for word in words)
        shown = shown if len(shown) < 60 else f"{shown[:56]} ..."
        return Unknown(f"line {line}: whether {shown} succeeds is not known here", mild=True)

    def _runs(
        self,
        line: int,
        fields: list[str],
        words: Sequence[Word],
        given: Sequence[tuple[str, str]],
        text: str | None,
    ) -> Held:
        """Run a command that is no assignment."""
        name = fields[0]
        if name in self.state.functions:
            return self._call(line, name, fields[1:])
        if name in ("[", "test"):
            return self._at(line, tested(self, fields[1:-1] if name == "[" else fields[1:]))
        if name == "eval":
            return self._eval(line, fields[1:])
        if name in ("source", "."):
            shown = self.marks.shown(" ".join(fields))
            self.told.doubts[f"line {line}: {shown} is not read, and may set variables"] = None
            return True
        if name == "let":
            held: Held = True
            for each in fields[1:]:
                held = self._at(line, self._truth(each))
            return held
        if name in ("exit", "return", "break", "continue"):
            return self._leave(name, fields[1:])
        if name in _MOVES:
            self.state.moves = (*self.state.moves, tuple(fields))
            return self._status(line, words)
        taker = {
            "set": self._set,
            "unset": self._unset,
            "shift": self._shift,
            "read": self._read,
            "printf": self._printf,
            "mapfile": self._not_read,
            "readarray": self._not_read,
            "getopts": self._not_read,
        }.get(name)
        if taker is not None:
            return self._at(line, taker(fields[1:], text))
        if name == "shopt":
            self.told.notes[
                f"line {line}: {self.marks.shown(' '.join(fields))} is not followed"
            ] = None
        if name in ("true", "false"):
            return name == "true"
        if name == "echo" or name in _SUCCEEDS:
            return True
        self.started(line, fields, given, text)
        return self._status(line, words)

    def _leave(self, name: str, arguments: Sequence[str]) -> Held:
        self.state.flow = name
        self.state.levels = 1
        number = arguments[0] if arguments else ""
        if name in ("break", "continue") and number.isdigit():
            self.state.levels = max(1, int(number))
        if name in ("exit", "return") and number:
            return number == "0" if number.isdigit() else Unknown(f"{name} {number}")
        return True

    def _call(self, line: int, name: str, arguments: Sequence[str]) -> Held:
        body = self.state.functions[name]
        if body is None or self._depth >= _DEPTH:
            reason = "may be another function" if body is None else "calls itself too often"
            self.told.doubts[f"line {line}: {name} {reason}, and is not followed"] = None
            return Unknown(f"{name} is not followed")
        start = self.state.copy()
        outer = self.state.arguments
        self.state.blurred = ()
        self.state.arguments = tuple(arguments)
        self.state.scopes = (*self.state.scopes, {})
        self._depth += 1
        status = self._command(body)
        self._depth -= 1
        state = self.state
        for _, why in state.blurred:
            state = self.state = state.blur(start, state.changed(start), why)
            status = why
        state.blurred = start.blurred
        for hidden, value in state.scopes[-1].items():
            if value is None:
                state.variables.pop(hidden, None)
            else:
                state.variables[hidden] = value
        state.scopes = state.scopes[:-1]
        state.arguments = outer
        if state.flow == "return":
            state.flow = ""
        return status

    def _eval(self, line: int, fields: Sequence[str]) -> Held:
        text = " ".join(fields)
        self.count([text])
        try:
            group = parsed(text, line)
        except ConfigError as error:
            self.told.doubts[f"line {line}: eval is not followed: {error.reason}"] = None
            return Unknown("eval is not followed")
        return self._group(group)

    def _declare(self, line: int, name: str, words: Sequence[Word]) -> Held:
        options = ""
        function = bool(self.state.scopes) and name in ("declare", "typeset", "local")
        # all is replaced before anything is set
        for each in [each for word in words for each in self._declared(word)]:
            if each.value is None and each.name[:1] in ("-", "+") and each.given is None:
                options += each.name[1:] if each.name[0] == "-" else ""
            else:
                self._declare_one(line, name, options, function and "g" not in options, each)
        return True

    def _declared(self, word: Word) -> list["_Declared"]:
        given = assignment(word)
        # behind braces NAME=value is a word like any other, and is split
        if given is not None and len(braced(word)) == 1:
            text = None if given.value.items is not None else self.text(given.value)
            return [_Declared(given.name, text, given)]
        found = []
        for field in self.fields(word):
            name, equals, value = field.partition("=")
            found.append(_Declared(name, value if equals else None, None))
        return found

    def _declare_one(
        self, line: int, name: str, options: str, local: bool, declared: "_Declared"
    ) -> None:
        each = declared.given
        variable = text = declared.name
        plain = declared.value
        if "f" in options or "F" in options or "p" in options:
            return
        if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
            why = "is not followed"
            self.told.doubts[f"line {line}: {name} {self.marks.shown(text)} {why}"] = None
            return
        if local and variable not in self.state.scopes[-1]:
            hidden = self.state.variables.get(variable)
            scope = {**self.state.scopes[-1], variable: hidden}
            self.state.scopes = (*self.state.scopes[:-1], scope)
            exported = hidden is not None and hidden.exported
            self.state.variables[variable] = Variable(exported=exported)
        was = self.state.variables.get(variable)
        if set(options) & set("nlu") and name != "export":
            self.told.doubts[f"line {line}: {name} -{options} is not followed"] = None
        if set(options) & set("nlu") or ("n" in options and name == "export"):
            if name == "export":
                self.state.variables[variable] = replace(was or Variable(), exported=False)
                if was is None:
                    self.forget(variable, Unknown(f"line {line}: {name} -n"))
                return
            self.forget(variable, Unknown(f"line {line}: {name} -{options} is not followed"))
            return
        kind = TABLE if "A" in options else ARRAY if "a" in options else ""
        if was is not None or kind or "i" in options:
            now = was or Variable()
            self.state.variables[variable] = replace(
                now, kind=kind or now.kind, integer=now.integer or "i" in options
            )
        if each is not None and plain is None:
            self.assign(each)
        elif plain is not None:
            index = each.index if each else None
            self.put(variable, plain, index, each is not None and each.more)
        now_set = self.state.variables.get(variable)
        exports = name == "export" or "x" in options
        fixes = name == "readonly" or "r" in options
        if now_set is None and (exports or fixes):
            # as the environment has it
            return
        if now_set is not None:
            self.state.variables[variable] = replace(
                now_set, exported=now_set.exported or exports, fixed=now_set.fixed or fixes
            )

    def _set(self, fields: Sequence[str], text: str | None) -> Held:
        left = [*fields]
        while left:
            each = left.pop(0)
            if each == "--" or each[:1] not in ("-", "+"):
                self.state.arguments = tuple(left if each == "--" else [each, *left])
                break
            names = {each[1:]} if len(each) == 1 else set(each[1:])
            if "o" in names and left:
                names = (names - {"o"}) | {{"errexit": "e"}.get(left[0], left[0])}
                del left[0]
            options = self.state.options
            self.state.options = options | names if each[0] == "-" else options - names
        return True

    def _unset(self, fields: Sequence[str], text: str | None) -> Held:
        for each in fields:
            if each[:1] == "-":
                continue
            name, _, index = each.removesuffix("]").partition("[")
            was = self.state.variables.get(name)
            if was is not None and was.fixed:
                continue
            if index and was is not None and was.unknown is None:
                key = self._key(was, index)
                if isinstance(key, Unknown):
                    self.forget(name, key)
                    continue
                items = {k: v for k, v in was.items.items() if k != key}
                self.state.variables[name] = replace(was, items=items)
            elif name in self.state.functions and was is None:
                del self.state.functions[name]
            else:
                self.state.variables[name] = Variable()
        return True

    def _shift(self, fields: Sequence[str], text: str | None) -> Held:
        arguments = self.state.arguments
        number = fields[0] if fields else "1"
        known = isinstance(arguments, tuple) and number.isdigit()
        if not known or not isinstance(arguments, tuple) or any(map(self.marks.split, arguments)):
            needs = ("@",) if arguments is None else ()
            self.state.arguments = Unknown("shift of arguments that are not known here", needs)
            return self.state.arguments
        if int(number) > len(arguments):
            return False
        self.state.arguments = arguments[int(number) :]
        return True

    def _not_read(self, fields: Sequence[str], text: str | None) -> Held:
        """A command that sets variables to what is read."""
        why = Unknown("what is read is not known here")
        names = [each for each in fields if re.fullmatch(r"[A-Za-z_]\w*", each)]
        for name in names or ["REPLY", "MAPFILE"]:
            self.forget(name, why)
        for name in ("OPTARG", "OPTIND"):
            self.forget(name, why)
        return why

    def _read(self, fields: Sequence[str], text: str | None) -> Held:
        """read NAME ... <<< text."""
        names = [each for each in fields if not each.startswith("-")]
        options = "".join(each[1:] for each in fields if each.startswith("-"))
        raw = "r" in options or "\\" not in (text or "\\")
        if text is None or not raw or not set(options) <= set("ra") or is_unknown([text]):
            why = Unknown("what is read is not known here")
            if text is not None and (left := self.marks.unknown([text])):
                why = left
            return self._forgets(names, fields, why)
        line = text.split("\n", 1)[0]
        separators = self._separators()
        blanks = "".join(each for each in separators if each in " \t")
        others = "".join(each for each in separators if each not in " \t\n")
        pattern = f"[{re.escape(blanks) or chr(0)}]+"
        if others:
            blank = f"[{re.escape(blanks)}]*" if blanks else ""
            pattern = f"{blank}[{re.escape(others)}]{blank}" + (f"|{pattern}" if blanks else "")
        line = line.strip(blanks) if blanks else line
        if "a" in options:
            parts = re.split(pattern, line) if line else []
            parts = parts[:-1] if parts and not parts[-1] else parts
            items = {str(at): part for at, part in enumerate(parts)}
            self.state.variables[names[0]] = Variable(items, ARRAY)
            return "\n" in text
        if not names:
            self.put("REPLY", text.split("\n", 1)[0])
            return "\n" in text
        parts = re.split(pattern, line, maxsplit=len(names) - 1) if separators else [line]
        if others and len(parts) == len(names) and re.fullmatch(rf".*(?:{pattern})", parts[-1]):
            # a separator at the end, which read drops in some cases
            return self._forgets(names, fields, Unknown("what is read is not known here"))
        for place, name in enumerate(names):
            self.put(name, parts[place] if place < len(parts) else "")
        return "\n" in text

    def _forgets(self, names: Sequence[str], fields: Sequence[str], why: Unknown) -> Unknown:
        for name in names or ["REPLY"]:
            if re.fullmatch(r"[A-Za-z_]\w*", name):
                self.forget(name, why)
        return why

    def _printf(self, fields: Sequence[str], text: str | None) -> Held:
        """printf -v NAME format word ..."""
        if fields[:1] != ["-v"] or len(fields) < 3:
            return True
        name, _, index = fields[1].removesuffix("]").partition("[")
        value = self._formatted(fields[2], [*fields[3:]])
        if value is None:
            needs = (self.marks.unknown(fields) or Unknown("")).needs
            self.forget(name, Unknown(f"printf -v {name} is not known here", needs))
        else:
            self.put(name, value, index or None)
        return True

    def _formatted(self, form: str, words: list[str]) -> str | None:
        codes = re.findall(r"%[^%sd]*[sd]|%%|\\.|[^%\\]+|.", form, re.DOTALL)
        out = ""
        while True:
            before = len(words)
            for code in codes:
                if code == "%%":
                    out += "%"
                elif match := re.fullmatch(r"%(-?0?\d*)([sd])", code):
                    word = words.pop(0) if words else "" if match[2] == "s" else "0"
                    if match[2] == "d" and not re.fullmatch(r"-?(0|[1-9]\d{0,17})", word):
                        return None
                    if match[1] and is_unknown([word]):
                        return None
                    out += f"%{match[1]}{match[2]}" % (int(word) if match[2] == "d" else word)
                elif code in (r"\n", r"\t", r"\\"):
                    out += {"n": "\n", "t": "\t", "\\": "\\"}[code[1]]
                elif code[0] in "%\\":
                    return None
                else:
                    out += code
            if not words or len(words) == before:
                return None if any(map(self.marks.split, [out])) else out
