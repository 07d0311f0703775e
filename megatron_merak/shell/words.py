"""A shell script taken apart into words and operators, with the quotes and references of words."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import ConfigError

FIRST_MARK = 0xF0000  # characters from here on stand for what is left to a shell (left.py)
LAST_MARK = 0xFFFFD
MARK = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")

TEXT = "text"
VALUE = "value"  # text that is split as a variable's value is
VARIABLE = "variable"
COMMAND = "command"
PROCESS = "process"
ARITHMETIC = "arithmetic"
LEFT = "left"

_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|<>|<&|>&|>>|>\||<(?!\()|>(?!\())|&>>?")
_OPERATOR = re.compile(r";;&|;&|;;|&&|\|\||\|&|[\n;&|()]")
_STOPS = " \t\n;&|()<>"
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[(.*)\])?(\+?)=", re.ASCII | re.DOTALL)
_NAMED = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])", re.ASCII)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "f": "\f",
    "v": "\v",
}


@dataclass(frozen=True)
class WordPart:
    """A part of a word.

    kind:   TEXT, VALUE, or what a shell replaces.
    text:   the text; of a reference what is between its braces or parentheses.
    quoted: whether what it becomes is kept in one piece, and patterns in it are text.
    source: the reference as it stands.
    """

    kind: str
    text: str
    quoted: bool = False
    source: str = ""


@dataclass(frozen=True)
class Word:
    """A word. line: where it stands, from 1. items: the words of NAME=( ... ), else None."""

    line: int
    parts: tuple[WordPart, ...] = ()
    items: "tuple[Word, ...] | None" = None

    @property
    def plain(self) -> str:
        """The text as it stands, without quotes."""
        return "".join(part.source or part.text for part in self.parts)

    @property
    def bare(self) -> str:
        """The text if nothing in it is quoted or replaced, as of the words that steer a script."""
        bare = all(part.kind == TEXT and not part.quoted for part in self.parts)
        return self.plain if bare else ""


@dataclass(frozen=True)
class Separator:
    """A separator of commands."""

    line: int
    text: str


@dataclass
class Redirect:
    """Where a command reads or writes: < FILE. body: the text behind << and <<<."""

    line: int
    operator: str
    target: Word
    body: Word | None = None


Token = Word | Separator | Redirect


@dataclass(frozen=True)
class Assignment:
    """NAME[index]+=value."""

    name: str
    index: str | None
    more: bool
    value: Word


def assignment(word: Word) -> Assignment | None:
    """Return what a word assigns; None if it is no assignment."""
    head = ""
    for place, part in enumerate(word.parts):
        if part.quoted and "[" not in head:
            return None
        head += part.source or part.text
        match = _ASSIGNED.match(head)
        if match and part.kind == TEXT and not part.quoted:
            rest = replace(part, text=head[match.end() :])
            parts = (rest, *word.parts[place + 1 :])
            value = Word(word.line, parts if rest.text else parts[1:], word.items)
            return Assignment(match[1], match[2], bool(match[3]), value)
        if not re.match(r"[A-Za-z_]\w*(\[|$)", head, re.ASCII):
            return None
    return None


class Reader:
    """Reads a script, one token after the other."""

    def __init__(self, text: str, line: int = 1):
        self.text = text
        self.at = 0
        self.line = line
        self._documents: list[tuple[Redirect, bool, bool]] = []

    def next(self) -> Token | None:
        """The next word, operator or redirection; None at the end."""
        while self.at < len(self.text):
            if match := _BLANKS.match(self.text, self.at):
                self._take(match.end() - self.at)
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            elif match := _REDIRECT.match(self.text, self.at):
                return self._redirect(match.group().lstrip("0123456789"), match.end())
            elif match := _OPERATOR.match(self.text, self.at):
                line = self.line
                operator = self._take(match.end() - self.at)
                if operator == "\n":
                    self._read_documents()
                return Separator(line, operator)
            else:
                return self.word()
        self._read_documents()
        return None

    def word(self, stops: str = _STOPS) -> Word:
        """A word. stops: the characters before which it ends."""
        line = self.line
        parts: list[WordPart] = []
        head = ""
        while self.at < len(self.text) and (letter := self.text[self.at]):
            if letter == "(" and stops and head and re.fullmatch(r"\w+(\[.*\])?\+?=", head):
                self._take()
                return Word(line, tuple(parts), tuple(self._items()))
            if letter in "<>" and self.text.startswith("(", self.at + 1) and "<" in stops:
                start = self.at
                source = self._take(self._closing(start + 1, "(", ")") - start)
                parts.append(WordPart(PROCESS, source[2:-1], False, source))
            elif letter == "(" and stops and head[-1:] in tuple("@!+?*"):
                # ?(a|b), a pattern
                text = self._take(self._closing(self.at, "(", ")") - self.at)
                parts.append(WordPart(TEXT, text))
            elif letter in stops:
                break
            else:
                parts += self._part(letter, stops)
            head = "".join(part.source or part.text for part in parts)
            if parts and parts[-1].quoted:
                head += "'"
        return Word(line, tuple(parts))

    def arithmetic(self) -> str | None:
        """What is between (( and )), of which the first parenthesis is read; None if it is no
        arithmetic but a shell in a shell.
        """
        start = self.at - 1
        end = self._closing(start, "(", ")")
        text = self.text[start:end]
        if not (text.startswith("((") and text.endswith("))")):
            return None
        self._take(end - self.at)
        return text[2:-2]

    def quoted(self, end: str = "") -> list[WordPart]:
        """The parts of a text in double quotes, up to ``end`` or to the end of the text."""
        parts = []
        plain = ""
        while self.at < len(self.text) and (letter := self.text[self.at]) != end:
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                plain += self._take(2)[1].replace("\n", "")
                continue
            if letter in "$`" or MARK.match(letter):
                reference = self._reference(True)
                if reference.kind == TEXT:
                    plain += reference.text
                    continue
                parts += [WordPart(TEXT, plain, True)] if plain else []
                parts.append(reference)
                plain = ""
            else:
                plain += self._take()
        if end and self.at >= len(self.text):
            raise self._open(end)
        self._take(len(end))
        return parts + ([WordPart(TEXT, plain, True)] if plain or not parts else [])

    def _take(self, length: int = 1) -> str:
        taken = self.text[self.at : self.at + length]
        self.at += length
        self.line += taken.count("\n")
        return taken

    def _part(self, letter: str, stops: str) -> list[WordPart]:
        following = self.text[self.at + 1 : self.at + 2]
        if letter == "\\":
            escaped = self._take(2)
            return [WordPart(TEXT, escaped[1:], True)] if escaped != "\\\n" else []
        if letter == "'":
            return [WordPart(TEXT, self._to("'"), True)]
        if letter == '"' or (letter == "$" and following == '"'):
            self._take(1 + (letter == "$"))
            return self.quoted('"')
        if letter == "$" and following == "'":
            self._take()
            return [WordPart(TEXT, self._escaped(), True)]
        if letter in "$`" or MARK.match(letter):
            return [self._reference(False)]
        end = self.at
        while end < len(self.text) and (
            self.text[end] not in stops + "\\'\"$`"
            and not MARK.match(self.text[end])
            and not (self.text[end] in "<>" and "<" in stops)
        ):
            end += 1
        # an operator where words do not end at it
        return [WordPart(TEXT, self._take(max(1, end - self.at)))]

    def _to(self, quote: str) -> str:
        """What is between two quotes."""
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self._open(quote)
        return self._take(end + 1 - self.at)[1:-1]

    def _escaped(self) -> str:
        """What $'...' is, behind the dollar sign."""
        match = re.compile(r"'((?:[^\\']|\\.)*)'", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise self._open("'")
        self._take(match.end() - self.at)

        def plain(found: re.Match[str]) -> str:
            code = found[1]
            if code[0] in "xuU":
                return chr(int(code[1:], 16))
            return chr(int(code, 8)) if code[0].isdigit() else _ESCAPES.get(code, code)

        codes = r"\\(x[\da-fA-F]{1,2}|u[\da-fA-F]{1,4}|[0-7]{1,3}|.)"
        return re.sub(codes, plain, match[1], flags=re.DOTALL)

    def _reference(self, quoted: bool) -> WordPart:
        start = self.at
        letter = self.text[start]
        if MARK.match(letter):
            return WordPart(LEFT, self._take(), quoted)
        if letter == "`":
            inner = self._backticks()
            return WordPart(COMMAND, inner, quoted, self.text[start : self.at])
        for opening, closing in ("{}", "()", "[]"):
            if not self.text.startswith(opening, start + 1):
                continue
            singles = opening != "{" or not quoted
            end = self._closing(start + 1, opening, closing, singles)
            source = self._take(end - start)
            if source.startswith("$((") and source.endswith("))"):
                return WordPart(ARITHMETIC, source[3:-2], quoted, source)
            kind = {"{": VARIABLE, "(": COMMAND, "[": ARITHMETIC}[opening]
            return WordPart(kind, source[2:-1], quoted, source)
        if match := _NAMED.match(self.text, start):
            return WordPart(VARIABLE, match[1], quoted, self._take(len(match.group())))
        return WordPart(TEXT, self._take(), quoted)

    def _backticks(self) -> str:
        match = re.compile(r"`((?:[^\\`]|\\.)*)`", re.DOTALL).match(self.text, self.at)
        if match is None:
            raise self._open("`")
        self._take(match.end() - self.at)
        return re.sub(r"\\([\\`$])", r"\1", match[1])

    def _closing(self, at: int, opening: str, closing: str, singles: bool = True) -> int:
        """The place behind the parenthesis that closes the one at ``at``."""
        start = at
        depth = 0
        while at < len(self.text):
            letter = self.text[at]
            if letter == "\\":
                at += 1
            elif letter == "'" and singles:
                at = self.text.find("'", at + 1)
            elif letter == '"':
                at = self._behind(at) - 1
            elif letter == "$" and self.text[at + 1 : at + 2] in ("(", "{"):
                inner = self.text[at + 1]
                at = self._closing(at + 1, inner, ")" if inner == "(" else "}", singles) - 1
            elif letter == opening:
                depth += 1
            elif letter == closing:
                depth -= 1
            if at < start:
                break
            at += 1
            if depth == 0:
                return at
        raise self._open(opening)

    def _behind(self, at: int) -> int:
        """The place behind the text in double quotes that begins at ``at``."""
        at += 1
        while at < len(self.text) and self.text[at] != '"':
            if self.text[at] == "\\":
                at += 1
            elif self.text[at] == "$" and self.text[at + 1 : at + 2] in ("(", "{"):
                inner = self.text[at + 1]
                closing = ")" if inner == "(" else "}"
                at = self._closing(at + 1, inner, closing, inner == "(") - 1
            at += 1
        if at >= len(self.text):
            raise self._open('"')
        return at + 1

    def _open(self, quote: str) -> ConfigError:
        return broken(self.line, f"{quote} is not closed")

    def _items(self) -> Iterable[Word]:
        while (token := self.next()) is not None:
            if isinstance(token, Word):
                yield token
            elif isinstance(token, Separator) and token.text == ")":
                return
            elif not isinstance(token, Separator) or token.text != "\n":
                raise broken(token.line, "what is between ( and ) is no list")
        raise self._open("(")

    def _redirect(self, operator: str, end: int) -> Redirect:
        line = self.line
        self._take(end - self.at)
        if match := _BLANKS.match(self.text, self.at):
            self._take(match.end() - self.at)
        redirect = Redirect(line, operator, self.word())
        if operator == "<<<":
            redirect.body = redirect.target
        elif operator.startswith("<<"):
            quoted = any(part.quoted for part in redirect.target.parts)
            self._documents.append((redirect, quoted, operator == "<<-"))
        return redirect

    def _read_documents(self) -> None:
        """Read the texts that << announced in the line that ends here."""
        for redirect, quoted, tabs in self._documents:
            line = self.line
            lines = []
            delimiter = "".join(part.text for part in redirect.target.parts)
            while self.at < len(self.text):
                end = self.text.find("\n", self.at) + 1 or len(self.text)
                each = self._take(end - self.at)
                each = each.lstrip("\t") if tabs else each
                if each.rstrip("\n") == delimiter:
                    break
                lines.append(each)
            body = "".join(lines)
            parts = [WordPart(TEXT, body, True)] if quoted else Reader(body, line).quoted()
            redirect.body = Word(line, tuple(parts))
        self._documents = []


def broken(line: int, reason: str) -> ConfigError:
    """The error for a script that bash would not read either."""
    return ConfigError("script", f"line {line}", reason, "Correct it")


def argument_parts(text: str, quoted: bool) -> list[WordPart]:
    """The parts of an operator's argument, as in ${NAME:-argument}, which is split unless the whole
    is quoted.
    """
    if quoted:
        return Reader(re.sub(r'(?<!\\)"', "", text)).quoted()
    parts = Reader(text).word("").parts
    return [
        replace(each, kind=VALUE) if each == WordPart(TEXT, each.text) else each for each in parts
    ]
