"""What propagation may assume about weights before it walks the graph."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .placement import Cut

AS_PLANNED = "as the plan says"


@dataclass
class Choices:
    """What propagation may assume about weights; restarts add to it."""

    roles: Mapping[str, str] = field(default_factory=dict)  # name -> what it has in common with other layers' weights
    banned: dict[str, str] = field(default_factory=dict)  # role or name -> why
    blocks: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)  # (role, extent) -> blocks
    row: tuple[str, ...] = ()  # names of weights whose input features are to be divided
    whole: dict[str, str] = field(default_factory=dict)  # name -> why it was left whole though nothing banned it
    pins: Mapping[str, Cut | None] = field(default_factory=dict)  # name -> how a plan divides it, None: not at all

    def ban(self, name: str) -> str | None:
        """Why a weight must stay whole."""
        if name in self.pins:
            return None if self.pins[name] else AS_PLANNED
        return self.banned.get(name) or self.banned.get(self.role(name))

    def role(self, name: str) -> str:
        return self.roles.get(name, name)
