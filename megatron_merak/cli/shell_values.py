"""What a shell makes of values that are known: arithmetic, and the operators of ${NAME...}."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

LONGEST = 1000  # characters of arithmetic that is looked at
LARGEST = 1 << 20  # characters that variables of a script become; no shell can pass on as many
_HIGHEST = 64  # power
_INTEGERS = 1 << 63  # a shell's integers are below
_MATCHED = 4096  # characters of a value that patterns are tried on

_BINARY: Mapping[type, Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),  # towards zero
        ast.Mod: lambda a, b: int(math.copysign(abs(a) % abs(b), a)),
        ast.Pow: lambda a, b: a**b if 0 <= b <= _HIGHEST else _unknown(),
    }
)
_COMPARED: Mapping[type, Callable[[int, int], bool]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
)
_BRACED = re.compile(
    r"(?P<count>#)?(?P<name>\w+|@)(?:\[(?P<index>@|\*|\d+)\])?"
    r"(?:(?P<operator>:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:)(?P<argument>.*))?",
    re.DOTALL,
)


def arithmetic(text: str, value_of: Callable[[str], str | None]) -> int | None:
    """Return the value of an arithmetic expression of a shell; None where it is not known.

    text:     what stands in (( )).
    value_of: the value of a variable; None if it is not known.
    """
    text = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda match: match[1] or match[2], text.strip())
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or "))
    if not text or len(text) > LONGEST or "//" in text:
        return None
    try:
        return int(_value(ast.parse(text.strip(), mode="eval").body, value_of))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, value_of: Callable[[str], str | None]) -> int:
    """Raise ValueError for what is not known, or is no arithmetic of a shell."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value if node.value < _INTEGERS else _unknown()
    if isinstance(node, ast.Name):
        text = value_of(node.id)
        if text is None or not re.fullmatch(r"-?(0|[1-9]\d*)", text):
            _unknown()
        number = int(text or "")
        return number if -_INTEGERS <= number < _INTEGERS else _unknown()
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result = _BINARY[type(node.op)](_value(node.left, value_of), _value(node.right, value_of))
        return result if -_INTEGERS <= result < _INTEGERS else _unknown()
    if isinstance(node, ast.UnaryOp):
        # where Python and a shell may group otherwise
        if isinstance(node.operand, ast.BinOp | ast.Compare):
            return _unknown()
        inner = _value(node.operand, value_of)
        if isinstance(node.op, ast.USub):
            return -inner
        if isinstance(node.op, ast.UAdd):
            return inner
        return int(not inner) if isinstance(node.op, ast.Not) else _unknown()
    if isinstance(node, ast.BoolOp):
        values = [_value(each, value_of) != 0 for each in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        left = _value(node.left, value_of)
        right = _value(node.comparators[0], value_of)
        return int(_COMPARED[type(node.ops[0])](left, right))
    return _unknown()


def _unknown() -> int:
    raise ValueError


def braced(
    inside: str,
    values: Mapping[str, list[str]],
    expand: Callable[[str], str],
    assume: Callable[[str, str], None],
) -> str | None:
    """Return what ${inside} becomes; None where it is not known.

    inside: the text between the braces.
    values: what is known of variables; an empty list is one that is not set.
    expand: replaces what stands in an operator's argument.
    assume: told of a variable that is not known, and of the default that is taken.
    """
    match = _BRACED.fullmatch(inside)
    if match is None:
        return None
    name = match["name"]
    index = match["index"]
    operation = match["operator"] or ""
    argument = match["argument"] or ""
    known = values.get(name)
    if index not in (None, "@", "*") and known is not None:
        known = known[int(index) : int(index) + 1]
    if match["count"]:
        if known is None or operation:
            return None
        return str(len(known) if index in ("@", "*") else len(" ".join(known)))
    empty = known in (None, []) or (operation.startswith(":") and known == [""])
    if operation in (":-", "-", ":=", "="):
        if not empty:
            return " ".join(known or [])
        if known is None:
            assume(name, expand(argument))
        return expand(argument)
    if known is None:
        return None
    value = " ".join(known)
    if operation in (":+", "+"):
        return "" if empty else expand(argument)
    if operation in ("", ":?", "?"):
        return value if operation == "" or not empty else None
    return _edited(value, operation, argument, expand)


def _edited(value: str, operation: str, argument: str, expand: Callable[[str], str]) -> str | None:
    """A value with its end or beginning cut off, with replacements, a part of it, or in another
    case.
    """
    if operation in ("%", "%%", "#", "##"):
        if len(value) > _MATCHED:
            return None
        pattern = expand(argument)
        places = range(len(value) + 1)
        front = operation[0] == "#"
        # the shortest end, the longest beginning
        places = places[::-1] if operation in ("%", "##") else places
        fits = (at for at in places if fnmatchcase(value[:at] if front else value[at:], pattern))
        at = next(fits, 0 if front else len(value))
        return value[at:] if front else value[:at]
    if operation in ("/", "//"):
        pattern, _, new = argument.partition("/")
        plain = expand(pattern)
        new = expand(new)
        if any(letter in plain for letter in "*?[#%"):
            return None
        if plain and value.count(plain) * len(new) > LARGEST:
            return None
        return value.replace(plain, new, -1 if operation == "//" else 1) if plain else value
    if operation == ":":
        numbers = re.fullmatch(r" *(\d{1,18})(?:: *(\d{1,18}))?", expand(argument))
        if numbers is None:
            return None
        start = int(numbers[1])
        length = numbers[2]
        return value[start:] if length is None else value[start : start + int(length)]
    if argument:
        return None
    if operation in ("^^", ",,"):
        return value.upper() if operation == "^^" else value.lower()
    return (value[:1].upper() if operation == "^" else value[:1].lower()) + value[1:]
