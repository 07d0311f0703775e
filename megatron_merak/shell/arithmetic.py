"""Arithmetic of a shell."""

import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

LONGEST = 1000  # characters of arithmetic that is looked at
_INTEGERS = 1 << 63  # a shell's integers are below
_DEPTH = 20  # of variables whose values are arithmetic
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#\w+|0[xX][\da-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*(?:\[[^]]*\])?)"
    r"|(?P<operator><<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:,()]))",
    re.ASCII,
)
_ASSIGNS = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:<<=|>>=|[-+*/%&|^]?=(?!=)|\+\+|--)"
    r"|(?:\+\+|--)\s*([A-Za-z_]\w*)",
    re.ASCII,
)


class NotKnownError(ValueError):
    """Arithmetic whose value is not known. needs: the variables that would tell."""

    def __init__(self, *needs: str) -> None:
        super().__init__(*needs)
        self.needs = needs


def _divided(one: int, other: int) -> int:
    if other == 0:
        raise NotKnownError
    size = abs(one) // abs(other)
    return size if (one < 0) == (other < 0) else -size  # towards zero


def _shift(one: int, other: int) -> int:
    if not 0 <= other < 64:
        raise NotKnownError
    return one << other


def _power(one: int, other: int) -> int:
    if not 0 <= other <= 64:
        raise NotKnownError
    return one**other


_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = MappingProxyType(
    {
        "||": (1, lambda a, b: int(bool(a or b))),
        "&&": (2, lambda a, b: int(bool(a and b))),
        "|": (3, operator.or_),
        "^": (4, operator.xor),
        "&": (5, operator.and_),
        "==": (6, lambda a, b: int(a == b)),
        "!=": (6, lambda a, b: int(a != b)),
        "<": (7, lambda a, b: int(a < b)),
        "<=": (7, lambda a, b: int(a <= b)),
        ">": (7, lambda a, b: int(a > b)),
        ">=": (7, lambda a, b: int(a >= b)),
        "<<": (8, _shift),
        ">>": (8, lambda a, b: a >> min(max(b, 0), 63)),
        "+": (9, operator.add),
        "-": (9, operator.sub),
        "*": (10, operator.mul),
        "/": (10, _divided),
        "%": (10, lambda a, b: a - b * _divided(a, b)),
        "**": (11, _power),
    }
)


def assigned(text: str) -> list[str]:
    """The variables that arithmetic may set."""
    return [one or other for one, other in _ASSIGNS.findall(text)]


class Calculator:
    """Computes arithmetic.

    get: the value of a variable, by NAME or NAME[index]; raises NotKnownError.
    put: takes an assignment.
    sets: whether a variable's value was arithmetic that sets one.
    """

    def __init__(self, get: Callable[[str], str], put: Callable[[str, str], None]) -> None:
        self._get = get
        self._put = put
        self._tokens: list[tuple[str, str]] = []
        self._depth = 0
        self.sets = False

    def value(self, text: str) -> int:
        """The value of an expression. Raises NotKnownError."""
        if len(text) > LONGEST or self._depth > _DEPTH:
            raise NotKnownError
        outer = self._tokens
        self._tokens = _tokens(text)
        self._depth += 1
        try:
            result = self._comma() if self._tokens else 0
            if self._tokens:
                raise NotKnownError
        finally:
            self._tokens = outer
            self._depth -= 1
        return result

    def _peek(self) -> str:
        return self._tokens[0][1] if self._tokens and self._tokens[0][0] == "operator" else ""

    def _pop(self, text: str = "") -> str:
        if not self._tokens or (text and self._tokens[0][1] != text):
            raise NotKnownError
        return self._tokens.pop(0)[1]

    def _comma(self, live: bool = True) -> int:
        value = self._assigned(live)
        while self._peek() == ",":
            self._pop()
            value = self._assigned(live)
        return value

    def _assigned(self, live: bool) -> int:
        if len(self._tokens) > 1 and self._tokens[0][0] == "name":
            kind, sign = self._tokens[1]
            if kind == "operator" and sign.endswith("=") and sign not in ("==", "!=", "<=", ">="):
                name = self._pop()
                self._pop()
                before = self._of(name) if live and sign != "=" else 0
                value = self._assigned(live)
                value = value if sign == "=" or not live else _BINARY[sign[:-1]][1](before, value)
                return self._set(name, value, live)
        return self._chosen(live)

    def _chosen(self, live: bool) -> int:
        value = self._binary(1, live)
        if self._peek() != "?":
            return value
        self._pop()
        one = self._comma(live and value != 0)
        self._pop(":")
        other = self._assigned(live and value == 0)
        return one if value else other

    def _binary(self, least: int, live: bool) -> int:
        value = self._unary(live)
        while (sign := self._peek()) in _BINARY and _BINARY[sign][0] >= least:
            rank, compute = _BINARY[sign]
            self._pop()
            needed = not (sign == "&&" and value == 0 or sign == "||" and value != 0)
            other = self._binary(rank if sign == "**" else rank + 1, live and needed)
            value = _checked(compute(value, other)) if live else 0
        return value

    def _unary(self, live: bool) -> int:
        sign = self._peek()
        if sign in ("++", "--"):
            self._pop()
            name = self._pop()
            return (
                self._set(name, self._of(name) + (1 if sign == "++" else -1), live) if live else 0
            )
        if sign in ("!", "~", "+", "-"):
            self._pop()
            value = self._unary(live)
            return {"!": int(not value), "~": ~value, "+": value, "-": -value}[sign]
        if sign == "(":
            self._pop()
            value = self._comma(live)
            self._pop(")")
            return value
        if not self._tokens or sign:
            raise NotKnownError
        kind, text = self._tokens.pop(0)
        if kind == "number":
            return _number(text)
        value = self._of(text) if live else 0
        if self._peek() in ("++", "--"):
            step = 1 if self._pop() == "++" else -1
            self._set(text, value + step, live)
        return value

    def _of(self, name: str) -> int:
        text = self._get(name)
        self.sets = self.sets or bool(assigned(text))
        return self.value(text)

    def _set(self, name: str, value: int, live: bool) -> int:
        if live:
            self._put(name, str(_checked(value)))
        return value


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens = []
    at = 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotKnownError
        tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
        at = match.end()
    return tokens


def _number(text: str) -> int:
    base, _, digits = text.rpartition("#")
    try:
        if base:
            return _checked(int(digits, int(base)))
        if text[:2] in ("0x", "0X"):
            return _checked(int(text, 16))
        return _checked(int(text, 8 if text[0] == "0" else 10))
    except ValueError:
        raise NotKnownError from None


def _checked(value: int) -> int:
    if not -_INTEGERS <= value < _INTEGERS:
        raise NotKnownError
    return value
