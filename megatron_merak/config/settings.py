"""Settings: typed, bounded dataclass fields that check their values and know their flags."""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Self

from ..errors import ConfigError
from ..strict_json import not_text

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", tuple: "a list of texts"}


def setting(default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field. Metadata: ``least``/``most`` (inclusive) and ``above``/``below`` (exclusive) bounds, ``choices``,
    ``not_yet`` (choices of Megatron-LM that do not exist here), ``megatron`` (its default, where ours differs),
    ``ours`` (Megatron-LM has no such flag), ``bare`` (what the
    flag without a value means)."""
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + field_name.replace("_", "-")


@functools.cache
def value_type(cls: type, name: str) -> type:
    """Return the type of field ``name`` of ``cls``: int, float, str, bool or tuple (of str), without an optional
    None.
    """
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return typing.get_origin(hint) or hint


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that ``name`` was probably meant to be, if any is close."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)), None)


def _range_remedy(metadata: Mapping[str, Any], value: float) -> str | None:
    words = {"least": "at least", "most": "at most", "above": "above", "below": "below"}
    low = metadata.get("least", -math.inf)
    high = metadata.get("most", math.inf)
    if low <= value <= high and metadata.get("above", -math.inf) < value < metadata.get("below", math.inf):
        return None
    return "Use a value " + " and ".join(f"{words[key]} {metadata[key]}" for key in words if key in metadata)


def _check_choice(field: dataclasses.Field, value: str) -> None:
    if value in field.metadata["choices"]:
        return
    reason = "is not one of the choices"
    if value in field.metadata.get("not_yet", ()):
        reason = "is a choice of Megatron-LM that megatron_merak does not have yet"
    unset = ", or leave the flag out" if field.default is None else ""
    raise ConfigError(flag_name(field.name), value, reason, f"Use {' or '.join(field.metadata['choices'])}{unset}")


def checked(cls: type, field: dataclasses.Field, value: Any) -> Any:
    """Return ``value`` in the field's type. Raises ConfigError for another type, out of range, or no choice."""
    flag = flag_name(field.name)
    kind: Any = value_type(cls, field.name)  # Any: comparing types below narrows no value
    if value is None and field.default is None:
        return None
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not kind or (kind is tuple and not all(isinstance(item, str) for item in value)):
        raise ConfigError(flag, repr(value), f"is not {_KINDS[kind]}", f"Give {_KINDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(flag, value, "is not a finite number", "Give a finite number")
    if value == "" != field.default or kind is tuple and "" in value:
        raise ConfigError(flag, repr(value), "is empty", "Give a value, or leave the flag out")
    for text in (value,) if kind is str else value if kind is tuple else ():
        if (reason := not_text(text)) is not None:
            raise ConfigError(flag, repr(text), reason, "Give text without it")
    if kind in (int, float) and (remedy := _range_remedy(field.metadata, value)):
        raise ConfigError(flag, value, "is out of range", remedy)
    if "choices" in field.metadata:
        _check_choice(field, value)
    return value


def known_keys(kind: str, mapping: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Return ``mapping``, if it is a mapping with no key outside ``names``. Raises ConfigError."""
    names = list(names)
    if not isinstance(mapping, Mapping):
        raise ConfigError(kind, repr(mapping), "is not a mapping", f"Give a mapping with the keys {', '.join(names)}")
    for key in mapping:
        if key not in names:
            close = nearest(str(key), names)
            raise ConfigError(kind, key, "is not a known key", f"The nearest is {close}" if close else "Remove it")
    return mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the configuration sections: checks and normalises each value, and reads itself from a dict."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(type(self), field, getattr(self, field.name)))

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Return the section with these values, and defaults elsewhere. Raises ConfigError for an unknown or missing
        key.
        """
        fields = dataclasses.fields(cls)
        known_keys(cls.__name__, values, [field.name for field in fields])
        missing = [flag_name(f.name) for f in fields if f.default is dataclasses.MISSING and f.name not in values]
        if missing:
            raise ConfigError(", ".join(missing), "(missing)", "has no default", "Give a value")
        return cls(**values)
