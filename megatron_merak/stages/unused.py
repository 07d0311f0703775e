"""Parameters that some training batches use and others do not: optimizers of torch leave those without a gradient."""

import warnings
from collections.abc import Collection

from ..parallel.mesh import Mesh

_NAMED = 4


class Unused:
    """What was said of one model, so that it is said once of every parameter."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def tell(self, first: Collection[str], present: Collection[str], mesh: Mesh) -> None:
        """Warn, on one rank of the replica, of the parameters that a batch does not use and the first one does.

        first, present: names of the trainable parameters that the two batches use.
        """
        found = sorted({*first} - {*present} - {*self.names})
        self.names |= dict.fromkeys(found)
        if not found or mesh.tp_rank or mesh.pp_rank:
            return
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        text = (
            f"{', '.join(found[:_NAMED])}{more}: some batches do not use these parameters. In a step without them "
            "torch.optim.AdamW leaves them as they are; here their gradient is 0 then, so weight decay and Adam's "
            "moments still change them. Let every step have a batch that uses them, if that matters"
        )
        warnings.warn(text, stacklevel=2)
