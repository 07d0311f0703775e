"""A training state as any program's checkpoint has it: what every format here is read into and written from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint.hf import Source
from ..errors import CheckpointError

WEIGHTS = "model"
# of AdamW, fp32; "master" holds the fp32 weights where those of the model are bf16 or fp16
MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


@dataclass(frozen=True)
class PortableState:
    """Weights and optimizer state of one model, in HuggingFace's names and orientation.

    kinds:            `WEIGHTS`, and with optimizer state `MOMENTS` and perhaps `MASTER`: the tensors,
                      read on demand; a tied tensor may be there under one of its names only.
    config:           the model's config.json.
    iteration:        steps that the run had taken; 0 for weights without a run.
    optimizer_steps:  updates behind ``exp_avg`` (of Adam's bias correction); 0 without optimizer state.
    consumed_samples: samples that the run had read; 0 where the format does not say.
    groups:           of AdamW, as torch has them: the names in ``params``, ``lr``, ``betas``, ``eps``
                      and ``weight_decay``; none where the format does not say.
    """

    kinds: Mapping[str, Source]
    config: Mapping[str, Any]
    iteration: int = 0
    optimizer_steps: int = 0
    consumed_samples: int = 0
    groups: Sequence[Mapping[str, Any]] = ()

    @property
    def has_optimizer(self) -> bool:
        """Whether there is optimizer state."""
        return MOMENTS[0] in self.kinds


def check_whole(kind: str, source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if one kind of a state is not that of each parameter of a model.

    shapes: of the model's parameters.
    """
    known = {*source.names()}
    for name, shape in shapes.items():
        if name not in known:
            reason = f"the state has no {kind} of it, as where it was frozen"
            remedy = "Give the state of the whole model, or leave out the optimizer's with --no-load-optim"
            raise CheckpointError("tensor", name, reason, remedy)
        if source.shape(name) != shape:
            reason = f"its {kind} has shape {source.shape(name)}, and the model {shape}"
            raise CheckpointError("tensor", name, reason, "Give the state of this model")
