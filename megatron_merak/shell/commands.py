"""The commands of a shell script: lists, pipes, conditions, loops and functions of words."""

import re
from dataclasses import dataclass

from .words import Reader, Redirect, Separator, Token, Word, broken


@dataclass(frozen=True)
class Simple:
    """Words that are a command."""

    line: int
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...] = ()


@dataclass(frozen=True)
class ArithmeticCommand:
    """(( text ))."""

    line: int
    text: str


@dataclass(frozen=True)
class Test:
    """[[ tokens ]]."""

    line: int
    tokens: tuple[Word | str, ...]


@dataclass(frozen=True)
class Pipeline:
    """Commands that run side by side. negated: behind an exclamation mark."""

    line: int
    commands: tuple["Command", ...]
    negated: bool = False


@dataclass(frozen=True)
class AndOr:
    """Pipelines between && and ||. background: it ends in &."""

    line: int
    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...] = ()
    background: bool = False


@dataclass(frozen=True)
class CommandList:
    """Chains, one after the other. shell: a shell of their own runs them."""

    line: int
    chains: tuple[AndOr, ...]
    shell: bool = False


@dataclass(frozen=True)
class If:
    """(condition, then) of each branch, and else."""

    line: int
    branches: tuple[tuple[CommandList, CommandList], ...]
    otherwise: CommandList | None


@dataclass(frozen=True)
class While:
    """A loop. until: its condition ends it."""

    line: int
    condition: CommandList
    body: CommandList
    until: bool = False


@dataclass(frozen=True)
class For:
    """for NAME in words; words: None for the arguments. asks: it is select."""

    line: int
    name: str
    words: tuple[Word, ...] | None
    body: CommandList
    asks: bool = False


@dataclass(frozen=True)
class Count:
    """for (( first; condition; step ))."""

    line: int
    texts: tuple[str, str, str]
    body: CommandList


@dataclass(frozen=True)
class CaseCommand:
    """(patterns, commands, how they end) of each part."""

    line: int
    word: Word
    parts: tuple[tuple[tuple[Word, ...], CommandList, str], ...]


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    line: int
    name: str
    body: "Command"


Command = (
    Simple
    | ArithmeticCommand
    | Test
    | CommandList
    | If
    | While
    | For
    | Count
    | CaseCommand
    | Function
)

_CLOSES = ("then", "do", "done", "fi", "elif", "else", "esac", "}")


def parsed(text: str, line: int = 1) -> CommandList:
    """Return the commands of a script. Raises ConfigError for what is none.

    text: the script.
    line: the number of its first line.
    """
    parser = _Parser(text, line)
    group = parser.group()
    if parser.token is not None:
        raise broken(parser.line, f"{parser.shown} is not expected here")
    return group


class _Parser:
    def __init__(self, text: str, line: int) -> None:
        self.reader = Reader(text, line)
        self.token: Token | None = None
        self._next()

    @property
    def line(self) -> int:
        return self.reader.line if self.token is None else self.token.line

    @property
    def shown(self) -> str:
        if self.token is None:
            return "its end"
        if isinstance(self.token, Word):
            return self.token.plain
        operator = self.token.text if isinstance(self.token, Separator) else self.token.operator
        return "the end of the line" if operator == "\n" else operator

    @property
    def bare(self) -> str:
        return self.token.bare if isinstance(self.token, Word) else ""

    @property
    def operator(self) -> str:
        return self.token.text if isinstance(self.token, Separator) else ""

    def _next(self) -> None:
        self.token = self.reader.next()

    def _blank(self) -> None:
        while self.operator == "\n":
            self._next()

    def _expect(self, text: str) -> None:
        self._blank()
        if text not in (self.bare, self.operator):
            raise broken(self.line, f"{text} is expected before {self.shown}")
        self._next()

    def _word(self) -> Word:
        if not isinstance(self.token, Word):
            raise broken(self.line, f"a word is expected before {self.shown}")
        word = self.token
        self._next()
        return word

    def group(self) -> CommandList:
        """Chains up to a word or an operator that closes them."""
        line = self.line
        chains: list[AndOr] = []
        while True:
            while self.operator in ("\n", ";") and self.token is not None:
                self._next()
            closes = self.bare in _CLOSES or self.operator in (")", ";;", ";&", ";;&")
            if self.token is None or closes:
                return CommandList(line, tuple(chains))
            chains.append(self._chain())

    def _chain(self) -> AndOr:
        line = self.line
        first = self._pipeline()
        rest = []
        while self.operator in ("&&", "||"):
            operator = self.operator
            self._next()
            self._blank()
            rest.append((operator, self._pipeline()))
        background = self.operator == "&"
        if background:
            self._next()
        elif self.operator not in ("\n", ";", ")", ";;", ";&", ";;&") and self.token is not None:
            raise broken(self.line, f"{self.shown} is not expected here")
        return AndOr(line, first, tuple(rest), background)

    def _pipeline(self) -> Pipeline:
        line = self.line
        negated = False
        while self.bare in ("!", "time"):
            negated ^= self.bare == "!"
            timed = self.bare == "time"
            self._next()
            if timed and self.bare == "-p":
                self._next()
        commands = [self._command()]
        while self.operator in ("|", "|&"):
            self._next()
            self._blank()
            commands.append(self._command())
        return Pipeline(line, tuple(commands), negated)

    def _command(self) -> Command:
        command = self._compound()
        if command is None:
            return self._simple()
        while isinstance(self.token, Redirect):
            self._next()
        return command

    def _compound(self) -> Command | None:
        line = self.line
        word = self.bare
        if self.operator == "(":
            # two parentheses that do not close together are shells in a shell
            if self.reader.text.startswith("(", self.reader.at):
                text = self.reader.arithmetic()
                if text is not None:
                    self._next()
                    return ArithmeticCommand(line, text)
            self._next()
            group = self.group()
            self._expect(")")
            return CommandList(line, group.chains, shell=True)
        if word == "[[":
            return self._test()
        if word == "{":
            self._next()
            group = self.group()
            self._expect("}")
            return group
        if word == "if":
            return self._if()
        if word in ("while", "until"):
            self._next()
            condition = self.group()
            return While(line, condition, self._body(), word == "until")
        if word in ("for", "select"):
            return self._for()
        if word == "case":
            return self._case()
        if word == "function":
            self._next()
            name = self._word().plain
            if self.operator == "(":
                self._next()
                self._expect(")")
            self._blank()
            return Function(line, name, self._command())
        return None

    def _body(self) -> CommandList:
        self._expect("do")
        body = self.group()
        self._expect("done")
        return body

    def _simple(self) -> Command:
        line = self.line
        words: list[Word] = []
        redirects: list[Redirect] = []
        while isinstance(self.token, Word | Redirect):
            if isinstance(self.token, Redirect):
                redirects.append(self.token)
            else:
                words.append(self.token)
            self._next()
            if self.operator == "(" and len(words) == 1 and words[0].bare:
                self._next()
                self._expect(")")
                self._blank()
                return Function(line, words[0].plain, self._command())
        if not words and not redirects:
            raise broken(line, f"a command is expected before {self.shown}")
        return Simple(line, tuple(words), tuple(redirects))

    def _if(self) -> If:
        line = self.line
        branches = []
        while self.bare in ("if", "elif"):
            self._next()
            condition = self.group()
            self._expect("then")
            branches.append((condition, self.group()))
        otherwise = None
        if self.bare == "else":
            self._next()
            otherwise = self.group()
        self._expect("fi")
        return If(line, tuple(branches), otherwise)

    def _for(self) -> Command:
        line = self.line
        asks = self.bare == "select"
        self._next()
        if self.operator == "(":
            texts = (self.reader.arithmetic() or "").split(";")
            self._next()
            if len(texts) != 3:
                raise broken(line, "for (( )) needs three expressions")
            if self.operator == ";":
                self._next()
            return Count(line, (texts[0], texts[1], texts[2]), self._loop())
        name = self._word().plain
        self._blank()
        words: list[Word] | None = None
        if self.bare == "in":
            self._next()
            words = []
            while isinstance(self.token, Word):
                words.append(self._word())
        if self.operator == ";":
            self._next()
        return For(line, name, None if words is None else tuple(words), self._loop(), asks=asks)

    def _loop(self) -> CommandList:
        self._blank()
        if self.bare == "{":
            self._next()
            body = self.group()
            self._expect("}")
            return body
        return self._body()

    def _case(self) -> CaseCommand:
        line = self.line
        self._next()
        word = self._word()
        self._expect("in")
        parts = []
        self._blank()
        while self.bare != "esac":
            if self.operator == "(":
                self._next()
            patterns = [self._word()]
            while self.operator == "|":
                self._next()
                patterns.append(self._word())
            self._expect(")")
            body = self.group()
            ending = self.operator
            if ending in (";;", ";&", ";;&"):
                self._next()
            parts.append((tuple(patterns), body, ending))
            self._blank()
        self._next()
        return CaseCommand(line, word, tuple(parts))

    def _test(self) -> Test:
        """[[ ... ]], in which < and > compare, and what follows =~ has operators of its own."""
        line = self.line
        tokens: list[Word | str] = []
        while True:
            token = self.reader.next()
            if token is None:
                raise broken(line, "[[ is not closed")
            if isinstance(token, Redirect):
                tokens += [token.operator, token.target]
                continue
            if isinstance(token, Separator):
                tokens += [token.text] if token.text != "\n" else []
                continue
            if token.bare == "]]":
                break
            tokens.append(token)
            if token.bare == "=~":
                match = re.compile(r"[ \t]*").match(self.reader.text, self.reader.at)
                self.reader.at = match.end() if match else self.reader.at
                tokens.append(self.reader.word(" \t\n"))
        self._next()
        return Test(line, tuple(tokens))
