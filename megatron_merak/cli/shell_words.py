"""A shell script taken apart without running it: commands as words, and what words become where
variables are known.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from .shell_values import LARGEST, arithmetic, braced

LITERAL = "\ue000"  # a dollar sign that its quotes keep from a shell
SEPARATORS = ("\n", ";", "&", "|", "(", ")", "&&", "||", ";;")
_REFERENCE = r"`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^{}]*\}"
_PART = re.compile(rf"(?:{_REFERENCE}|\S)+")  # commands in a value are not split
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=")


@dataclass(frozen=True)
class WordPart:
    """A part of a word. quote: ' or ", or empty; in ' nothing is replaced, and in " what replaces
    is not split.
    """

    text: str
    quote: str = ""


@dataclass
class Word:
    """A word of a command, or a separator.

    line: where it stands, from 1.
    pieces: its parts, none for a separator.
    separator: one of SEPARATORS, else empty.
    items: the words between the parentheses of NAME=( ... ); None for other words.
    """

    line: int
    pieces: list[WordPart] = field(default_factory=list)
    separator: str = ""
    items: "list[Word] | None" = None

    @property
    def plain(self) -> str:
        """The text as it stands, without quotes."""
        return "".join(piece.text for piece in self.pieces)


class Reader:
    """Reads the words of a script, one after the other."""

    def __init__(self, text: str):
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = 1

    def words(self, end: str = "") -> Iterator[Word]:
        """All words up to the separator ``end``, or to the end of the script."""
        while (word := self._next()) is not None:
            if word.separator and word.separator == end:
                return
            yield word

    def _take(self, length: int = 1) -> str:
        taken = self.text[self.at : self.at + length]
        self.at += length
        self.line += taken.count("\n")
        return taken

    def _next(self) -> Word | None:
        while self.at < len(self.text):
            if match := re.compile(r"[ \t]+|\\\n").match(self.text, self.at):
                self._take(len(match.group()))
            elif self.text[self.at] == "#":
                self._take(len(self.text[self.at :].split("\n", 1)[0]))
            elif match := re.compile(r"\(\((?:[^()]|\([^()]*\))*\)\)").match(self.text, self.at):
                # arithmetic
                return Word(self.line, [WordPart(self._take(len(match.group())), '"')])
            elif match := re.compile(
                r"\d*(?:<<<|[<>]{1,2})&?[ \t]*[^\s;&|()]*|&>>?[ \t]*[^\s;&|()]*"
            ).match(self.text, self.at):
                self._redirect(match.group())
            elif match := re.compile(r"&&|\|\||;;|[\n;&|()]").match(self.text, self.at):
                return Word(self.line, separator=self._take(len(match.group())))
            else:
                return self._word()
        return None

    def _redirect(self, text: str) -> None:
        """Skip where a command reads or writes; with << also the text that follows."""
        self._take(len(text))
        document = re.fullmatch(r"\d*<<-?[ \t]*['\"]?(\w+)['\"]?", text)
        if document:
            body = re.compile(rf".*?^[ \t]*{document.group(1)}[ \t]*$", re.DOTALL | re.MULTILINE)
            if match := body.match(self.text, self.at):
                self._take(len(match.group()))

    def _word(self) -> Word:
        word = Word(self.line)
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "(" and re.fullmatch(r"\w+\+?=", word.plain) and not word.pieces[-1].quote:
                self._take()
                word.items = [each for each in self.words(")") if not each.separator]
            elif letter in " \t\n;&|()<>":
                break
            elif letter == "\\":
                escaped = self._take(2)
                word.pieces += [WordPart(escaped[1:], "'")] if escaped != "\\\n" else []
            elif letter == "'":
                word.pieces.append(WordPart(self._to("'"), "'"))
            elif letter == '"':
                word.pieces += self._quoted()
            else:
                word.pieces.append(WordPart(self._reference() if letter in "$`" else self._plain()))
        return word

    def _plain(self) -> str:
        match = re.compile(r"[^ \t\n;&|()<>\\'\"$`]+").match(self.text, self.at)
        assert match is not None, "called at a plain letter"
        return self._take(len(match.group()))

    def _to(self, quote: str) -> str:
        """What is between two quotes."""
        end = self.text.find(quote, self.at + 1)
        taken = self._take((end if end >= 0 else len(self.text)) + 1 - self.at)
        return taken[1:].removesuffix(quote)

    def _reference(self) -> str:
        """A variable, or a command or arithmetic that is left as it stands."""
        if self.text[self.at] == "`":
            return f"`{self._to('`')}`"
        opening = self.text[self.at + 1 : self.at + 2]
        if opening not in ("{", "("):
            match = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])?").match(self.text, self.at)
            assert match is not None, "called at a dollar"
            return self._take(len(match.group()))
        closing = {"{": "}", "(": ")"}[opening]
        depth = 0
        end = self.at + 1
        while end < len(self.text):
            depth += {opening: 1, closing: -1}.get(self.text[end], 0)
            end += 1
            if depth == 0:
                break
        return self._take(end - self.at)

    def _quoted(self) -> Iterator[WordPart]:
        """The pieces between double quotes."""
        self._take()
        yield WordPart("", '"')  # so that "" is a word
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] in "$`":
                yield WordPart(self._reference(), '"')
            elif self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in (
                "$",
                "`",
                '"',
                "\\",
                "\n",
            ):
                escaped = self._take(2)[1]
                yield WordPart(escaped if escaped != "\n" else "", "'")
            else:
                yield WordPart(self._take(), '"')
        self._take()


class Variables:
    """The variables of a script, as far as its text gives them.

    values: the words of a variable; of one that is no array there is one, and of one that is not
            set there is none.
    assumed: variables whose default, in ${NAME:-default}, was used.
    lost: variables that the script sets to what is not known.
    """

    def __init__(self, values: dict[str, list[str]] | None = None) -> None:
        self.values: dict[str, list[str]] = dict(values or {})
        self.assumed: dict[str, str] = {}
        self.lost: set[str] = set()
        self._made = 0  # characters that references have become

    def assign(self, word: Word) -> bool:
        """Take an assignment; return whether the word is one."""
        match = _ASSIGNED.match(word.pieces[0].text) if word.pieces else None
        if match is None or word.pieces[0].quote:
            return False
        name = match.group(1)
        index = match.group(2)
        more = bool(match.group(3))
        if word.items is not None:
            values = [value for item in word.items for value in self.fields(item)]
            self.values[name] = [*self.values.get(name, []), *values] if more else values
            return True
        rest = [WordPart(word.pieces[0].text[match.end() :]), *word.pieces[1:]]
        value = "".join(self._replaced(piece) for piece in rest)
        before = self.values.get(name, [])
        if index is not None:
            place = arithmetic(index, self.value)
            if more or place is None or not 0 <= place <= len(before):
                self.forget(name)
            else:
                self.values[name] = [*before[:place], value, *before[place + 1 :]]
            return True
        before = before or [""]
        self.values[name] = [*before[:-1], before[-1] + value] if more else [value]
        return True

    def forget(self, name: str) -> None:
        """The script sets a variable to what is not known."""
        self.values.pop(name, None)
        self.lost.add(name)

    def value(self, name: str) -> str | None:
        """The value of a variable; None if it is not known."""
        return " ".join(self.values[name]) if name in self.values else None

    def fields(self, word: Word) -> list[str]:
        """The words that a word becomes: variables replaced, and split at blanks outside
        of quotes.
        """
        fields = [""]
        open_ = bool(word.pieces) and all(piece.quote for piece in word.pieces)
        for piece in word.pieces:
            array = (
                re.fullmatch(r"\$(?:\{(\w+)\[@\]\}|(@))", piece.text)
                if piece.quote == '"'
                else None
            )
            if array and (array[1] or array[2]) in self.values:
                parts = list(self.values[array[1] or array[2]])
                self.count(parts)
                open_ = bool(parts)
            elif piece.quote or not piece.text.startswith("$"):
                parts = [self._replaced(piece)]
            else:
                value = self._replaced(piece)
                parts = [value] if value == piece.text else _PART.findall(value)
                if value[:1].isspace() and fields[-1]:
                    fields.append("")
                if value[-1:].isspace():
                    parts.append("")
            if parts:
                fields[-1] += parts[0]
                fields += parts[1:]
        return fields if open_ else [each for each in fields if each]

    def count(self, texts: Sequence[str]) -> None:
        """Count what references have become. Raises ConfigError if it is too much, as of A=$A$A$A,
        repeated.
        """
        self._made += sum(map(len, texts)) + len(texts)
        if self._made > LARGEST:
            reason = f"its variables become more than {LARGEST:,} characters"
            raise ConfigError("script", "(variables)", reason, "Write the command by itself")

    def _replaced(self, piece: WordPart) -> str:
        """The value of a piece; a variable that is not known, and what is no variable, as it
        stands.

        Raises ConfigError for a script that makes too much of its variables.
        """
        text = self._value(piece)
        self.count([text])
        return text

    def _value(self, piece: WordPart) -> str:
        text = piece.text
        if piece.quote == "'":
            return text.replace("$", LITERAL)
        if not text.startswith("$") or len(text) == 1:
            return text
        if text.startswith("$(("):
            number = arithmetic(text[3:-2], self.value)
            return text if number is None else str(number)
        if not text.startswith("${"):
            return text if (value := self.value(text[1:])) is None else value
        name = re.match(r"#?(\w*)", text[2:-1])
        lost = name is not None and name[1] in self.lost
        value = (
            None
            if lost
            else braced(text[2:-1], self.values, self._expanded, self.assumed.__setitem__)
        )
        return text if value is None else value

    def _expanded(self, text: str) -> str:
        return " ".join(each for word in Reader(text).words() for each in self.fields(word))


def references(text: str) -> list[str]:
    """A text with variables, commands and arithmetic in it, taken apart: text and reference in
    turns.
    """
    parts = [""]
    reader = Reader(text)
    while reader.at < len(text):
        if text[reader.at] in "$`":
            parts += [reader._reference(), ""]
        else:
            parts[-1] += reader._take()
    return parts


def plain_words(text: str, values: dict[str, list[str]] | None = None) -> list[str]:
    """The words of a command, with the separators between commands; values: variables that are
    known in it.
    """
    variables = Variables(values)
    words = (word for word in Reader(text).words() if word.separator != "\n")
    return [
        each
        for word in words
        for each in ([word.separator] if word.separator else variables.fields(word))
    ]


def commands(text: str) -> Iterator[list[Word]]:
    """The simple commands of a script in order, each with the separator that ends it as its last
    word.
    """
    command: list[Word] = []
    for word in Reader(text).words():
        command.append(word)
        if word.separator:
            yield command
            command = []
    if command:
        yield [*command, Word(command[-1].line, separator="\n")]
