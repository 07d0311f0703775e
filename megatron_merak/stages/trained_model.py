"""A model on this rank with its optimizer: what all kinds of jobs have in common."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..checkpoint.store import Shard
from ..config import OptimizerConfig
from ..optimizer.base import Rates, StepResult
from ..optimizer.loss_scale import LossScaler
from ..parallel.agree import together
from ..parallel.buffers import Flat
from ..parallel.mesh import Mesh
from ..plan import Plan
from ..runtime.executor import Executor
from ..runtime.executors import Executors
from ..runtime.parameters import RankParameters
from ..runtime.recordings import enter_own_stream
from ..runtime.stage import Stage
from .constants import Constants
from .not_finite import first_not_finite
from .optimizer_state import OptimizerOf
from .replicas import Replicas


class TrainedModel:
    """This rank's stages of a model, their parameters, the executors of its plan, and its
    optimizer.

    stages:                 by global index.
    parameters:             of all these stages.
    optimizer, scaler:      settings of the optimizer, and the loss scaler in fp16.
    optimizer_of:           makes the optimizer.
    replica_check_interval: optimizer steps between two comparisons of replicas' weights, and of
                            what ranks launched, 0 for none.
    graph_warm_up:          steps before one is recorded in CUDA graphs; None: none is.

    ``iteration``: optimizer steps done.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        parameters: RankParameters,
        optimizer: OptimizerConfig,
        scaler: LossScaler | None,
        optimizer_of: OptimizerOf,
        replica_check_interval: int,
        graph_warm_up: int | None = None,
    ):
        if graph_warm_up is not None:
            enter_own_stream(mesh.device)
        self.plan = plan
        self.mesh = mesh
        self.stages = stages
        self.parameters = parameters
        self.buffer = parameters.buffer
        self.gatherer = parameters.gatherer
        with together(mesh.control, "cpu"):  # memory may end here, and others would wait
            self.optimizer = optimizer_of(parameters, optimizer, scaler)
        self.replicas = Replicas(
            mesh, self.optimizer, self.gatherer, replica_check_interval, stages=stages
        )
        self.executors = Executors(
            stages, plan.schedule, mesh, graph_warm_up, message=plan.largest_message
        )
        self.iteration = 0

    def executor(self, micro_batches: int, training: bool = True) -> Executor:
        """Return the executor of steps of this many micro-batches; of forwards only where not
        ``training``.
        """
        return self.executors.of(micro_batches, training)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the model as it was built, in sentences."""
        return ()

    def from_samples(
        self, batches: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Mapping[str, Tensor]]:
        """Return what `backward` takes, given micro-batches of a GPT data set."""
        return batches

    def begin_step(self, rates: Rates) -> None:
        """Called with the rates of a step before its `backward`, which uses them where its schedule
        updates weights on its way.
        """

    def backward(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        """Compute one step's gradient, and return what its loss is made of without waiting for the
        device.

        batches: this replica's micro-batches, on every rank of the replica.

        The result is for `update`; None on ranks that do not learn the loss. In fp16 the gradient
        stays multiplied by the loss scale. Subclasses run it ``in_step`` of the mesh's pulse.
        """
        raise NotImplementedError

    def loss(self, values: Sequence[float]) -> float:
        """Return the loss of a step from the values of what `backward` returned."""
        raise NotImplementedError

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes what a later `backward` changes beside the gradient."""
        return lambda: None

    def first_not_finite(
        self, batches: Sequence[Mapping[str, Tensor]], iteration: int | None = None
    ) -> str:
        """Return where the numbers of a step stop being finite; see ``not_finite``. Collective over
        all ranks.

        batches:   of that step, as `backward` took them.
        iteration: steps done before it; None: it is the last one, which was skipped.
        """
        return first_not_finite(
            self, batches, self.iteration - 1 if iteration is None else iteration
        )

    @property
    def settled(self) -> bool:
        """Whether it is decided how micro-batches run; until then a `backward` may run some more
        than once.
        """
        return True

    def admit(self, batches: Sequence[Mapping[str, Tensor]], training: bool) -> None:
        """Prepare for ``batches`` whose shapes may be new."""

    def gradients(self, *arguments: Any) -> float | None:
        """Return the loss of one step, and leave its gradient in ``buffer.main_grad``. For
        arguments see `backward`.
        """
        reduced = self.backward(*arguments)
        self.optimizer.unscale()
        return None if reduced is None else self.loss(reduced.tolist())

    def update(
        self, rates: Rates, reduced: Tensor | None = None, zeros: Tensor | None = None
    ) -> StepResult:
        """Update the parameters by the gradient: the second half of a step.

        rates:   per parameter group, learning rate and weight decay.
        reduced: what ``backward`` returned.
        zeros:   0-d, the number of zeros in the gradient.

        ``reduced`` and ``zeros`` are read together with the gradient norm, in the step's only host
        synchronisation.
        """
        with self.mesh.pulse.in_step(self.iteration + 1, completes=True):
            return self._update(rates, reduced, zeros)

    def _update(self, rates: Rates, reduced: Tensor | None, zeros: Tensor | None) -> StepResult:
        self.mesh.pulse.at("update")
        self.gatherer.restore_gradient()
        with self.mesh.clock.on_host() if self.buffer.on_host else nullcontext():
            values, counts, result = self.optimizer.reduce_and_step(reduced, zeros, rates)
        loss = self.loss(values) if values else None
        self.gatherer.launch()
        self.iteration += 1
        self.replicas.record_norm(result.grad_norm, self.iteration)
        return replace(result, loss=loss, zeros=int(counts[0]) if counts else None)

    def mean_loss(self, batches: Sequence[Mapping[str, Tensor]]) -> float | None:
        """Return the mean loss per token of one global batch without dropout; None on ranks that do
        not learn it.
        """
        raise NotImplementedError

    def shards(self, flat: Flat, names: Collection[str] | None = None) -> Iterable[Shard]:
        """Return ``flat`` ([buffer.size]: weights, gradients or optimizer state) as shards of
        HuggingFace tensors.

        names: of parameters; None: all.
        """
        raise NotImplementedError

    def others(self) -> Sequence[Shard]:
        """Shards of what checkpoints have beside the trained parameters."""
        return ()

    def running_state(self) -> Sequence[Shard]:
        """Those of `others` that forwards change, so that no update makes them again."""
        return ()

    def constants(self) -> Constants:
        """Buffers that checkpoints have, and that training does not change."""
        return {}

    def flops(self) -> float:
        """Return the FLOPs of a step, forward and backward, over all ranks; repeated work counts
        once.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any] | None:
        """The model's own configuration, JSON-safe; None if the configuration of the run says it
        all.
        """
        return None

    def after_load(self) -> None:
        """Called when a checkpoint has been loaded into the shards."""
