"""Cases of a test that `make test` leaves to `make test-long`."""

from typing import Any

import pytest


def later(*values: Any, name: str | None = None) -> Any:
    """A case that `make test-long` runs, in the list of cases of a test.

    name: of the case; None: from its values.
    """
    return pytest.param(*values, marks=pytest.mark.long, id=name)
