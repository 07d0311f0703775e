"""What is known of a shell at a place of a script."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .commands import Command
from .left import Unknown

ARRAY = "array"
TABLE = "table"


@dataclass(frozen=True)
class Variable:
    """What the script has made of a variable.

    items:    its values by index; one that is no array has that of 0, one that is not set has none.
    kind:     ARRAY, TABLE for declare -A, or empty.
    exported: whether programs see it.
    fixed:    whether it is readonly.
    integer:  whether what it is set to is arithmetic.
    unknown:  why it is not known; None: it is.
    perhaps:  why it is not known whether it is exported; None: it is.
    """

    items: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    exported: bool = False
    fixed: bool = False
    integer: bool = False
    unknown: Unknown | None = None
    perhaps: Unknown | None = None

    @property
    def values(self) -> list[str]:
        return [*self.items.values()]


@dataclass(frozen=True)
class SetupLine:
    """A line in front of the command: what it makes of a variable. moves: changes of the directory
    before it.
    """

    name: str
    variable: Variable
    moves: int = 0


@dataclass
class ShellState:
    """What the script has done so far.

    variables: those that it has set or unset; others are the environment's.
    scopes:    of each function that runs, what its local variables hide.
    functions: by name; None for one that may be another.
    arguments: $1, $2 and so on; None: those that the script is started with.
    options:   of set -e and the like.
    moves:     the words of the commands that changed the directory; none for an unknown one.
    flow:      "exit", "return", "break" or "continue", where one of them was met.
    levels:    how many loops break and continue leave.
    blurred:   flows that may have been met, and why that is not known.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    scopes: tuple[Mapping[str, Variable | None], ...] = ()
    functions: dict[str, Command | None] = field(default_factory=dict)
    arguments: tuple[str, ...] | Unknown | None = None
    options: frozenset[str] = frozenset()
    moves: tuple[tuple[str, ...], ...] = ()
    flow: str = ""
    levels: int = 1
    blurred: tuple[tuple[str, Unknown], ...] = ()

    def copy(self) -> "ShellState":
        """The state of a shell that goes on apart from this one."""
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def changed(self, before: "ShellState") -> list[str]:
        """The variables that are not what they were."""
        names = dict.fromkeys([*before.variables, *self.variables])
        return [n for n in names if self.variables.get(n) != before.variables.get(n)]

    def lose(self, names: list[str], why: Unknown, *others: "ShellState") -> None:
        """Variables are not known any more, nor whether they are exported where others differ."""
        for name in names:
            variable = self.variables.get(name, Variable())
            states = [state.variables.get(name, Variable()).exported for state in others]
            if any(states) and not all((*states, variable.exported)):
                variable = replace(variable, exported=True, perhaps=variable.perhaps or why)
            self.variables[name] = replace(variable, unknown=variable.unknown or why)

    def blur(self, start: "ShellState", names: list[str], why: Unknown) -> "ShellState":
        """What is known where not all was run since ``start``, which changed names."""
        before = replace(start, flow=self.flow, scopes=self.scopes, blurred=())
        both = self.joined(before, why)
        both.lose(names, why, start)
        return both

    def joined(self, other: "ShellState", why: Unknown) -> "ShellState":
        """What is known where this state or another holds."""
        if "exit" in (self.flow, other.flow) and self.flow != other.flow:
            return other if self.flow == "exit" else self
        if self.flow != other.flow:
            ended = self.flow or other.flow
            both = replace(self, flow="").joined(replace(other, flow=""), why)
            both.blurred = (*both.blurred, (ended, why))
            return both
        both = self.copy()
        both.lose(self.changed(other), why, self, other)
        for name in dict.fromkeys([*self.functions, *other.functions]):
            if self.functions.get(name) != other.functions.get(name):
                both.functions[name] = None
        if self.arguments != other.arguments:
            both.arguments = why
        if self.options != other.options:
            both.options = self.options | other.options
            if "e" in self.options ^ other.options:
                both.options |= {"perhaps e"}
        if self.moves != other.moves:
            both.moves = (*self.moves, ())
        both.blurred = tuple(dict.fromkeys([*self.blurred, *other.blurred]))
        return both
