"""Convert plain JSON values to dataclasses, with every type checked."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from megatron_merak.errors import PlanError


def record(item: object) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}  # type: ignore[arg-type]


def build(make: Callable[..., Any], row: Mapping[str, Any]) -> Any:
    """Call ``make`` with a JSON object as keywords; lists become tuples; a dataclass accepts only
    its fields.
    """
    try:
        values = {name: _tuples(value) for name, value in row.items()}
        for name, hint in get_type_hints(make).items() if isinstance(make, type) else ():
            if name in values and not _fits(values[name], hint):
                raise TypeError(f"{name} is {str(values[name])[:40]!r}")
        return make(**values)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        what = getattr(make, "__qualname__", str(make))
        raise PlanError(
            "plan", what, f"the stored values do not fit ({error})", "Correct the stored plan"
        ) from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a field's type; an integer is also a float."""
    arms = get_args(hint)
    if isinstance(hint, UnionType):
        return any(_fits(value, arm) for arm in arms)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        arms = arms[:1] * len(value) if arms[-1] is Ellipsis else arms
        return len(value) == len(arms) and all(map(_fits, value, arms))
    return type(value) is hint or (hint is float and type(value) is int)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def rows_of(kind: type, rows: tuple[Mapping[str, Any], ...]) -> tuple[Any, ...]:
    return tuple(build(kind, row) for row in rows)
