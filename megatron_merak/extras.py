"""How what a run needs and this environment lacks is installed: the one place that says it.

No package index has this project, so a clone is what ``pip install`` is given.
"""

from importlib.util import find_spec


def installed_by(extra: str = "") -> str:
    """Return how the libraries of an extra of pyproject.toml are installed; "": those that every
    run needs.
    """
    what = f"'.[{extra}]'" if extra else "."
    return f"pip install -e {what} in a clone"


def is_installed(library: str) -> bool:
    return find_spec(library) is not None
