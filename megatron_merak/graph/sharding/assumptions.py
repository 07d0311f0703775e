"""What propagation assumes about parameters before it walks the graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .placement import ShardSpec

AS_PLANNED = "as the plan says"


@dataclass
class Assumptions:
    """What propagation assumes about parameters. A walk that finds one wrong corrects it, and goes
    back.

    roles:  name -> what it has in common with other layers' parameters, see roles.py.
    banned: role or name -> why it must stay replicated.
    blocks: (role, number of output features) -> their blocks.
    row:    names of weights that the user wants sharded by their input features.
    pins:   name -> how a plan shards it; None: replicated.
    experts: whether ranks divide experts, each of which has its whole weights.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    banned: dict[str, str] = field(default_factory=dict)
    blocks: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    row: tuple[str, ...] = ()
    pins: Mapping[str, ShardSpec | None] = field(default_factory=dict)
    experts: bool = False

    def ban_reason(self, name: str) -> str | None:
        """Return why a parameter must stay replicated; None if it may be sharded."""
        if name in self.pins:
            return None if self.pins[name] else AS_PLANNED
        return self.banned.get(name) or self.banned.get(self.role(name))

    def role(self, name: str) -> str:
        return self.roles.get(name, name)
