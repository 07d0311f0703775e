"""The groups of pointwise operations that one rank compiles."""

import time
from collections.abc import Container

from ..counting import counted
from ..graph.fusion.bundles import Known, bundle
from ..graph.ir.bundle import Bundle
from ..graph.lowering.rewrite import Rewritten
from ..parallel.mesh import Mesh


class CompiledBundles:
    """What is compiled of the programs of a rank: groups that compute the same are compiled once.

    count, seconds: of groups that were compiled.
    """

    def __init__(self) -> None:
        self._known: Known = {}
        self.count = 0
        self.seconds = 0.0

    def add(self, rewritten: Rewritten, units: Container[int], mesh: Mesh) -> None:
        """Replace groups of pointwise operations of a graph, and compile those of some units.

        Raises ConfigError where torch.compile cannot.
        """
        bundle(rewritten, self._known)
        for node in rewritten.graph.nodes:
            made = node.target
            if not isinstance(made, Bundle) or made.compiled or node.meta["unit"] not in units:
                continue
            began = time.perf_counter()
            with mesh.pulse.doing("compiling pointwise operations"):
                made.compile(mesh.device)
            self.seconds += time.perf_counter() - began
            self.count += 1

    @property
    def note(self) -> str:
        """A sentence on what was compiled here."""
        if not self.count:
            return "--compile-pointwise: no group of pointwise operations of this rank is worth it."
        return (
            f"--compile-pointwise: {counted(self.count, 'group')} of pointwise operations compiled "
            f"in {self.seconds:.1f} s; later starts read them from torch.compile's cache."
        )
