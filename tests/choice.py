"""Which cases of a test `make test` runs; `make test-long` runs the others."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def now(cases: Iterable, *places: int) -> list:
    """The cases, of which those that are not at ``places`` are marked long, unless they have a mark."""
    return [case if place in places else _long(case) for place, case in enumerate(cases)]


def _long(case: object) -> ParameterSet:
    if isinstance(case, ParameterSet):
        marks = case.marks or [pytest.mark.long]
        return pytest.param(*case.values, marks=marks, id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
