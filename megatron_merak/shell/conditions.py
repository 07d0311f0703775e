"""Whether conditions hold: test, [ ] and [[ ]]."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from .arithmetic import NotKnownError
from .commands import Test
from .left import Unknown
from .patterns import compiled
from .state import ARRAY, Variable
from .values import WordValues, is_unknown
from .words import MARK, Word

Held = bool | Unknown

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
)
_TEXTS = ("=", "==", "!=", "<", ">", "\\<", "\\>", "=~", "-nt", "-ot", "-ef")
_FILES = re.compile(r"-[abcdefghkprstuwxGLNOS]")


def both(one: Held, other: Held) -> Held:
    """One and the other."""
    if one is False or other is False:
        return False
    return one if isinstance(one, Unknown) else other


def inverted(held: Held) -> Held:
    """Not."""
    return held if isinstance(held, Unknown) else not held


def either(one: Held, other: Held) -> Held:
    """One or the other."""
    return inverted(both(inverted(one), inverted(other)))


def tested(values: WordValues, words: Sequence[str]) -> Held:
    """Whether the words of test, or of [ without its ], hold."""
    for joint, join in (("-o", either), ("-a", both)):
        if joint in words[1:-1] and len(words) > 3:
            at = len(words) - 1 - [*reversed(words)].index(joint)
            return join(tested(values, words[:at]), tested(values, words[at + 1 :]))
    if any(map(values.marks.split, words)):
        return _unknown(values, words)
    if words[:1] == ["!"] and len(words) > 1 and not (len(words) == 3 and words[1] in _NUMBERS):
        return inverted(tested(values, words[1:]))
    if len(words) == 2:
        return _alone(values, words[0], words[1])
    if len(words) == 3:
        return _compared(values, words[0], words[1], words[2])
    return _filled(values, words[0]) if len(words) == 1 else False


def matched(values: WordValues, test: Test) -> Held:
    """Whether [[ ]] holds."""
    tokens = [*test.tokens]
    held = _any(values, tokens)
    return Unknown("[[ ]] is not understood") if tokens else held


def _any(values: WordValues, tokens: list[Word | str]) -> Held:
    return _joined(values, tokens, "||", either, part=_all)


def _all(values: WordValues, tokens: list[Word | str]) -> Held:
    return _joined(values, tokens, "&&", both, part=_one)


def _joined(
    values: WordValues,
    tokens: list[Word | str],
    sign: str,
    join: Callable[[Held, Held], Held],
    part: Callable[[WordValues, list[Word | str]], Held],
) -> Held:
    held = part(values, tokens)
    while tokens and tokens[0] == sign:
        del tokens[0]
        held = join(held, part(values, tokens))
    return held


def _one(values: WordValues, tokens: list[Word | str]) -> Held:
    if not tokens:
        return Unknown("[[ ]] is not understood")
    first = tokens.pop(0)
    if first == "(":
        held = _any(values, tokens)
        if tokens:
            del tokens[0]
        return held
    if not isinstance(first, Word):
        return Unknown("[[ ]] is not understood")
    if first.bare == "!":
        return inverted(_one(values, tokens))
    following = tokens[0] if tokens else None
    sign = following.bare if isinstance(following, Word) else following or ""
    ends = following is None or following in ("&&", "||", ")")
    if not ends and (sign in _TEXTS or sign in _NUMBERS) and len(tokens) > 1:
        other = tokens[1]
        del tokens[:2]
        if isinstance(other, str):
            return Unknown("[[ ]] is not understood")
        return _related(values, first, sign, other)
    if not ends and re.fullmatch(r"-\w", first.bare) and isinstance(following, Word):
        del tokens[0]
        return _alone(values, first.bare, values.text(following))
    return _filled(values, values.text(first))


def _related(values: WordValues, first: Word, sign: str, other: Word) -> Held:
    one = values.text(first)
    if sign in ("=", "==", "!="):
        pattern = values.pattern(other)
        if MARK.search(one) or MARK.search(pattern):
            return _unknown(values, [one, pattern])
        fits = compiled(pattern)
        if fits is None:
            return Unknown(f"the pattern {other.plain} is not understood")
        return (fits.fullmatch(one) is not None) == (sign != "!=")
    if sign == "=~":
        return _searched(values, one, other)
    two = values.text(other)
    if sign not in _NUMBERS:
        return _compared(values, one, sign, two)
    if is_unknown([one, two]):
        return _unknown(values, [one, two])
    try:
        return _NUMBERS[sign](values.compute(one), values.compute(two))
    except NotKnownError as error:
        return Unknown(f"{one} {sign} {two} is not known here", error.needs)


def _searched(values: WordValues, text: str, word: Word) -> Held:
    """text =~ word."""
    why = Unknown(f"=~ {word.plain} is not understood")
    pattern = values.pattern(word)
    if is_unknown([text, pattern]):
        return _unknown(values, [text, pattern])
    pattern = re.sub(r"\[:digit:\]", "0-9", re.sub(r"\[:alnum:\]", "0-9A-Za-z", pattern))
    pattern = pattern.replace("[:alpha:]", "A-Za-z").replace("[:space:]", r"\s")
    if re.search(r"\\[\w<>]|\[:|\(\?|[*+?}]\?|[*+?}]\+", pattern):
        values.forget("BASH_REMATCH", why)
        return why
    try:
        match = re.search(pattern.replace("$", r"\Z"), text)
    except re.error:
        values.forget("BASH_REMATCH", why)
        return why
    groups = [match[0], *(each or "" for each in match.groups())] if match else []
    if match and match.re.groups and "|" in pattern:
        # the longest alternative there, the first one here
        values.forget("BASH_REMATCH", why)
        return True
    items = {str(at): each for at, each in enumerate(groups)}
    values.state.variables["BASH_REMATCH"] = Variable(items, ARRAY)
    return match is not None


def _unknown(values: WordValues, words: Sequence[str]) -> Unknown:
    why = values.marks.unknown(words)
    return why or Unknown(values.marks.shown(" ".join(words)))


def _filled(values: WordValues, word: str) -> Held:
    if MARK.sub("", word):
        return True
    return _unknown(values, [word]) if word else False


def _alone(values: WordValues, sign: str, word: str) -> Held:
    if sign in ("-n", "-z"):
        held = _filled(values, word)
        return held if sign == "-n" else inverted(held)
    if sign == "-v":
        if is_unknown([word]):
            return _unknown(values, [word])
        name, _, index = word.removesuffix("]").partition("[")
        found = values.elements(name, index or None)
        if found is None:
            return Unknown(f"-v {word}", (name,))
        return found if isinstance(found, Unknown) else bool(found)
    if _FILES.fullmatch(sign):
        return Unknown(f"{sign} {values.marks.shown(word)}")
    return Unknown(f"{sign} is not understood")


def _compared(values: WordValues, one: str, sign: str, other: str) -> Held:
    if sign == "!=" or sign in ("=", "=="):
        if is_unknown([one, other]):
            return _unknown(values, [one, other])
        return (one == other) == (sign != "!=")
    if is_unknown([one, other]) or sign in ("-nt", "-ot", "-ef"):
        return _unknown(values, [one, sign, other])
    if sign in _NUMBERS:
        numbers = [re.fullmatch(r"\s*([-+]?\d{1,18})\s*", each) for each in (one, other)]
        if None in numbers:
            return False
        return _NUMBERS[sign](int(one), int(other))
    if sign in ("<", ">", "\\<", "\\>"):
        # as the locale orders letters
        return one == other if one == other else Unknown(f"{one} {sign} {other}")
    return False
