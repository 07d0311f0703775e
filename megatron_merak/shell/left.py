"""What is left to a shell: in a text, one character stands for a reference that is not replaced here."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .words import FIRST_MARK, LAST_MARK, MARK


@dataclass(frozen=True)
class Unknown:
    """Why something is not known.

    text:  a sentence's end, such as "line 3: [ -f x ] is not known here".
    needs: variables whose values would tell.
    mild:  whether it is only that a command succeeds.
    """

    text: str
    needs: tuple[str, ...] = ()
    mild: bool = False


@dataclass(frozen=True)
class Left:
    """A reference that is left to a shell.

    source:  as the shell reads it.
    level:   which shell it is: 0 for the script's, 1 for one that it starts, and so on.
    splits:  whether what it becomes is split into words.
    reads:   the variables of the environment that it reads.
    lines:   the lines that have to stand before it, as places in a list of them.
    moves:   number of changes of the directory before it; None: they do not matter.
    command: whether it runs something, which is done once.
    unknown: why it is not what the script has; None: it is.
    """

    source: str
    level: int = 0
    splits: bool = False
    reads: tuple[str, ...] = ()
    lines: tuple[int, ...] = ()
    moves: int | None = None
    command: bool = False
    unknown: Unknown | None = None

    @property
    def several(self) -> bool:
        """Whether it is "$@" or the like, which is several words inside of quotes, too."""
        return re.search(r"^\$\{?@|\[@\]", self.source) is not None

    @property
    def joined(self) -> "Left":
        """This reference where it is one text, as in an assignment."""
        source = re.sub(r"^(\$\{?)@|\[@\]", r"\1*", self.source)
        source = source.replace("*", "[*]", 1) if "[@]" in self.source else source
        return replace(self, source=source, splits=False)


class Marks:
    """The references that characters stand for."""

    def __init__(self) -> None:
        self._left: list[Left] = []
        self._places: dict[Left, int] = {}

    def mark(self, left: Left) -> str:
        """The character of a reference."""
        place = self._places.setdefault(left, len(self._left))
        if place == len(self._left):
            self._left.append(left)
        if FIRST_MARK + place > LAST_MARK:
            reason = "it has too many variables"
            raise ConfigError("script", "(variables)", reason, "Write the command by itself")
        return chr(FIRST_MARK + place)

    def of(self, mark: str) -> Left:
        """The reference of a character."""
        return self._left[ord(mark) - FIRST_MARK]

    def all(self, text: str) -> list[Left]:
        """The references in a text."""
        return [self.of(mark) for mark in MARK.findall(text)]

    def splitting(self, text: str, splits: bool = True) -> str:
        """A text whose references are split into words, or kept in one."""
        return MARK.sub(
            lambda match: self.mark(replace(self.of(match[0]), splits=splits)),
            text,
        )

    def split(self, text: str) -> bool:
        """Whether a text may become several words, or none."""
        return any(left.splits or left.several for left in self.all(text))

    def joined(self, text: str) -> str:
        """A text that stays one, as in an assignment."""
        return MARK.sub(lambda match: self.mark(self.of(match[0]).joined), text)

    def shown(self, text: str) -> str:
        """A text with references as they stand in a script, for people."""
        return MARK.sub(lambda match: self.shown(self.of(match[0]).source), text)

    def unknown(self, texts: Iterable[str]) -> Unknown | None:
        """Why texts are not known; None if they are."""
        lefts = [left for text in texts for left in self.all(text)]
        if not lefts:
            return None
        reasons = [left.unknown for left in lefts if left.unknown]
        if reasons:
            needs = dict.fromkeys(name for reason in reasons for name in reason.needs)
            return Unknown(reasons[0].text, tuple(needs))
        shown = ", ".join(dict.fromkeys(left.source for left in lefts))
        reads = dict.fromkeys(name for left in lefts for name in left.reads)
        known = any(left.command or not left.reads for left in lefts)
        return Unknown(shown, () if known else tuple(reads))

    def quoted(self, word: str, level: int = 0) -> str:
        """A word as a shell has to read it; references of the shells around it stay characters."""
        if not MARK.search(word):
            return shlex.quote(word)
        # text and reference in turns
        parts = re.split(f"({MARK.pattern})", word)
        lefts = self.all(word)
        several = any(left.several for left in lefts) and len(word) > 1
        if not several and not any(left.splits for left in lefts):
            return f'"{self._joined(parts, level)}"'
        out = []
        for place, part in enumerate(parts):
            if place % 2 == 0:
                out.append(shlex.quote(part) if part else "")
            elif self.of(part).splits:
                out.append(self._source(part, parts[place + 1], level))
            else:
                out.append(f'"{self._source(part, "", level)}"')
        return "".join(out)

    def _joined(self, parts: list[str], level: int) -> str:
        for place in range(0, len(parts), 2):
            parts[place] = re.sub(r'(["\\$`])', r"\\\1", parts[place])
        for place in range(1, len(parts), 2):
            parts[place] = self._source(parts[place], parts[place + 1], level)
        return "".join(parts)

    def _source(self, mark: str, behind: str, level: int) -> str:
        left = self.of(mark)
        if left.level < level:
            return mark
        name = re.fullmatch(r"\$(\w+)", left.source)
        if name and re.match(r"\w", behind):
            return f"${{{name[1]}}}"
        return MARK.sub(lambda match: self._source(match[0], "", level), left.source)


def is_left(text: str) -> bool:
    """Whether a text has something that is left to a shell."""
    return MARK.search(text) is not None
