"""Warn of parameters that some training batches use and others do not; torch optimizers skip those
without gradient.
"""

import warnings
from collections.abc import Collection

from ..parallel.mesh import Mesh

_NAMED = 4


class Unused:
    """Warns once of each parameter of a model.

    names:    the parameters that were warned of.
    left_out: whether steps leave out what their batches do not use, so that there is nothing to
              warn of.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.left_out = False

    def warn(self, first: Collection[str], present: Collection[str], mesh: Mesh) -> None:
        """Warn, on one rank of the replica, of the parameters that the first batch uses and this
        one does not.

        first, present: the names of the trainable parameters that the first and this batch use.
        """
        missing = sorted({*first} - {*present} - {*self.names})
        self.names |= dict.fromkeys(missing)
        if not missing or self.left_out or mesh.layer_rank or mesh.pp_rank:
            return
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        text = (
            f"{', '.join(missing[:_NAMED])}{more}: some batches do not use these parameters. In "
            "a step without them "
            "torch.optim.AdamW leaves them as they are; here their gradient is 0 then, so weight "
            "decay and Adam's "
            "moments still change them. Let every step have a batch that uses them, if that matters"
        )
        warnings.warn(text, stacklevel=2)
