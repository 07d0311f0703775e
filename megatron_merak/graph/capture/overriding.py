"""The one way in which a capture replaces attributes of torch, transformers and Python while it
runs.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from megatron_merak.errors import TraceError

_ABSENT = object()


@contextmanager
def overriding(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``value`` inside the context, for all threads.

    owner: a module, a class or an object.

    Raises TraceError if there is no such attribute, as in a release of torch or transformers that
    renamed it.
    """
    if not hasattr(owner, name):
        where = _name_of(owner)
        library = where.partition(".")[0]
        version = getattr(sys.modules.get(library), "__version__", "(unknown)")
        reason = f"it has no {where}.{name}, which a capture replaces"
        raise TraceError(
            library, version, reason, "Install a release that megatron_merak's metadata names"
        )
    # As it is stored: getattr would bind a classmethod, and find what a base class has.
    own = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
