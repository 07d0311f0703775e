"""What words become: variables are replaced where they are known, and left to a shell elsewhere."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ConfigError
from .arithmetic import Calculator, NotKnownError, assigned
from .left import Left, Marks, Unknown
from .patterns import cased, cut, escaped, replaced
from .state import ARRAY, TABLE, SetupLine, ShellState, Variable
from .words import (
    ARITHMETIC,
    COMMAND,
    LEFT,
    MARK,
    PROCESS,
    TEXT,
    VALUE,
    VARIABLE,
    Assignment,
    Reader,
    Redirect,
    Word,
    WordPart,
    argument_parts,
)

LARGEST = 1 << 20  # characters that variables of a script become; no shell can pass on as many
_MOST_WORDS = 1000  # of {1..1000}
_BRACED = re.compile(
    r"(?P<sign>[#!](?!$|[-:=+?%#/^,]))?(?P<name>\w+|[@*#?$!-])(?:\[(?P<index>[^]]*)\])?"
    r"(?P<rest>(?P<operator>:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:)(?P<argument>.*))?",
    re.DOTALL | re.ASCII,
)
_BRACES = re.compile(r"\{((?:[^{},]*,)+[^{},]*|-?\d+\.\.-?\d+(?:\.\.-?\d+)?|\w\.\.\w)\}", re.ASCII)
_BLANKS = " \t\n"  # at which words are split where IFS is not set
_OWN = tuple("?!$-_")  # what a shell knows of itself
_CHANGING = ("RANDOM", "SRANDOM", "LINENO", "SECONDS", "PIPESTATUS", "FUNCNAME", "BASHPID")
_DIRECTORY = ("PWD", "OLDPWD", "0", "BASH_SOURCE")


@dataclass
class Told:
    """What a person has to know of a script.

    doubts:  what is not followed.
    notes:   what else there is to know.
    assumed: variables that are not known, and the defaults of the script that were used.
    """

    doubts: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)


class WordValues:
    """The values of words in a state of a script.

    level: which shell it is, see Left.
    marks: what is left to shells.
    told:  takes what there is to know.
    """

    def __init__(self, level: int, marks: Marks, told: Told, state: ShellState) -> None:
        self.level = level
        self.marks = marks
        self.told = told
        self.state = state
        self.lines: list[SetupLine] = []
        self._made = 0  # characters that references have become
        self._calculator = Calculator(self._number, self._count_in)

    # words

    def fields(self, word: Word) -> list[str]:
        """The words that a word becomes."""
        words = braced(word)
        if len(words) > 1 and any(p.kind == LEFT and not p.quoted for p in word.parts):
            self.told.doubts[f"{self.marks.shown(word.plain)} has braces behind what is split"] = (
                None
            )
        return [each for word in words for each in self._fields(word)]

    def text(self, word: Word) -> str:
        """What a word becomes where it is not split, as in an assignment."""
        parts = _with_home(word.parts, assigns=True)
        pieces = [" ".join(values) for values, _ in self._pieces(parts, False)]
        return self.marks.joined("".join(pieces))

    def pattern(self, word: Word) -> str:
        """A word as a pattern, what is quoted in it escaped."""
        parts = _with_home(word.parts)
        found = []
        for part in parts:
            texts = [" ".join(values) for values, _ in self._pieces([part], False)]
            found += [escaped(each) if part.quoted else each for each in texts]
        return "".join(found)

    def count(self, texts: Sequence[str]) -> None:
        """Count what references have become. Raises ConfigError if it is too much, as of A=$A$A$A,
        repeated.
        """
        self._made += sum(map(len, texts)) + len(texts)
        if self._made > LARGEST:
            reason = f"its variables become more than {LARGEST:,} characters"
            raise ConfigError("script", "(variables)", reason, "Write the command by itself")

    def _fields(self, word: Word) -> list[str]:
        fields: list[str] = []
        current: str | None = None
        for values, splits in self._pieces(_with_home(word.parts), True):
            for place, value in enumerate(values):
                if place and current is not None:
                    fields.append(current)
                    current = None
                if not splits:
                    # quotes with nothing in them are a word where the rest becomes none
                    current = (current or "") + (value or self._nothing)
                    continue
                separators = self._separators()
                if MARK.search(value) and separators != _BLANKS:
                    shown = self.marks.shown(value)
                    self.told.doubts[f"{shown} is split at what IFS is then"] = None
                before, tokens, behind = _split(value, separators)
                if before and current is not None:
                    fields.append(current)
                    current = None
                for number, token in enumerate(tokens):
                    if number:
                        fields.append(current or "")
                        current = None
                    current = (current or "") + self._files(self.marks.splitting(token))
                if behind and current is not None:
                    fields.append(current)
                    current = None
        fields += [] if current is None else [current]
        return [self._without_nothing(field) for field in fields]

    @property
    def _nothing(self) -> str:
        return self.marks.mark(Left("''", self.level, splits=True))

    def _without_nothing(self, field: str) -> str:
        plain = field.replace(self._nothing, "")
        kept = MARK.sub("", plain) or any(
            not left.splits and not left.several for left in self.marks.all(plain)
        )
        return (
            plain if kept or not plain else f"{self._nothing}{plain}" if plain != field else plain
        )

    def _pieces(self, parts: Sequence[WordPart], files: bool) -> Iterator[tuple[list[str], bool]]:
        """What parts become, and whether that is split. files: * stands for names of files."""
        for part in parts:
            if part.kind == TEXT:
                text = part.text
                yield [self._files(text) if files and not part.quoted else text], False
            elif part.kind == VALUE:
                yield [part.text], True
            elif part.kind == LEFT:
                yield [self.marks.splitting(part.text, not part.quoted)], False
            elif part.kind == ARITHMETIC:
                yield [self._computed(part)], not part.quoted
            elif part.kind in (COMMAND, PROCESS):
                yield [self.left(part)], not part.quoted
            else:
                found = self._variable(part)
                if isinstance(found, str):
                    yield from self._pieces(argument_parts(found, part.quoted), files)
                    continue
                self.count(found)
                if (len(parts) > 1 or not files) and any(map(self.marks.split, found)):
                    found = [self.left(part)]  # which of its words is the first is not known
                yield found, not part.quoted

    def _files(self, text: str) -> str:
        """A text in which characters of patterns are left to the shell, which looks for files."""
        if not re.search(r"[*?]|\[.*\]", text):
            return text
        moves = len(self.state.moves)

        def raw(match: re.Match[str]) -> str:
            return self.marks.mark(Left(match[0], self.level, splits=True, moves=moves))

        return re.sub(r"[*?\[\]]", raw, text)

    def _separators(self) -> str:
        values = self.elements("IFS")
        if isinstance(values, Unknown) or (values and is_unknown(values)):
            self.told.doubts["IFS is set to what is not known here"] = None
            return _BLANKS
        return _BLANKS if not values else values[0]

    # variables

    def elements(self, name: str, index: str | None = None) -> list[str] | Unknown | None:
        """The values of a variable; None if it is the environment's.

        index: of one that is an array; @ and * for all.
        """
        arguments = self.state.arguments
        if name.isdigit() and name != "0" or name in ("@", "*", "#"):
            if arguments is None or isinstance(arguments, Unknown):
                return arguments
            if name in ("@", "*"):
                return [*arguments]
            before = arguments if name == "#" else arguments[: int(name)]
            if any(map(self.marks.split, before)):
                return Unknown(f"${name} is not known here")
            return [str(len(arguments))] if name == "#" else [*before[int(name) - 1 :]]
        if name in _OWN or name in _CHANGING:
            return Unknown(f"${name} is not known here")
        variable = self.state.variables.get(name)
        if variable is None:
            return None
        if variable.unknown:
            return variable.unknown
        if index in ("@", "*"):
            return variable.values
        if any(map(self.marks.split, variable.values)):
            return Unknown(f"the number of words in {name} is not known here")
        key = self._key(variable, index or "0")
        if isinstance(key, Unknown):
            return key
        return [variable.items[key]] if key in variable.items else []

    def value(self, name: str) -> str | None:
        """The value of a variable; None if it is not known."""
        found = self.elements(name)
        return None if found is None or isinstance(found, Unknown) else "".join(found)

    def _key(self, variable: Variable, index: str) -> str | Unknown:
        text = "".join(self._plain(Reader(index).quoted()))
        if variable.kind == TABLE:
            why = self.marks.unknown([text])
            return why or text.strip("\"'")
        try:
            place = self.compute(index)
        except NotKnownError as error:
            return Unknown(f"the index {index} is not known here", error.needs)
        if place < 0:
            place += 1 + max(map(int, variable.items), default=-1)
        return str(place)

    def _plain(self, parts: Sequence[WordPart]) -> list[str]:
        return [" ".join(values) for values, _ in self._pieces(parts, False)]

    def _variable(self, part: WordPart) -> list[str] | str:
        """What a variable becomes: values, or the argument of its operator, which is to be read."""
        match = _BRACED.fullmatch(part.text)
        if match is None:
            return [self.left(part)]
        name = match["name"]
        index = match["index"]
        many = name in ("@", "*") or index in ("@", "*")
        operation = match["operator"] or ""
        if match["sign"] == "!":
            return self._indirect(part, name, index, match["rest"] or "")
        found = self.elements(name, index)
        if isinstance(found, Unknown):
            return [self.left(part, found)]
        if match["sign"] == "#":
            return self._length(part, found, many or name in ("@", "*"))
        if operation in (":-", "-", ":=", "="):
            return self._default(part, match, found)
        if found is None:
            return [self.left(part)]
        empty = not found or (operation[:1] == ":" and found == [""])
        if operation in (":+", ":?") and _may_be_empty(found):
            return [self.left(part)]
        if operation in (":+", "+"):
            return [] if empty and not part.quoted else [""] if empty else str(match["argument"])
        if operation in (":?", "?") and empty:
            return [self.left(part, Unknown(f"{part.source} ends the script"))]
        values = found if many else found or [""]
        if operation not in ("", ":?", "?"):
            argument = match["argument"] or ""
            if operation == ":":
                edited = self._slice(values, argument, name, many)
            else:
                each = [self._edited(value, operation, argument) for value in values]
                edited = [one for one in each if one is not None]
                edited = edited if len(edited) == len(values) else None
            if edited is None:
                return [self.left(part)]
            values = edited
        if part.quoted and (name == "*" or index == "*"):
            if any(map(self.marks.split, values)):
                return [self.left(part)]
            return [self._separators()[:1].join(values)]
        return values

    def _indirect(self, part: WordPart, name: str, index: str | None, rest: str) -> list[str] | str:
        """${!NAME}."""
        variable = self.state.variables.get(name)
        if index in ("@", "*"):
            known = variable is not None and variable.unknown is None
            if not known or variable is None or variable.kind == TABLE:
                return [self.left(part)]
            return [*variable.items]
        target = self.value(name)
        if target is None or is_unknown([target]) or not re.fullmatch(r"\w+(\[.*\])?", target):
            return [self.left(part)]
        inside = f"{target}{rest}"
        return self._variable(replace(part, text=inside, source=f"${{{inside}}}"))

    def _length(self, part: WordPart, found: list[str] | None, many: bool) -> list[str]:
        """${#NAME}."""
        if found is None:
            return [self.left(part)]
        if many:
            return [self.left(part)] if any(map(self.marks.split, found)) else [str(len(found))]
        return [self.left(part)] if is_unknown(found) else [str(len("".join(found)))]

    def _default(
        self, part: WordPart, match: re.Match[str], found: list[str] | None
    ) -> list[str] | str:
        """${NAME:-argument} and ${NAME:=argument}."""
        name = match["name"]
        operation = match["operator"]
        argument = match["argument"]
        if found and not (operation[0] == ":" and found == [""]):
            if operation[0] == "=" or operation == "-" or not _may_be_empty(found):
                return found
            if operation == ":-":
                return [self.left(part)]
            needs = (self.marks.unknown(found) or Unknown("")).needs
            why = Unknown(f"{part.source} may set {name}", needs)
            self.forget(name, why)
            return [self.left(part, why)]
        if found is None and not argument:
            return [self.left(part)]
        if found is None and name in _OWN + _DIRECTORY:
            return [self.left(part)]
        if found is None or operation in (":=", "="):
            value = self.text(Word(0, tuple(argument_parts(argument, part.quoted))))
            if found is None:
                self.told.assumed[name] = self.marks.shown(value)
            if operation in (":=", "=") and re.match(r"[A-Za-z_]", name):
                self.put(name, value, match["index"])
        return argument

    def _slice(self, values: list[str], text: str, name: str, many: bool) -> list[str] | None:
        """${NAME:start:length}."""
        start, colon, length = text.partition(":")
        if is_unknown(values):
            return None
        try:
            first = self.compute(start)
            number = self.compute(length) if colon else None
        except NotKnownError:
            return None
        if many:
            if first < (1 if name in ("@", "*") else 0) or (number or 0) < 0:
                return None
            variable = self.state.variables.get(name)
            if variable and [*variable.items] != [str(at) for at in range(len(values))]:
                return None
            first -= 1 if name in ("@", "*") else 0
            return values[first:] if number is None else values[first : first + number]
        value = values[0]
        first = first + len(value) if first < 0 else first
        if first < 0:
            return [""]
        end = len(value) if number is None else number + (first if number >= 0 else len(value))
        return [value[first:end]] if end >= first else None

    def _edited(self, value: str, operation: str, argument: str) -> str | None:
        """A value with its end or beginning cut off, with replacements, or in another case; None
        where that is not known.
        """
        if is_unknown([value]):
            return None
        if operation in ("%", "%%", "#", "##"):
            pattern = self.pattern(Reader(argument).word(""))
            return None if is_unknown([pattern]) else cut(value, operation, pattern)
        if operation in ("/", "//"):
            first, new = _halves(argument)
            pattern = self.pattern(Reader(first).word(""))
            text = self.text(Reader(new).word(""))
            if is_unknown([pattern, text]):
                return None
            if not text.isascii() or "&" in text or len(value) * len(text) > LARGEST:
                return None
            return replaced(value, pattern, text, operation == "//")
        return None if argument else cased(value, operation)

    # assignments

    def put(self, name: str, value: str, index: str | None = None, more: bool = False) -> None:
        """Set a variable, or an element of it. more: put it behind what there is."""
        was = self.state.variables.get(name)
        if was is None:
            # what the environment has may be what is added to
            source = f"${name}" if more and index is None else ""
            was = Variable(
                {"0": self.left(WordPart(VARIABLE, name, True, source))} if source else {}
            )
        if was.fixed:
            return
        if was.unknown and (more or index is not None):
            return
        if index is not None and not was.kind:
            was = replace(was, kind=ARRAY)
        key = self._key(was, index) if index is not None else "0"
        if isinstance(key, Unknown):
            self.state.variables[name] = replace(was, unknown=key)
            return
        if was.kind and any(map(self.marks.split, was.values)):
            why = Unknown(f"the number of words in {name} is not known here")
            self.state.variables[name] = replace(was, unknown=why)
            return
        before = was.items.get(key, "") if more else ""
        if index is None and not was.kind and not was.integer:
            value = self._chained(name, before + value)
            before = ""
        if was.integer:
            try:
                sum_ = self.compute(value) + (self.compute(before) if more else 0)
            except NotKnownError as error:
                why = Unknown(f"{name} is computed of what is not known here", error.needs)
                self.state.variables[name] = replace(was, unknown=why)
                return
            value = str(sum_)
            before = ""
        items = {**was.items, key: before + self._kept(name, value)}
        if was.kind == ARRAY:
            items = dict(sorted(items.items(), key=lambda item: int(item[0])))
        self.state.variables[name] = replace(was, items=items, unknown=None)

    def assign(self, given: Assignment) -> None:
        """Take an assignment."""
        if given.value.items is None:
            self.put(given.name, self.text(given.value), given.index, given.more)
            return
        was = self.state.variables.get(given.name, Variable())
        if was.fixed:
            return
        if given.more and was.unknown:
            return
        items = dict(was.items) if given.more else {}
        at = 1 + max(map(int, items), default=-1) if was.kind != TABLE else 0
        kind = was.kind if was.kind == TABLE else ARRAY
        for item in given.value.items:
            match = re.match(r"\[([^]]+)\]=", item.plain)
            if match or kind == TABLE:
                keyed = self._keyed(item, replace(was, kind=kind, items=items))
                if keyed is None:
                    why = Unknown(f"{given.name} has an index that is not known here")
                    self.state.variables[given.name] = replace(was, kind=kind, unknown=why)
                    return
                items[keyed[0]] = keyed[1]
                at = int(keyed[0]) + 1 if kind == ARRAY else 0
                continue
            values = self.fields(item)
            self.count(values)
            items |= {str(at + place): value for place, value in enumerate(values)}
            at += len(values)
        if kind == ARRAY:
            items = dict(sorted(items.items(), key=lambda each: int(each[0])))
        self.state.variables[given.name] = replace(was, items=items, kind=kind, unknown=None)

    def _keyed(self, item: Word, variable: Variable) -> tuple[str, str] | None:
        """[key]=value, between the parentheses of an array."""
        parts = []
        key = None
        head = ""
        for part in item.parts:
            if key is not None:
                parts.append(part)
                continue
            head += part.text if part.quoted else part.source or part.text
            if match := re.match(r"\[([^]]+)\]=", head):
                key = self._key(variable, match[1])
                rest = replace(part, text=head[match.end() :])
                parts = [rest] if rest.text else []
        if key is None or isinstance(key, Unknown):
            return None
        return key, self.text(Word(item.line, tuple(parts)))

    def forget(self, name: str, why: Unknown) -> None:
        """The script sets a variable to what is not known."""
        was = self.state.variables.get(name, Variable())
        self.state.variables[name] = replace(was, unknown=why)

    def _chained(self, name: str, value: str) -> str:
        """A value that has what the environment has under its name, as PATH=DIR:$PATH."""
        itself = any(name in left.reads and not left.unknown for left in self.marks.all(value))
        plain = re.fullmatch(r"[\w./:=,@%+-]*", MARK.sub("", value))
        if not itself or not plain or len(value) == 1:
            return value
        self.lines.append(SetupLine(name, Variable({"0": value}), len(self.state.moves)))
        return self.marks.mark(Left(f"${name}", self.level, lines=(len(self.lines) - 1,)))

    def _kept(self, name: str, value: str) -> str:
        """A value whose commands are run once, in lines of their own."""

        def line(match: re.Match[str]) -> str:
            left = self.marks.of(match[0])
            if not left.command or left.level < self.level:
                return match[0]
            taken = {each.name for each in self.lines}
            free = name
            while free in taken or (free != name and free in self.state.variables):
                stem, _, number = free.rpartition("_")
                free = f"{stem}_{int(number) + 1}" if number.isdigit() and stem else f"{free}_2"
            value = Variable({"0": self.marks.splitting(match[0], False)})
            self.lines.append(SetupLine(free, value, len(self.state.moves)))
            place = (len(self.lines) - 1,)
            kept = Left(f"${free}", self.level, lines=place, unknown=left.unknown)
            return self.marks.mark(replace(kept, command=False))

        return MARK.sub(line, value)

    # arithmetic

    def compute(self, text: str) -> int:
        """The value of arithmetic. Raises NotKnownError, and forgets what it would have set."""
        plain = "".join(self._plain(Reader(text).quoted()))
        try:
            if why := self.marks.unknown([plain]):
                raise NotKnownError(*why.needs)
            return self._calculator.value(plain)
        except NotKnownError as error:
            for name in assigned(text):
                self.forget(name, Unknown(f"{text} is not known here", error.needs))
            raise

    def run_arithmetic(self, text: str) -> int:
        """The value of a command of arithmetic; the variable that it sets may be left to a shell.
        Raises NotKnownError.
        """
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=(?!=)(.*)", text, re.DOTALL)
        left = ""
        if match and not assigned(match[2]):
            left = self.left(WordPart(ARITHMETIC, match[2], True, f"$(({match[2]}))"))
        try:
            return self.compute(text)
        except NotKnownError:
            if match and left:
                self.put(match[1], left)
            raise

    def _computed(self, part: WordPart) -> str:
        self._calculator.sets = False
        try:
            return str(self.compute(part.text))
        except NotKnownError as error:
            sets = Unknown(f"{part.source} sets a variable", error.needs)
            known = not assigned(part.text) and not self._calculator.sets
            return self.left(part, None if known else sets)

    def _number(self, name: str) -> str:
        name, _, index = name.removesuffix("]").partition("[")
        found = self.elements(name, index or None)
        if found is None:
            raise NotKnownError(name)
        if isinstance(found, Unknown):
            raise NotKnownError(*found.needs)
        if why := self.marks.unknown(found):
            raise NotKnownError(*why.needs)
        return "".join(found)

    def _count_in(self, name: str, value: str) -> None:
        name, _, index = name.removesuffix("]").partition("[")
        self.put(name, value, index or None)

    # what is left

    def left(self, part: WordPart, unknown: Unknown | None = None) -> str:
        """The character of a reference that is left to the shell."""
        reads: dict[str, None] = {}
        lines: dict[int, None] = {}
        moved = part.kind in (COMMAND, PROCESS)
        if moved and self._separators() != _BLANKS:
            unknown = unknown or Unknown(f"{part.source} is run with another IFS")
        for name in self._mentions(part):
            moved = moved or name in _DIRECTORY
            if name.endswith("()"):
                unknown = unknown or Unknown(f"{part.source} calls a function of the script")
                continue
            variable = self.state.variables.get(name)
            if variable is not None:
                unknown = unknown or variable.unknown
                lines |= dict.fromkeys(self._line(name, variable)) if not variable.unknown else {}
            elif name.isdigit() and name != "0" or name in ("@", "*", "#"):
                if self.state.arguments is not None:
                    unknown = unknown or Unknown(f"{part.source} has arguments of a function")
                reads[name] = None
            elif name in (*_OWN, *_CHANGING):
                unknown = unknown or Unknown(f"${name} is not known here")
            else:
                reads[name] = None
        for inner in self.marks.all(part.source):
            reads |= dict.fromkeys(inner.reads)
            lines |= dict.fromkeys(inner.lines)
            unknown = unknown or inner.unknown
        return self.marks.mark(
            Left(
                part.source,
                level=self.level,
                splits=False,
                reads=tuple(reads),
                lines=tuple(lines),
                moves=len(self.state.moves) if moved else None,
                command=part.kind == COMMAND,
                unknown=unknown,
            )
        )

    def _line(self, name: str, variable: Variable) -> tuple[int, ...]:
        """The line that gives a variable its value where a reference to it is left."""
        for left in self.marks.all("".join(variable.values)):
            if left.source == f"${name}" and left.lines and len(variable.values[0]) == 1:
                return left.lines
        bare = replace(variable, exported=False)
        last = [place for place, line in enumerate(self.lines) if line.name == name][-1:]
        if not last or self.lines[last[0]].variable != bare:
            self.lines.append(SetupLine(name, bare, len(self.state.moves)))
            last = [len(self.lines) - 1]
        return tuple(last)

    def _mentions(self, part: WordPart) -> Iterator[str]:
        """The variables in a reference, and NAME() for functions."""
        if part.kind == VARIABLE:
            match = re.match(r"[#!]?(\w+|[@*#?$!-])", part.text)
            yield match[1] if match else ""
            rest = part.text[match.end() :] if match else ""
            if index := re.match(r"\[([^]]*)\]", rest):
                yield from re.findall(r"[A-Za-z_]\w*", index[1])
            for inner in argument_parts(rest, False):
                yield from self._mentions(inner)
        elif part.kind == ARITHMETIC:
            for inner in Reader(part.text).quoted():
                yield from re.findall(r"\b[A-Za-z_]\w*", inner.text) if inner.kind == TEXT else ()
                yield from self._mentions(inner)
        elif part.kind in (COMMAND, PROCESS):
            reader = Reader(part.text)
            while (token := reader.next()) is not None:
                words = [token] if isinstance(token, Word) else []
                if isinstance(token, Redirect):
                    words = [token.target, *([token.body] if token.body else [])]
                for word in words:
                    yield from self._of_word(word)

    def _of_word(self, word: Word) -> Iterator[str]:
        if word.bare in self.state.functions:
            yield f"{word.bare}()"
        for part in word.parts:
            yield from self._mentions(part)
        for item in word.items or ():
            yield from self._of_word(item)


def is_unknown(texts: Sequence[str]) -> bool:
    """Whether something in texts is left to a shell."""
    return any(MARK.search(text) for text in texts)


def _may_be_empty(values: Sequence[str]) -> bool:
    """Whether all that is in values is left to a shell, which may find it empty."""
    return is_unknown(values) and not MARK.sub("", "".join(values))


def _halves(argument: str) -> tuple[str, str]:
    """The pattern and the text of ${NAME/pattern/text}."""
    at = 1 if argument[:1] == "/" else 0
    while at < len(argument):
        if argument[at] == "\\":
            at += 1
        elif argument[at] in "'\"":
            at = argument.find(argument[at], at + 1)
            at = len(argument) if at < 0 else at
        elif argument.startswith("${", at):
            at = argument.find("}", at)
            at = len(argument) if at < 0 else at
        elif argument[at] == "/":
            return argument[:at], argument[at + 1 :]
        at += 1
    return argument, ""


def _split(value: str, separators: str) -> tuple[bool, list[str], bool]:
    """A value split into words; whether a word ends before it, and behind it."""
    if not separators:
        return False, [value] if value else [], False
    blanks = re.escape("".join(each for each in separators if each in " \t\n")) or "\0"
    others = re.escape("".join(each for each in separators if each not in " \t\n")) or "\0"
    rest = re.sub(f"^[{blanks}]+", "", value)
    before = rest != value
    inner = re.sub(f"[{blanks}]+$", "", rest)
    behind = inner != rest
    if not inner:
        return before, [], behind
    tokens = re.split(f"[{blanks}]*[{others}][{blanks}]*|[{blanks}]+", inner)
    if len(tokens) > 1 and not tokens[-1]:
        del tokens[-1]
        behind = True
    return before, tokens, behind


def _with_home(parts: Sequence[WordPart], assigns: bool = False) -> list[WordPart]:
    """Parts in which ~ at the beginning is $HOME; assigns: also behind a colon."""
    found: list[WordPart] = []
    home = WordPart(VARIABLE, "HOME", True, "$HOME")
    for place, part in enumerate(parts):
        if part.kind != TEXT or part.quoted or "~" not in part.text:
            found.append(part)
            continue
        last = place == len(parts) - 1
        start = "" if place == 0 else "\0"
        places = (
            rf"(^{start}|:)~(?=/|:{'|$' if last else ''})" if assigns else rf"(^{start})~(?=/|$)"
        )
        texts = re.split(places, part.text)
        found += [replace(part, text=texts[0])] if texts[0] else []
        for before, behind in zip(texts[1::2], texts[2::2], strict=True):
            found += [replace(part, text=before)] if before else []
            found.append(home)
            found += [replace(part, text=behind)] if behind else []
    return found


def braced(word: Word) -> list[Word]:
    """The words of {a,b} and {1..3}."""
    if not any("{" in p.text for p in word.parts if p.kind == TEXT and not p.quoted):
        return [word]
    # every part as one letter, so that braces may be around quoted ones
    parts: list[WordPart] = []
    for part in word.parts:
        plain = part.kind == TEXT and not part.quoted
        parts += [replace(part, text=letter) for letter in part.text] if plain else [part]
    letters = "".join(p.text if p.kind == TEXT and not p.quoted else "\ue000" for p in parts)
    match = _BRACES.search(letters)
    if match is None:
        return [word]
    start, end = match.span()
    inner: list[list[WordPart]] = []
    if "," in match[1]:
        inner = [[]]
        for letter, part in zip(match[1], parts[start + 1 : end - 1], strict=True):
            if letter == ",":
                inner.append([])
            else:
                inner[-1].append(part)
    else:
        inner = [[WordPart(TEXT, each)] for each in _series(match[1])]
    words = []
    for each in inner:
        joined = _together([*parts[:start], *each, *parts[end:]])
        words += braced(Word(word.line, tuple(joined)))
        if len(words) > _MOST_WORDS:
            raise ConfigError("script", match[0], "it is too long", "Write the command by itself")
    return words


def _series(text: str) -> list[str]:
    first, last, *more = text.split("..")
    if not re.fullmatch(r"-?\d+", first) or not re.fullmatch(r"-?\d+", last):
        one, other = ord(first), ord(last)
        step = 1 if one <= other else -1
        return [chr(each) for each in range(one, other + step, step)]
    one, other = int(first), int(last)
    size = abs(int(more[0])) or 1 if more else 1
    if abs(one - other) // size > _MOST_WORDS:
        raise ConfigError("script", text, "it is too long", "Write the command by itself")
    step = size if one <= other else -size
    padded = any(re.match(r"-?0\d", each) for each in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{each:0{width}d}" for each in range(one, other + (1 if step > 0 else -1), step)]


def _together(parts: Sequence[WordPart]) -> list[WordPart]:
    """Parts, letters that follow one another in one."""
    found: list[WordPart] = []
    for part in parts:
        last = found[-1] if found else None
        plain = part.kind == TEXT and not part.quoted
        named = last is not None and re.fullmatch(r"\$[A-Za-z_]\w*", last.source, re.ASCII)
        if last is not None and plain and last == WordPart(TEXT, last.text):
            found[-1] = WordPart(TEXT, last.text + part.text)
        elif (
            last is not None
            and not last.quoted
            and plain
            and named
            and re.match(r"\w", part.text, re.ASCII)
        ):
            # braces come before variables: $A{1,2} is $A1 $A2
            found[-1] = replace(last, text=last.text + part.text, source=last.source + part.text)
        else:
            found.append(part)
    return found
