"""Patterns of a shell, with a backslash before what is text in them, and what they cut off or replace."""

import re
from collections.abc import Callable

_MATCHED = 512  # characters of a value that patterns are tried on
_CLASSES = {
    "alpha": "A-Za-z",
    "digit": "0-9",
    "alnum": "A-Za-z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "xdigit": "0-9A-Fa-f",
}


def escaped(text: str) -> str:
    """A text as a pattern that only it fits."""
    return re.sub(r"([\\*?\[\]@!+(){}|^-])", r"\\\1", text)


def compiled(pattern: str) -> re.Pattern[str] | None:
    """A pattern as a regular expression; None for one that is not known here."""
    out = []
    at = 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
            out.append(re.escape(pattern[at : at + 1]))
        elif letter in "@!+?*" and pattern[at + 1 : at + 2] == "(":
            return None
        elif letter == "*":
            out.append(".*")
        elif letter == "?":
            out.append(".")
        elif letter == "[" and (
            match := re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|[^]])*)\]").match(pattern, at)
        ):
            inner = _inside(match[2])
            if inner is None:
                return None
            out.append(f"[{'^' if match[1] else ''}{inner}]")
            at = match.end() - 1
        else:
            out.append(re.escape(letter))
        at += 1
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error:
        return None


def _inside(text: str) -> str | None:
    """What is between brackets; None for classes that are not known here."""
    if any(name not in _CLASSES for name in re.findall(r"\[:(\w+):\]", text)):
        return None
    text = re.sub(r"\[:(\w+):\]", lambda match: f"\0{match[1]}\0", text)
    text = re.sub(r"\\(.)|([\[\]\\&~|^])", lambda match: f"\\{match[1] or match[2]}", text)
    return re.sub(r"\0(\w+)\0", lambda match: _CLASSES[match[1]], text)


def cut(value: str, operation: str, pattern: str) -> str | None:
    """What %, %%, # or ## leaves of a value; None where it is not known."""
    fits = compiled(pattern)
    if fits is None or len(value) > _MATCHED:
        return None
    front = operation[0] == "#"
    places = range(len(value) + 1)
    # the shortest end, the longest beginning
    places = places[::-1] if operation in ("%", "##") else places
    for at in places:
        if fits.fullmatch(value[:at] if front else value[at:]):
            return value[at:] if front else value[:at]
    return value


def replaced(value: str, pattern: str, new: str, every: bool) -> str | None:
    """A value in which what a pattern fits is replaced; None where it is not known."""
    if not re.search(r"(?<!\\)[*?\[]|^[#%]", pattern):
        plain = re.sub(r"\\(.)", r"\1", pattern)
        return value.replace(plain, new, -1 if every else 1) if plain else value
    anchor = pattern[:1] if pattern[:1] in ("#", "%") else ""
    fits = compiled(pattern[len(anchor) :])
    if fits is None or len(value) > _MATCHED:
        return None
    if anchor:
        # the longest, as everywhere in this operation
        ends = range(len(value), -1, -1)
        if anchor == "#":
            end = next((each for each in ends if fits.fullmatch(value[:each])), None)
            return value if end is None else new + value[end:]
        start = next((at for at in range(len(value) + 1) if fits.fullmatch(value[at:])), None)
        return value if start is None else value[:start] + new
    out = ""
    at = 0
    while at < len(value):
        end = next((e for e in range(len(value), at, -1) if fits.fullmatch(value[at:e])), None)
        if end is None:
            out += value[at]
            at += 1
            continue
        out += new
        at = end
        if not every:
            break
    return out + value[at:]


def cased(value: str, operation: str) -> str:
    """A value, or its first letter, in another case."""
    change: Callable[[str], str] = str.upper if operation[0] == "^" else str.lower
    return change(value) if len(operation) == 2 else change(value[:1]) + value[1:]
