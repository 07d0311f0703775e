"""What a run of training asks of its trainer; the rest of a trainer is transformers' interface to
its users.
"""

from typing import Protocol

import torch.distributed as dist
from torch import nn
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from ...parallel.mesh import Mesh
from ...stages.captured import CapturedModel
from ..arguments.merak_arguments import MerakArguments
from ..batches.feed import Feed
from ..batches.order import Batch
from .rates import LearningRate


class TrainerOfRun(Protocol):
    """A trainer, as its `TrainingLoop` sees it.

    state, control: the loop replaces and sets them, as that of transformers does.
    first_tokens:   input tokens that were seen before the run; the loop sets it.
    mesh:           groups of this rank.
    feed:           makes its batches, and has the tokenizer.
    beside:         a submodule that is not saved with the model, "" for none.
    control_group:  all ranks, for agreement on the CPU.
    """

    args: MerakArguments
    callback_handler: CallbackHandler
    state: TrainerState
    control: TrainerControl
    first_tokens: int
    mesh: Mesh
    feed: Feed
    beside: str

    @property
    def model(self) -> nn.Module: ...
    @property
    def engine(self) -> CapturedModel: ...
    @property
    def control_group(self) -> dist.ProcessGroup | None: ...

    def is_world_process_zero(self) -> bool: ...
    def is_local_process_zero(self) -> bool: ...

    def learning_rate(self, steps: int) -> LearningRate:
        """Return the rates of a run of ``steps``."""

    def prepare_step(self, batches: list[Batch]) -> list[Batch]:
        """Return this replica's micro-batches of a step as the engine takes them."""

    def note_reports(self, batches: list[Batch], prepared: list[Batch]) -> None:
        """Called after the backwards of a step; see ``MerakTrainer``."""

    def evaluate(self, *, ignore_keys: list[str] | None = None) -> dict[str, float]: ...
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...
    def store_flos(self) -> None: ...
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None: ...
