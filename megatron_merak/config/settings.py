"""Settings: typed, bounded dataclass fields that check their values and know their flags."""

import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Self

from ..errors import ConfigError
from ..strict_json import not_text

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of texts",
}


@dataclasses.dataclass(frozen=True)
class InPlan:
    """Where a stored plan has what a setting decided.

    path:  attributes of a ``Plan``, joined by dots.
    on:    the plan's value that stands for a switch that is on; None: the plan has the setting's
           own value.
    taken: whether the plan takes over what is given; otherwise planning, or several settings, make
           the value.
    """

    path: str
    on: object = None
    taken: bool = False

    def read(self, plan: object) -> Any:
        """Return the setting that ``plan`` was made with, or for."""
        value = operator.attrgetter(self.path)(plan)
        return value if self.on is None else value == self.on

    def taken_over(self, given: Any) -> Any:
        """Return the plan's value for a setting that it takes over. A switch stands for true or
        false.
        """
        return given if self.on is None else given == self.on


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a setting has no effect without.

    name:   another setting of the section.
    values: its values with which the setting has an effect; none: all that switch it on.
    reason: other words than "has no effect without" it; {found} stands for its value.
    remedy: other words than to add it.
    """

    name: str
    values: tuple[str, ...] = ()
    reason: str = ""
    remedy: str = ""

    def missing(self, found: Any) -> tuple[str, str] | None:
        """Return the reason and the remedy if ``found``, the value of the other setting, does not
        suffice.
        """
        enough = found in self.values if self.values else not (found is None or found is False)
        if enough:
            return None
        needed = " ".join(
            [flag_name(self.name), *([" or ".join(self.values)] if self.values else [])]
        )
        reason = self.reason or f"has no effect without {needed}"
        return reason.format(found=found), self.remedy or f"Add {needed}, or leave it out"


def setting(default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field. Metadata:

    least, most:  inclusive bounds.
    above, below: exclusive bounds.
    choices:      the possible values.
    not_yet:      choices of Megatron-LM that do not exist here, and what to do instead of each.
    megatron:     its default, where ours differs.
    ours:         whether Megatron-LM has no such flag.
    bare:         what the flag without a value means.
    plan:         an ``InPlan``, if a stored plan decides the setting.
    makes_plan:   whether a plan is made from it, so that it has no effect beside a stored one.
    needs:        a ``Needs`` or several, see ``checks.check_needs``.
    """
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + field_name.replace("_", "-")


@functools.cache
def value_type(cls: type, name: str) -> type:
    """Return the type of field ``name`` of ``cls``: int, float, str, bool or tuple (of str),
    without an optional None.
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
    if low <= value <= high and metadata.get("above", -math.inf) < value < metadata.get(
        "below", math.inf
    ):
        return None
    return "Use a value " + " and ".join(
        f"{words[key]} {metadata[key]}" for key in words if key in metadata
    )


def _check_choice(field: dataclasses.Field, value: str) -> None:
    if value in field.metadata["choices"]:
        return
    reason = "is not one of the choices"
    instead = field.metadata.get("not_yet", {}).get(value)
    if instead is not None:
        reason = "is a choice of Megatron-LM that megatron_merak does not have yet"
    if instead:
        raise ConfigError(flag_name(field.name), value, reason, instead)
    unset = ", or leave the flag out" if field.default is None else ""
    raise ConfigError(
        flag_name(field.name), value, reason, f"Use {' or '.join(field.metadata['choices'])}{unset}"
    )


def checked(cls: type, field: dataclasses.Field, value: Any) -> Any:
    """Return ``value`` in the field's type. Raises ConfigError for another type, out of range, or
    no choice.
    """
    flag = flag_name(field.name)
    kind: Any = value_type(cls, field.name)  # Any: comparing types below narrows no value
    if value is None and field.default is None:
        return None
    if kind is float and type(value) is int and abs(value) < 2**63:
        value = float(value)
    if kind is tuple and isinstance(value, list):
        value = tuple(value)
    if type(value) is not kind or (
        kind is tuple and not all(isinstance(item, str) for item in value)
    ):
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
        for item in value if kind is tuple else (value,):
            _check_choice(field, item)
    return value


def known_keys(kind: str, mapping: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Return ``mapping``, if it is a mapping with no key outside ``names``. Raises ConfigError."""
    names = list(names)
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            kind,
            repr(mapping),
            "is not a mapping",
            f"Give a mapping with the keys {', '.join(names)}",
        )
    for key in mapping:
        if key not in names:
            close = nearest(str(key), names)
            raise ConfigError(
                kind, key, "is not a known key", f"The nearest is {close}" if close else "Remove it"
            )
    return mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """Base of the configuration sections: checks and normalises each value, and reads itself from a
    dict.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(
                self, field.name, checked(type(self), field, getattr(self, field.name))
            )

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Return the section with these values, and defaults elsewhere. Raises ConfigError for an
        unknown or missing key.
        """
        fields = dataclasses.fields(cls)
        known_keys(cls.__name__, values, [field.name for field in fields])
        missing = [
            flag_name(f.name)
            for f in fields
            if f.default is dataclasses.MISSING and f.name not in values
        ]
        if missing:
            raise ConfigError(", ".join(missing), "(missing)", "has no default", "Give a value")
        return cls(**values)
